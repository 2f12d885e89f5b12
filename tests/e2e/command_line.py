"""Command line parts that the chaos suite and the fuzzer share: a seed, where output goes, and the report of a run."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def new_parser(suite: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the argument parser of `python -m tests.e2e.SUITE`."""
    return argparse.ArgumentParser(
        prog=f"python -m tests.e2e.{suite}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_seed(to: argparse._ActionsContainer, of: str) -> None:
    to.add_argument(
        "--seed",
        type=int,
        default=secrets.randbelow(10**6),
        help=f"of {of} (default: a new one, which is printed)",
    )


def add_output(to: argparse._ActionsContainer) -> None:
    to.add_argument("--json", type=Path, metavar="FILE", help="everything that was counted")
    to.add_argument("--markdown", action="store_true", help="the table on standard output")
    to.add_argument("--logs", type=Path, metavar="DIR", help="of all processes (default: a new folder)")


def tell(
    given: argparse.Namespace,
    counted: dict[str, Any],
    footprints: Iterable[str],
    problems: Mapping[str, Iterable[str]],
) -> None:
    """Writes what was counted where `--json` says, and says what processes hold and what is wrong, by its title."""
    if given.json is not None:
        given.json.write_text(json.dumps({"seed": given.seed, **counted}, indent=1) + "\n")
    for line in footprints:
        say(f"  {line}")
    for title, lines in problems.items():
        for line in lines:
            say(f"{title}: {line}")
