"""Commands that become one process: `outrider target-worker ...` is `python -m target_worker ...`.

All flags, including `--help`, are passed on unread, so each is defined once, by its process.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final, NoReturn

import typer

from command_line.checkout import ROOT, check_installed, module

PASSTHROUGH: Final[dict[str, Any]] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "options_metavar": "[FLAG]...",
    "add_help_option": False,
}


def target_worker(context: typer.Context) -> None:
    """Start one target worker, which runs the large model and verifies hints. `--help` lists its flags."""
    become("target_worker", context.args)


def draft_worker(context: typer.Context) -> None:
    """Start one draft worker, which runs the small model and drafts hints. `--help` lists its flags."""
    become("draft_worker", context.args)


def memory_worker(context: typer.Context) -> None:
    """Start one memory worker, which hints at what was generated before. `--help` lists its flags."""
    become("draft_worker.memory", context.args)


def coordinator(context: typer.Context) -> None:
    """Start the coordinator, the public API in front of all workers. `--help` lists its flags."""
    become("coordinator", context.args)


def become(package: str, arguments: list[str]) -> NoReturn:
    """Replaces this process by `python -m package`, so that signals and the exit status are its own."""
    check_installed(package)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    os.execv(sys.executable, [*module(package), *arguments])
