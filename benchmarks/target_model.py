"""Which target a benchmark runs: the demo's, another, or one grown to the cost of a larger one."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.grow import grow

DEMO = Path(__file__).resolve().parents[1] / "demo"


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--grown", action="store_true", help="grow the target to 275 M parameters first")


@contextmanager
def target_model(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder of the target that `add_target_arguments` asked for; a grown one goes away afterwards."""
    if not arguments.grown:
        yield arguments.target
        return
    with tempfile.TemporaryDirectory() as scratch:
        grown = Path(scratch) / "grown"
        grow(arguments.target, grown)
        yield grown
