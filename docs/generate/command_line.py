"""The page of the command line: every command of `outrider` with its arguments and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import typer
from typer.main import get_command

from command_line import app
from docs.generate.markdown import code, literal, page, sentence, table
from docs.generate.settings import PROCESSES

_RECORD: Final = re.compile(
    r"(?P<meaning>.*?)(?:(?:^|  )\[(?P<extra>(?:default|env var|required|x?[\d.]+<).*|x>.*)\])?", re.DOTALL
)
_FACT: Final = re.compile(r"default: \(.*?\)(?=; |$)|[^; ][^;]*")
"""Help and, in brackets behind it, default, variable and bounds."""
_PROCESS_COMMANDS: Final = {command.removeprefix("outrider ") for _, command, _ in PROCESSES.values()}


def command_line_page() -> str:
    """All commands in the order of `outrider --help`."""
    root: Any = get_command(app)
    return page(
        "Command line",
        "`outrider COMMAND --help` prints the same. Flags of the commands that start one process are in "
        "[Settings](settings.md).",
        *(_command(name, command) for name, command in _commands(root)),
    )


def _commands(group: Any, prefix: str = "outrider") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if inner := getattr(command, "commands", None):
            yield f"{prefix} {name}", command
            yield from ((f"{prefix} {name} {each}", inner[each]) for each in inner)
        else:
            yield f"{prefix} {name}", command


def _command(name: str, command: Any) -> str:
    level = "##" if name.count(" ") == 1 else "###"
    parts = [f"{level} {name}", _prose(command.help or "")]
    if name.removeprefix("outrider ") in _PROCESS_COMMANDS or hasattr(command, "commands"):
        return "\n\n".join(parts)
    context = typer.Context(command)
    panels: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False) and (record := parameter.get_help_record(context)):
            panel = getattr(parameter, "rich_help_panel", None) or "Arguments and options"
            panels.setdefault(panel, []).append(option_row(*record))
    for title, rows in panels.items():
        parts.append(table([title, "Meaning"], rows))
    return "\n\n".join(parts)


def option_row(names: str, text: str) -> tuple[str, str]:
    """A row of the table, from what `get_help_record` returns."""
    found = _RECORD.fullmatch(text)
    meaning, extra = (found["meaning"], found["extra"]) if found else (text, None)
    facts = [_fact(each) for each in _FACT.findall(extra or "")]
    words = [sentence(_prose(meaning)), sentence("; ".join(facts))]
    return code(*re.split(r", (?=-)| / ", names)), " ".join(filter(None, words))


def _fact(text: str) -> str:
    """Puts a default, a bound or a variable of the help into words."""
    if text.startswith("default: ("):
        return f"default: {literal(text.removeprefix('default: (').removesuffix(')'))}"
    name, _, value = text.partition(": ")
    if value:
        return f"{name}: `{value}`"
    return text if text == "required" else f"`{text}`"


def _prose(text: str) -> str:
    return literal(re.sub(r"\[/?[a-z ]+\]", "", text).strip())
