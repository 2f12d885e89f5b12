"""Parts of a session, the most useful first, and how its time is shared out. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

TAIL_S: Final = 15.0
"""Kept for the page, and for the end of a part that is stopped."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a session does, in a process of its own."""

    name: str
    purpose: str
    most_s: float
    least_s: float  # it is not begun with less
    needs: str = ""  # the part that must have succeeded before
    is_for_gpus: bool = False  # it has nothing to do without one


PARTS: Final = (
    Part("device", "the device, and what it reads and computes at most", 60.0, 10.0),
    Part("tests", "tests/engine/test_cuda.py", 170.0, 20.0),
    Part("checkpoints", "random weights of both shapes", 150.0, 20.0),
    Part("engine", "steps, prompts and bits of the target", 200.0, 30.0, needs="checkpoints"),
    Part("pair", "workers: plain, and with the draft on the same device", 240.0, 60.0, needs="checkpoints"),
    Part("own_gpu", "workers: the draft on a second GPU", 120.0, 60.0, needs="checkpoints", is_for_gpus=True),
    Part("cpu_draft", "workers: the draft on the CPU", 150.0, 60.0, needs="checkpoints"),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The decision about a part: how long it may run, or why it does not."""

    seconds: float = 0.0
    why_not: str = ""


def turn(part: Part, left_s: float, wanted: Collection[str], succeeded: Collection[str], num_gpus: int) -> Turn:
    """Decides about the next part, `left_s` seconds before the session's end.

    wanted: names of parts; empty: all. succeeded: parts without an error so far.
    """
    if wanted and part.name not in wanted:
        return Turn(why_not="not asked for")
    if part.needs and part.needs not in succeeded:
        return Turn(why_not=f"it needs the part {part.needs}")
    if part.is_for_gpus and num_gpus < 2:
        return Turn(why_not=f"it needs two GPUs, here {'is' if num_gpus == 1 else 'are'} {num_gpus}")
    seconds = min(part.most_s, left_s - TAIL_S)
    if seconds < part.least_s:
        return Turn(why_not=f"no time: {max(left_s, 0.0):.0f} s are left, it takes {part.least_s:.0f} and more")
    return Turn(seconds)
