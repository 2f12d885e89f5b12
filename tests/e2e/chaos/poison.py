"""Prompts that kill whichever target worker computes them, and what makes them do so."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Final

from command_line.checkout import ROOT

FOLDER: Final = Path(__file__).parent / "poisoned"
AT_ONCE: Final = 0
AFTER_A_FEW: Final = 4
"""Steps that decide tokens before the one in which the process dies."""
# In an order that no text has: ids that stand for common pieces of text would do, but for this.
_MARKERS: Final = {AT_ONCE: (1709, 1613, 1709, 1621), AFTER_A_FEW: (1613, 1709, 1621, 1709)}
_PLAIN: Final = range(300, 1500)  # ids of ordinary pieces of text in the demo pair's vocabulary


def environment() -> dict[str, str]:
    """For target workers that are to die of them."""
    recipes = [(marker, num_steps) for num_steps, marker in _MARKERS.items()]
    return {"PYTHONPATH": f"{FOLDER}:{ROOT}", "CHAOS_POISON": json.dumps(recipes)}


def prompt(num_steps: int, rng: Random) -> list[int]:
    """Token ids of one that has not been asked before. It kills after `num_steps` steps: AT_ONCE or AFTER_A_FEW."""
    before, after = ([rng.choice(_PLAIN) for _ in range(rng.randint(8, 40))] for _ in range(2))
    return [*before, *_MARKERS[num_steps], *after]
