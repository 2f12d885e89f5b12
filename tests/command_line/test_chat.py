"""`outrider chat` as a person at a terminal, and a script, meet it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from rich.console import Console

from command_line.chat import legend
from command_line.client import server_address
from outrider.errors import InvalidRequest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
REPEAT_S = 10.0
"""After which a signal is sent again: one that comes between a prompt and readline's wait for a key is noticed with the
next one, or with a key."""
Run = Callable[..., subprocess.Popen[str]]


@dataclass
class FakeServer:
    """Streams two tokens for each request; the second one waits for `goes_on`."""

    url: str = ""
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "m", "has_chat_template": True}])
    refuses: bool = False
    content: str = " two"  # of the second token
    goes_on: Event = field(default_factory=Event)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.goes_on.set()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.asked.append((handler.path, body))
        handler.send_response(400 if self.refuses else 200)
        handler.end_headers()
        if self.refuses:
            handler.wfile.write(b'{"error": {"message": "the test says no"}}')
            return
        send(handler, {"choices": [{"delta": {"content": "one"}}]})
        self.goes_on.wait(TIMEOUT_S)
        send(handler, {"choices": [{"delta": {"content": self.content}, "finish_reason": "length"}]})
        handler.wfile.write(b"data: [DONE]\n\n")


def send(handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
    handler.wfile.flush()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"data": fake.models}).encode())

        def do_POST(self) -> None:
            fake.answer(self)

        def finish(self) -> None:
            with_broken_pipe_ignored(super().finish)

        def handle(self) -> None:
            with_broken_pipe_ignored(super().handle)

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    fake.url = f"http://127.0.0.1:{listening.server_port}"
    Thread(target=listening.serve_forever, daemon=True).start()
    yield fake
    fake.goes_on.set()
    listening.shutdown()
    listening.server_close()


def with_broken_pipe_ignored(work: Callable[[], None]) -> None:
    """A client that stops an answer closes its connection."""
    with suppress(ConnectionError):
        work()


def piped(outrider: Run, *words: str, lines: str = "hello\n") -> tuple[int, str, str]:
    """Exit status and both outputs of a chat whose lines come from a pipe."""
    process = outrider("chat", *words)
    stdout, stderr = process.communicate(lines, timeout=TIMEOUT_S)
    return process.returncode, stdout, stderr


class TestServer:
    """A server that is missing or unusable is noticed before the first line."""

    def test_a_missing_one_is_an_error_that_says_how_to_start_one(self, outrider: Run) -> None:
        status, stdout, stderr = piped(outrider, "--url", "http://127.0.0.1:1", lines="")
        assert (status, stdout) == (1, "")
        assert "--url http://127.0.0.1:1 cannot be reached: connection refused" in stderr
        assert "outrider serve" in stderr

    def test_a_model_that_it_lacks_is_named_beside_those_that_it_has(self, outrider: Run, server: FakeServer) -> None:
        status, _, stderr = piped(outrider, "--url", server.url, "--model", "other", lines="")
        assert status == 1
        assert "--model other is not served there; there is m" in stderr

    @pytest.mark.thorough
    def test_between_several_models_nobody_chooses(self, outrider: Run, server: FakeServer) -> None:
        server.models = [{"id": "a"}, {"id": "b"}]
        status, _, stderr = piped(outrider, "--url", server.url)
        assert (status, server.asked) == (1, [])
        assert "choose one with --model: a, b" in stderr
        assert piped(outrider, "--url", server.url, "--model", "b")[0] == 0
        assert server.asked[0][1]["model"] == "b"

    def test_a_refused_last_line_is_a_failure(self, outrider: Run, server: FakeServer) -> None:
        server.refuses = True
        status, stdout, _ = piped(outrider, "--url", server.url)
        assert status == 1
        assert "the test says no" in stdout

    def test_neither_an_answer_nor_a_model_moves_anything_in_the_terminal(
        self, outrider: Run, server: FakeServer
    ) -> None:
        """OSC 52 writes the clipboard; U+009B begins a sequence as ESC and a bracket do."""
        server.content = "\x1b]52;c;eA==\x07\x9b2J\u202e\ud800"
        server.models = [{"id": "m\x1b]52;c;eA==\x07"}]
        status, stdout, stderr = piped(outrider, "--url", server.url)
        assert status == 0, stderr
        assert "one\\u001b]52;c;eA==" in stdout
        assert not set("\x1b\x07\x9b\u202e") & set(stdout + stderr)
        _, _, refusal = piped(outrider, "--url", server.url, "--model", "other", lines="")
        assert "there is m\\u001b]52" in refusal
        assert "\x1b" not in refusal

    @pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
    def test_its_address_may_be_as_serve_prints_it(self, outrider: Run, server: FakeServer, ending: str) -> None:
        status, stdout, stderr = piped(outrider, "--url", server.url.removeprefix("http://") + ending)
        assert status == 0, stderr
        assert server.asked[0][0] == "/v1/chat/completions"
        assert "one two" in stdout


def test_addresses() -> None:
    given = ["h:1", "http://h:1/", "http://h:1/v1", "https://h/v1/", "http://h/prefix/v1", " http://[::1]:8000/v1 "]
    assert [server_address(text) for text in given] == [
        "http://h:1", "http://h:1", "http://h:1", "https://h", "http://h/prefix", "http://[::1]:8000",
    ]  # fmt: skip
    for text in ("", "ftp://h", "http://", "http://h:port", "http://h?v1"):
        with pytest.raises(InvalidRequest, match="is not an address"):
            server_address(text)


class TestWords:
    @pytest.mark.thorough
    def test_a_model_without_a_chat_template_brings_the_advice_to_complete(
        self, outrider: Run, server: FakeServer
    ) -> None:
        server.models = [{"id": "base", "has_chat_template": False}]
        assert "outrider chat --complete" in piped(outrider, "--url", server.url)[1]
        assert "chat template" not in piped(outrider, "--url", server.url, "--complete")[1]

    @pytest.mark.thorough
    def test_a_model_with_one_and_a_server_that_does_not_say_bring_none(
        self, outrider: Run, server: FakeServer
    ) -> None:
        assert "--complete" not in piped(outrider, "--url", server.url)[1]
        server.models = [{"id": "of another server"}]
        assert "--complete" not in piped(outrider, "--url", server.url)[1]

    def test_an_answer_that_was_cut_off_says_so(self, outrider: Run, server: FakeServer) -> None:
        assert "cut off at --max-tokens 7" in piped(outrider, "--url", server.url, "--max-tokens", "7")[1]

    def test_colours_are_explained_where_there_are_any(self) -> None:
        assert legend(Console(force_terminal=False)) is None
        assert legend(Console(force_terminal=True, no_color=True)) is None
        explained = legend(Console(force_terminal=True, color_system="standard", no_color=False))
        assert explained is not None
        assert explained.plain.startswith("Tokens by colour: accepted (the draft's hint, which the target accepted);")


class Terminal:
    """A person's terminal with a chat in it."""

    def __init__(self, *words: str) -> None:
        self.fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "command_line", "chat", *words],
            cwd=ROOT, env=os.environ | {"TERM": "dumb"}, stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def expect(self, text: str) -> None:
        """Reads until `text` has come, and forgets everything up to it."""
        assert self.has_come(text, TIMEOUT_S), f"no {text!r} in {self.seen!r}"

    def has_come(self, text: str, within_s: float) -> bool:
        """As `expect`, or returns that it has not come."""
        deadline = time.monotonic() + within_s
        while text not in self.seen:
            if (left_s := deadline - time.monotonic()) <= 0:
                return False
            if select.select([self.fd], [], [], left_s)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:  # its other end is closed
                    pytest.fail(f"it ended without {text!r}: {self.seen!r}")
        self.seen = self.seen.partition(text)[2]
        return True

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self, until: str) -> None:
        """Sends the signal of Ctrl-C until its effect is seen."""
        for _ in range(int(TIMEOUT_S / REPEAT_S)):
            self.process.send_signal(signal.SIGINT)
            if self.has_come(until, REPEAT_S):
                return
        pytest.fail(f"no {until!r} in {self.seen!r}")

    def status(self) -> int:
        return self.process.wait(TIMEOUT_S)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.fd)


