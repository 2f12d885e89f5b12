"""The commands that become one process: `outrider target-worker ...` is `python -m target_worker ...`.

The flags belong to the process and are passed on unread, `--help` among them, so they are written down once.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final, NoReturn

import typer

from outrider.cli.deployment import ROOT, module

PASSTHROUGH: Final[dict[str, Any]] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "options_metavar": "[FLAG]...",
    "add_help_option": False,
}


def target_worker(context: typer.Context) -> None:
    """Start one target worker: the large model, which decides. `--help` lists its flags."""
    become("target_worker", context.args)


def draft_worker(context: typer.Context) -> None:
    """Start one draft worker: the small model, which guesses. `--help` lists its flags."""
    become("draft_worker", context.args)


def coordinator(context: typer.Context) -> None:
    """Start the coordinator: the public API, in front of all workers. `--help` lists its flags."""
    become("coordinator", context.args)


def become(package: str, arguments: list[str]) -> NoReturn:
    """Replaces this process by `python -m package`, so that signals and the exit status are its own."""
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    os.execv(sys.executable, [*module(package), *arguments])
