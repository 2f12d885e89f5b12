"""A log of the seeds that have been run, so that a long run can go on where it was stopped.

One JSON object a line, for a block of seeds that was run to its end: the first and how many, the commit, what was
counted, and the failed seeds with their first problem.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


class SeedLog:
    """Blocks are appended as they end. Only one process may write a log at a time."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self._commit = path, commit

    def runs(self) -> list[range]:
        """The blocks that the log has. A line that is cut off counts as none: its writer was killed."""
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                block = json.loads(line)
            except json.JSONDecodeError:
                continue
            found.append(range(block["first"], block["first"] + block["num_runs"]))
        return found

    def append(self, seeds: range, counts: Mapping[str, float], failed: Mapping[int, str]) -> None:
        """Appends a block that has ended."""
        block = {"first": seeds.start, "commit": self._commit, **counts, "failed": failed}
        before = self._path.read_bytes() if self._path.exists() else b""
        is_cut_off = bool(before) and not before.endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_cut_off + json.dumps(block) + "\n")


def blocks_left(seeds: range, done: Iterable[range], num_per_block: int) -> Iterator[range]:
    """The seeds that are not `done` yet, in blocks of at most `num_per_block`."""
    at = seeds.start
    for block in [*sorted(done, key=lambda each: each.start), range(seeds.stop, seeds.stop)]:
        for first in range(at, min(block.start, seeds.stop), num_per_block):
            yield range(first, min(first + num_per_block, block.start, seeds.stop))
        at = max(at, block.stop)


def commit_here() -> str:
    """The commit of this repository, with `-dirty` if the working tree differs from it; `unknown` without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=30)
    return asked.stdout.strip() or "unknown"
