"""The whole system as `outrider serve` starts it, for tests: where it listens, what its workers say, what is left.

Invariant: every process of a `System` carries its cache folder in its environment, so one that was orphaned is
found as well as one that is still somebody's child.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET

ROOT = Path(__file__).resolve().parents[2]
FREE_PORTS = ("--port", "0", "--grpc-port", "0")
START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
READY = re.compile(r"Outrider is ready: (https?://\S+)/v1 \(OpenAI\), (\S+) \(gRPC\), model (\S+), logs in (.+)")

SeenT = TypeVar("SeenT")

needs_the_pair = pytest.mark.skipif(
    not (DEMO_TARGET.is_dir() and DEMO_DRAFT.is_dir()), reason="the demo pair is not in this checkout"
)


def eventually(
    look: Callable[[], SeenT], holds: Callable[[SeenT], object], what: str, timeout_s: float = 30.0
) -> SeenT:
    """Returns the first observation of `look` for which `holds` is true; fails with the last observation after
    `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if holds(seen):
            return seen
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}; last seen: {seen!r}"
        time.sleep(0.02)


@dataclass
class Command:
    """A child process that runs `python -m command_line ...`, its output in files of `folder`."""

    folder: Path
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, *arguments: object) -> Command:
        """`folder` must be new; logs and whatever else the command keeps go there."""
        folder.mkdir()
        words = tuple(map(str, arguments))
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "command_line", *words],
                cwd=ROOT,
                env=environment() | {"OUTRIDER_CACHE_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        return cls(folder, words, process)

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def processes(self) -> dict[int, str]:
        """Command lines, by pid, of every live process that this command or a descendant of it started."""
        found: dict[int, str] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.environ().get("OUTRIDER_CACHE_DIR") == str(self.folder)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def stop(self) -> int:
        """SIGTERM, then SIGKILL for one that does not listen. Returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class System:
    """A running `outrider serve`."""

    command: Command
    url: str  # http://host:port
    grpc: str  # host:port
    model: str
    log_dir: Path
    client: httpx.Client = field(repr=False)

    def ready_lines(self, name: str) -> list[dict[str, Any]]:
        """The ready lines of all lives of the child `name` (target-0, draft-0, coordinator), oldest first."""
        lines = (self.log_dir / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"event": "ready"')]

    def metric(self, worker: str, name: str) -> float:
        """The value of a worker's own metric, over its labels."""
        port = self.ready_lines(worker)[-1]["metrics_port"]
        text = self.client.get(f"http://127.0.0.1:{port}/metrics").text
        samples = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]
        assert samples, f"{worker} has no metric {name}"
        return sum(samples)

    def own_metric(self, name: str) -> float:
        """The value of the coordinator's metric, over its labels; 0 where nothing has been counted."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def sessions(self) -> dict[str, float]:
        """Sessions that the workers hold now."""
        return {
            "target running": self.metric("target-0", "outrider_num_requests_running"),
            "target waiting": self.metric("target-0", "outrider_num_requests_waiting"),
            "draft": self.metric("draft-0", "outrider_draft_sessions"),
        }

    def expect_idle(self) -> None:
        """Returns once neither worker holds a session."""
        eventually(self.sessions, lambda seen: not any(seen.values()), "no session on either worker")

    def num_generated(self) -> float:
        """Tokens that the target has committed since it started."""
        return self.metric("target-0", "outrider_generation_tokens_total")

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def complete(self, prompt: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a completion request, which must succeed; greedy unless told otherwise."""
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | parameters)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def text(self, prompt: str, **parameters: Any) -> str:
        return str(self.complete(prompt, **parameters)["choices"][0]["text"])

    def chat(self, messages: list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
        """The answer to a chat request, which must succeed; greedy unless told otherwise."""
        response = self.post("/v1/chat/completions", {"messages": messages, "temperature": 0} | parameters)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def audit(self, *flags: object) -> dict[str, Any]:
        """The report of `outrider audit`, which must end well."""
        words = [sys.executable, "-m", "command_line", "audit", "--url", self.url, "--json", *map(str, flags)]
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    @contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed answer up to [DONE]; leaving early closes the connection."""
        asked = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0} | body
        with self.client.stream("POST", path, json=asked) as response:
            assert response.status_code == 200, response.read().decode()
            yield events_of(response.iter_lines())


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The objects of a server-sent event stream. Fails when it ends without [DONE]."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def text_of(events: list[dict[str, Any]]) -> str:
    """The text of a streamed completion or chat."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@contextmanager
def running_system(folder: Path, *flags: object, timeout_s: float = START_TIMEOUT_S) -> Iterator[System]:
    """`outrider serve` with `flags`, ready to answer. It is stopped on the way out, whatever happened to it."""
    command = Command.start(folder, "serve", *FREE_PORTS, *flags)
    try:
        deadline = time.monotonic() + timeout_s
        while (line := READY.search(command.stdout)) is None:
            assert command.process.poll() is None, f"outrider serve ended:\n{command.stderr}"
            assert time.monotonic() < deadline, f"not ready in {timeout_s:g} s:\n{command.stderr}"
            time.sleep(0.05)
        url, grpc, model, log_dir = line.groups()
        with httpx.Client(base_url=url, timeout=180, trust_env=False) as client:
            yield System(command, url, grpc, model, Path(log_dir), client)
    finally:
        command.stop()
        for pid in command.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """That of a user who sits in the checkout and has set nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "RAY_"))}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
