"""Figures of a part of a session, written down as they are found: a part that is ended at its limit keeps them."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

Figures = dict[str, Any]
SCRATCH_TARGET: Final = "target"
SCRATCH_DRAFT: Final = "draft"


@dataclass(slots=True)
class Outcome:
    """Figures of one part by name, in a JSON file that is replaced with every figure."""

    path: Path
    figures: Figures = field(default_factory=dict)

    def put(self, name: str, value: Any) -> None:
        """Adds a figure and shows it as progress."""
        self.figures[name] = value
        say(f"  {name}: {value}")
        staging = self.path.with_suffix(".new")
        staging.write_text(json.dumps(self.figures))
        os.replace(staging, self.path)

    def skip(self, what: str, why: str) -> None:
        """Says what was left out."""
        self.put("skipped", [*self.figures.get("skipped", []), f"{what}: {why}"])


@dataclass(frozen=True, slots=True)
class Setting:
    """Folder, time and size of models that a part runs with."""

    scratch: Path  # folder of the checkpoints
    seconds: float  # that the part may take
    is_tiny: bool  # tiny models, on the CPU
    started_at: float = field(default_factory=time.perf_counter)

    @property
    def target(self) -> Path:
        return self.scratch / SCRATCH_TARGET

    @property
    def draft(self) -> Path:
        return self.scratch / SCRATCH_DRAFT

    @property
    def device(self) -> str:
        """torch's name of the device."""
        return "cpu" if self.is_tiny else "cuda"

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.perf_counter() - self.started_at)


def say(words: str) -> None:
    """Prints progress."""
    print(words, file=sys.stderr, flush=True)


def read(path: Path) -> Figures:
    """The figures of a part, as far as it got; none where it wrote nothing."""
    try:
        found: Figures = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
