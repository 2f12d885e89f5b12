"""Log lines: fields where machines read them, and never more of a record than was meant."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.local.child_log import ChildLog
from outrider.observability import logs
from outrider.observability.logs import JsonFormatter, LogFormat, TextFormatter
from outrider.visible_text import visible


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("outrider.test").makeRecord(
        "outrider.test", logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )


def test_a_line_of_json_has_the_message_and_the_known_fields() -> None:
    line = json.loads(
        JsonFormatter().format(record("leaves %s", "t-0", request_id="r1", num_output_tokens=3, prompt="secret"))
    )
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "logger": "outrider.test",
        "message": "leaves t-0",
        "request_id": "r1",
        "num_output_tokens": 3,
    }


@pytest.mark.parametrize("text", ["two\nlines", "two\u2028lines", "two\u2029lines", "two\x85lines"])
def test_whatever_it_quotes_a_message_for_people_is_one_line(text: str) -> None:
    assert len(TextFormatter().format(record("%s", text)).splitlines()) == 1


@pytest.mark.parametrize("text", ["two\nlines", "two\u2028lines", "two\u2029lines", 'quotes "', "\x00", "\ud800", "ü"])
def test_whatever_the_message_a_line_is_one_line_of_json(text: str) -> None:
    line = JsonFormatter().format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == text


def test_an_exception_is_part_of_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    assert "ValueError: broken" in json.loads(JsonFormatter().format(failed))["exception"]


def test_lines_are_appended_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    logs.configure(LogFormat.JSON, path=path)
    logging.getLogger("x").info("hello")
    before, line = path.read_text().splitlines()
    assert (before, json.loads(line)["message"]) == ("before", "hello")
    for handler in logging.getLogger().handlers:
        handler.close()
        if isinstance(handler, logging.StreamHandler):
            handler.stream.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_what_cannot_be_opened_is_replaced_by_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As systemd starts a service: its standard error is a socket, which /proc names and nobody can open."""
    near, far = socket.socketpair()
    with near, far:
        logs.configure(LogFormat.TEXT, level=logging.WARNING, path=Path(f"/proc/self/fd/{near.fileno()}"))
    logging.getLogger("x").warning("hello")
    warning, line = capsys.readouterr().err.splitlines()
    assert "No such device or address" in warning
    assert line.endswith("WARNING x: hello")


@pytest.mark.parametrize("form", LogFormat)
def test_nobody_writes_lines_or_control_characters_into_a_log(
    form: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant's name, a model's name or an error's text may hold anything."""
    logs.configure(form)
    logging.getLogger("x").warning("hello %s", "a\n2026-01-01 00:00:00 ERROR forged\x1b]52;c;eA==\x07\x9b2J\u202e")
    (line,) = capsys.readouterr().err.splitlines()
    assert "forged" in line
    assert line == visible(line)


def test_a_new_log_is_its_owners_alone(tmp_path: Path) -> None:
    logs.configure(LogFormat.TEXT, path=tmp_path / "log")
    logging.getLogger("x").warning("hello")
    log = ChildLog("target-0", tmp_path)
    log.write("hello")
    log.close()
    assert [oct(path.stat().st_mode & 0o777) for path in sorted(tmp_path.iterdir())] == ["0o600", "0o600"]
    for handler in logging.getLogger().handlers:
        handler.close()
        if isinstance(handler, logging.StreamHandler):
            handler.stream.close()