class TestAtATerminal:
    def test_ctrl_c_at_the_prompt_ends_it_without_another_key(self, server: FakeServer) -> None:
        with terminal("--url", server.url) as shown:
            shown.expect("> ")
            shown.interrupt(until="\n")
            assert shown.status() == 130

    @pytest.mark.thorough
    def test_it_says_who_answers_how_to_leave_and_what_a_base_model_needs(self, server: FakeServer) -> None:
        with terminal("--url", f"{server.url}/v1") as shown:
            shown.expect(f"m at {server.url}. Ctrl-C stops an answer, Ctrl-D ends the chat. A base model")
            shown.expect("--complete")
        with terminal("--url", server.url, "--complete") as shown:
            shown.expect("Ctrl-D ends the chat.\r\n")

    def test_ctrl_c_stops_an_answer_and_leaves_the_conversation(self, server: FakeServer) -> None:
        with terminal("--url", server.url) as shown:
            shown.expect("> ")
            server.goes_on.clear()
            shown.type("first\n")
            shown.expect("one")
            shown.interrupt(until="stopped")
            shown.expect("> ")
            server.goes_on.set()
            shown.type("second\n")
            shown.expect("one two")
            shown.expect("> ")
            shown.type("\x04")
            assert shown.status() == 0
        said = [(message["role"], message["content"]) for message in server.asked[1][1]["messages"]]
        assert said == [("user", "first"), ("assistant", "one"), ("user", "second")]
