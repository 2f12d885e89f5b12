"""Damage to what lies in Redis: as bad memory, a bad program or a half-written file would do it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

NUM_BYTES_MAX: Final = 40  # of what is made up


def damaged(value: bytes, rng: Random) -> bytes:
    """Another value: bytes at random in its place, a part of it, or some of its bytes changed."""
    how = rng.choice(("random", "truncated", "flipped")) if value else "random"
    if how == "truncated":
        return value[: rng.randrange(len(value))]
    if how == "random":
        made_up = rng.randbytes(rng.randint(1, NUM_BYTES_MAX))
        return made_up if made_up != value else made_up + b"\0"
    changed = bytearray(value)
    for at in rng.sample(range(len(value)), min(len(value), rng.randint(1, 3))):
        changed[at] ^= rng.randint(1, 255)
    return bytes(changed)


def damage(fields: Mapping[bytes, bytes], rng: Random) -> tuple[bytes, bytes | None]:
    """One field of a hash and what it is to be; None: it is to go."""
    name = rng.choice(sorted(fields))
    return name, None if rng.random() < 0.25 else damaged(fields[name], rng)
