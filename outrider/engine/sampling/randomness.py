"""Counter-based randomness (invariant I6). Pure.

Every random number of a session is a function of (seed, position, purpose), sometimes of an index beside: nothing to
carry along when a session moves, is replayed or is verified twice. The mixing function is the finalizer of SplitMix64
(Steele, Lea and Flood, OOPSLA 2014), in 64-bit integer arithmetic that is the same on every device.
"""

from __future__ import annotations

import enum

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


class Purpose(enum.IntEnum):
    """The decision that a random number is for; numbers for different purposes are independent."""

    GUMBEL = 1  # the shared noise of coupled sampling
    DRAFT = 2  # which hint the draft samples; the "position" counts its draws
    ACCEPT = 3  # whether a hint is accepted; position of the block's first token, index within the block
    RECOVER = 4  # which token is said instead
    BONUS = 5  # which token follows without a hint


def mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection on 64-bit integers."""
    value = (value + GOLDEN) & MASK_64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK_64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK_64
    return value ^ (value >> 31)


def key(seed: int, position: int, purpose: Purpose, index: int = 0) -> int:
    """A 64-bit integer that looks random in all of its bits; `index` tells several for one purpose apart."""
    return mix(mix(mix(seed) ^ position) ^ purpose ^ (index << 8))


def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """A number in (0, 1) with 52 random bits; with one bit more the greatest would round to 1."""
    return ((key(seed, position, purpose, index) >> 12) + 0.5) * 2.0**-52
