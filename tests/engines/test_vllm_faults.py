"""Draft workers are killed, frozen and made to flood while vLLM serves 32 streams: not one request notices."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from outrider.local.free_ports import free_ports
from tests.engines.vllm_server import (
    ROOT,
    Process,
    VllmServer,
    hint_flags,
    needs_vllm,
    running,
    start,
    start_draft_worker,
    wait_ready,
    wait_until,
)

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(3600)]

NUM_STREAMS = 32
NUM_TOKENS = 60
REQUEST_S = 120.0
"""Deadline of each request."""
FREEZE_S = (0.1, 6.0)
"""Some freezes outlast the silence after which a draft worker is given up."""
MORE_MB = 256
"""Most memory that the engine's processes and the hint server gain."""
FLAGS = ("--max-num-seqs", str(NUM_STREAMS))
HELD_OUT = 5 * (ROOT / "demo" / "held_out.txt").read_text()
PROMPTS = [HELD_OUT[17 * index :][:120] for index in range(NUM_STREAMS)]


class Streams:
    """Clients that ask without pause, each for a text of its own."""

    def __init__(self, server: VllmServer, expected: list[list[int]] | None = None) -> None:
        self._server, self._expected = server, expected
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(NUM_STREAMS)]
        self.num_done = 0
        self.num_tokens = 0
        self.failures: list[str] = []

    def _ask(self, index: int) -> None:
        with httpx.Client(base_url=self._server.url, timeout=REQUEST_S) as client:
            while not self._is_over.is_set():
                try:
                    found = stream_tokens(client, PROMPTS[index])
                except Exception as error:
                    self.failures.append(f"stream {index}: {error!r}")
                    continue
                if self._expected is not None and found != self._expected[index]:
                    self.failures.append(f"stream {index}: {found} is not {self._expected[index]}")
                self.num_done += 1
                self.num_tokens += len(found)

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join(2 * REQUEST_S)
        assert not any(thread.is_alive() for thread in self._threads), "no request waits forever"

    def tokens_per_s(self, run: Callable[[], None]) -> float:
        began, before = time.monotonic(), self.num_tokens
        run()
        return (self.num_tokens - before) / (time.monotonic() - began)


