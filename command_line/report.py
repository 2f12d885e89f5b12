"""How commands report: figures in words, notes for people, JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from command_line.terminal import print_line


def figure(value: float | None, form: str) -> str:
    """A value in a format such as {:.0%}; "-" where there is none."""
    return "-" if value is None else form.format(value)


def print_notes(console: Console, captions: Iterable[str], warnings: Iterable[str] = ()) -> None:
    """Prints lines below a table. They are not its caption, which would be as narrow as the table."""
    for caption in captions:
        console.print(Text(caption, "dim"), soft_wrap=True)
    for warning in warnings:
        console.print(Text(f"note: {warning}", "yellow"), soft_wrap=True)


def rounded(value: Any) -> Any:
    """A document whose numbers have four decimals, which is finer than measurements."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def is_printed(file: Path | None) -> bool:
    """Whether a --json file is standard output."""
    return file is not None and str(file) == "-"


def write_json(document: Any, file: Path | None) -> None:
    """Writes one JSON object to a --json file; - is standard output, None writes nothing."""
    if is_printed(file):
        print_line(json.dumps(document))
    elif file is not None:
        file.write_text(json.dumps(document) + "\n", encoding="utf-8")


def check_writable(flag: str, path: Path | None) -> None:
    """Refuses an unwritable file before the work starts: a misspelt folder must not cost an hour's figures."""
    if path is None or is_printed(path):
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{str(path)!r} cannot be written", param_hint=flag)
