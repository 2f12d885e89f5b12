"""Output of the commands: text from elsewhere is shown by a terminal, which does nothing that it says."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from command_line.audit import command as audit_command
from command_line.chat import show
from command_line.client import Piece
from command_line.progress import Progress
from command_line.report import print_notes
from command_line.terminal import TerminalConsole, print_line
from outrider.local.child_log import ChildLog
from outrider.visible_text import visible

ROOT = Path(__file__).parents[2]
CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4K\x07"
ATTACKS = {
    "clipboard": CLIPBOARD,
    "clipboard by C1": "\x9d52;c;cm0gLXJmIH4K\x9c",
    "title": "\x1b]0;you\x07",
    "cursor": "\x1b[2J\x1b[H",
    "cursor by C1": "\x9b2J",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "overwritten line": "harmless\rerased",
    "deleted": "harm\x08\x08\x08\x08\x7f",
    "reversed": "\u202eexe.txt",
    "isolated": "\u2067x\u2069",
    "surrogate": "\ud800",
    "null": "\x00",
}
OBEYED = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))} - {
    "\n"
}


OTHER_WAYS = {
    *("print", "rich.print", "Console", "rich.console.Console"),
    *("typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write"),
}


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> TerminalConsole:
    """A terminal, whose output is kept."""
    monkeypatch.setenv("TERM", "xterm")
    made = TerminalConsole()
    made.file, made._force_terminal, made.is_interactive = io.StringIO(), True, True
    return made


def obeyed_by(console: TerminalConsole) -> set[str]:
    """Characters of the output that a terminal would obey."""
    assert isinstance(console.file, io.StringIO)
    return OBEYED & set(console.file.getvalue())


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_nothing_that_a_console_prints_is_obeyed(console: TerminalConsole, attack: str) -> None:
    table = Table(title=attack)
    table.add_column(attack)
    table.add_row(attack)
    table.add_row(Text(attack, "bold"))
    for printed in (attack, f"[bold]{attack}[/bold]", Text(attack), Text.assemble(("a ", "red"), attack), table):
        console.print(printed, soft_wrap=True)
    show(console, [Piece(attack, "accepted"), Piece(attack[:1], "plain"), Piece(attack[1:], "plain")])
    print_notes(console, [attack], [attack])
    progress = Progress(console)
    progress.note(attack)
    progress.warn(attack)
    progress.echo("target-0", attack)
    console.print_json(data={"id": attack.replace("\ud800", "")})
    assert not obeyed_by(console)


def test_what_is_not_obeyed_is_shown(console: TerminalConsole) -> None:
    console.print(f"a{CLIPBOARD[:-1]}b\x9b \u202e grüße 日本語 👋\tend", soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("a\\u001b]52;c;cm0gLXJmIH4Kb\\u009b \\u202e grüße 日本語 👋")


def test_markup_in_text_from_elsewhere_is_text(console: TerminalConsole) -> None:
    """Rich would make a link of it."""
    console.print("[link=http://evil.example]click[/link]", soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "[link=http://evil.example]click[/link]\n"


def test_a_status_line_shows_what_it_is_told(console: TerminalConsole) -> None:
    """On a terminal rich moves the cursor to draw it anew: that may stay, and nothing else."""
    with Progress(console) as progress:
        progress.say(f"Serving {CLIPBOARD}")
    assert isinstance(console.file, io.StringIO)
    assert "]52;c;" in console.file.getvalue()
    assert "\x1b]52" not in console.file.getvalue()


def test_lines_for_programs_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(f"a{CLIPBOARD}\nb\x9b")
    print_line("\ud800", stderr=True)
    written = capsys.readouterr()
    assert written.out == "a\\u001b]52;c;cm0gLXJmIH4K\\u0007\nb\\u009b\n"
    assert written.err == "\\ud800\n"


def test_what_a_server_says_instead_of_an_answer_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    audit_command._print_missing_server(f"the server says {CLIPBOARD}", is_json=False)
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_logs_of_children_can_be_shown(tmp_path: Path, attack: str) -> None:
    echoed: list[str] = []
    log = ChildLog("target-0", tmp_path, lambda name, line: echoed.append(line))
    log.write(attack)
    log.close()
    for text in (*echoed, *log.tail(), log.path.read_text(encoding="utf-8")):
        assert not OBEYED & set(text)
        assert text == visible(text)


def test_the_commands_write_in_no_other_way() -> None:
    """So that a command that is added later obeys nothing either."""
    found: list[str] = []
    for path in sorted((ROOT / "command_line").rglob("*.py")):
        if path.name == "terminal.py":
            continue
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        found += [f"{path}:{call.lineno}" for call in calls if ast.unparse(call.func) in OTHER_WAYS]
    assert not found