def stream_tokens(client: httpx.Client, prompt: str) -> list[int]:
    body = {
        "model": "m", "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    found: list[int] = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0].get("token_ids") or []
    if len(found) != NUM_TOKENS:
        raise ValueError(f"the stream ended after {len(found)} tokens")
    return found


class DraftWorkers:
    """One real draft worker, and two without a model, whose hints are good and which are soon back."""

    def __init__(self, folder: Path, ports: list[int], texts: Path) -> None:
        self._folder, self._ports, self._texts = folder, ports, texts
        self._workers: list[Process | None] = [None] * len(ports)
        self._lock = threading.Lock()
        self._healing: list[threading.Thread] = []

    def start(self, index: int) -> None:
        port = self._ports[index]
        if index == 0:
            made = start_draft_worker(port, self._folder)
        else:
            words = [sys.executable, "-m", "tests.engines.oracle_draft", str(port), str(self._texts)]
            made = start(words, self._folder / f"oracle-{port}.log")
        with self._lock:
            self._workers[index] = made

    def take(self, random_index: random.Random) -> tuple[int, Process] | None:
        """One that runs and that no fault has; it is out of reach until `start` or `give_back`."""
        with self._lock:
            there = [index for index, worker in enumerate(self._workers) if worker is not None]
            if not there:
                return None
            index = random_index.choice(there)
            worker, self._workers[index] = self._workers[index], None
        assert worker is not None
        return index, worker

    def heal(self, after_s: float, heal: Callable[[], None]) -> None:
        thread = threading.Timer(after_s, heal)
        thread.start()
        self._healing.append(thread)

    def give_back(self, index: int, worker: Process) -> None:
        with self._lock:
            self._workers[index] = worker

    def kill(self, index: int, worker: Process, pause_s: float) -> None:
        worker.stop()
        self.heal(pause_s, lambda: self.start(index))

    def freeze(self, index: int, worker: Process, pause_s: float) -> None:
        os.kill(worker.process.pid, signal.SIGSTOP)

        def thaw() -> None:
            os.kill(worker.process.pid, signal.SIGCONT)
            self.give_back(index, worker)

        self.heal(pause_s, thaw)

    def flood(self, index: int, worker: Process, hints_port: int) -> None:
        """By the draft worker itself if it can, and by a stranger that sends what is no HTTP/2."""
        if index != 0:
            os.kill(worker.process.pid, signal.SIGUSR1)
        self.give_back(index, worker)
        threading.Thread(target=rubbish, args=(hints_port,), daemon=True).start()

    def all_are_back(self) -> None:
        for thread in self._healing:
            thread.join()

    def stop(self) -> None:
        self.all_are_back()
        for worker in self._workers:
            if worker is not None:
                worker.stop()


def rubbish(port: int) -> None:
    """A connection that sends megabytes of nothing, and reads nothing."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as peer:
            for _ in range(64):
                peer.sendall(os.urandom(1 << 16))
    except OSError:
        pass  # the port's owner has had enough


def memory_mb(server: VllmServer) -> dict[str, float]:
    """Resident memory of the server's processes, and of its hint server."""
    found: Counter[str] = Counter()
    for process in psutil.Process(server.process.process.pid).children(recursive=True):
        try:
            is_hint_server = "outrider.engines.hint_server" in process.cmdline()
            found["hint server" if is_hint_server else "engine"] += process.memory_info().rss / 1e6
        except psutil.Error:
            continue
    return dict(found)


@pytest.mark.parametrize("num_faults", [12, pytest.param(200, marks=pytest.mark.endurance)])
def test_faults_of_draft_workers_fail_no_request(
    num_faults: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dice = random.Random(num_faults)
    hints_port, *draft_ports = free_ports(4)
    texts = tmp_path / "texts.json"
    with running(tmp_path, "plain", *FLAGS) as plain:
        wait_ready(plain)
        answers = [plain.completion(each, max_tokens=NUM_TOKENS, ignore_eos=True) for each in PROMPTS]
        expected = [each["choices"][0]["token_ids"] for each in answers]
        prompt_ids = [each["choices"][0]["prompt_token_ids"] for each in answers]
        texts.write_text(json.dumps(list(zip(prompt_ids, expected, strict=True))))
        streams = Streams(plain, expected)
        with streams.asking():
            plain_speed = streams.tokens_per_s(lambda: time.sleep(15.0))
        assert streams.failures == [], "vLLM's own texts do not depend on the batch"

    drafts = DraftWorkers(tmp_path, draft_ports, texts)
    flags = hint_flags(draft_ports, hints_port, may_pause=False)
    with running(tmp_path, "hinted", *flags, *FLAGS, hints_port=hints_port) as hinted:
        try:
            for index in range(len(draft_ports)):
                drafts.start(index)
            wait_ready(hinted)
            streams = Streams(hinted, expected)
            counts: Counter[str] = Counter()
            with streams.asking():
                wait_until(lambda: hinted.num_accepted > 100, "hints are accepted", 120.0)
                calm_speed = streams.tokens_per_s(lambda: time.sleep(10.0))
                memory_before = memory_mb(hinted)
                before = hinted.num_accepted

                def inject() -> None:
                    while sum(counts.values()) < num_faults:
                        taken = drafts.take(dice)
                        if taken is not None:
                            kind = dice.choice(["kill", "freeze", "flood"])
                            counts[kind] += 1
                            if kind == "kill":
                                drafts.kill(*taken, pause_s=dice.uniform(0.0, 1.0))
                            elif kind == "freeze":
                                drafts.freeze(*taken, pause_s=dice.uniform(*FREEZE_S))
                            else:
                                drafts.flood(*taken, hints_port)
                        time.sleep(dice.uniform(0.2, 1.5))

                faulty_speed = streams.tokens_per_s(inject)
                num_accepted = hinted.num_accepted - before
                drafts.all_are_back()
                before = hinted.num_accepted
                wait_until(lambda: hinted.num_accepted > before + 100, "hints are back", 120.0)
            memory_after = memory_mb(hinted)
            wait_until(lambda: hinted.metric("vllm:num_requests_running") == 0, "nothing is left over")
        finally:
            drafts.stop()
    assert streams.failures == []
    for name, most in memory_before.items():
        assert memory_after[name] < most + MORE_MB, f"memory of the {name}"
    found: dict[str, Any] = {
        "faults": dict(counts),
        "requests": streams.num_done,
        "hints accepted meanwhile": num_accepted,
        "speed with hints": calm_speed / plain_speed,
        "speed during faults": faulty_speed / plain_speed,
        "memory before, MB": memory_before,
        "memory after, MB": memory_after,
    }
    record_property("found", found)
    print(json.dumps(found))
