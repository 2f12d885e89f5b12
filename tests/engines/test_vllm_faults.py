"""Draft workers are killed, frozen and made to flood while vLLM serves 32 streams: not one request notices."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.local.free_ports import free_ports
from tests.engines.draft_faults import MORE_MB, DraftWorkers, memory_mb
from tests.engines.vllm_server import (
    ROOT,
    Process,
    VllmServer,
    hint_flags,
    needs_vllm,
    running,
    start_draft_worker,
    wait_ready,
    wait_until,
)

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(3600)]

NUM_STREAMS = 32
NUM_TOKENS = 60
REQUEST_S = 120.0
"""Deadline of each request."""
FLAGS = ("--max-num-seqs", str(NUM_STREAMS), "--kv-cache-memory-bytes", str(1 << 26))
"""The KV has room for 8,000 tokens: it is small enough to be touched as a whole before memory is compared."""
FEW_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""oneDNN keeps a compiled product for every number of rows that occurs, and hints make many: 500 MB in four minutes."""
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

    def start_real() -> Process:
        return start_draft_worker(draft_ports[0], tmp_path)

    drafts = DraftWorkers(tmp_path, draft_ports, texts, {0: start_real})
    flags = hint_flags(draft_ports, hints_port, may_pause=False)
    with running(tmp_path, "hinted", *flags, *FLAGS, hints_port=hints_port, variables=FEW_PRODUCTS) as hinted:
        try:
            for index in range(len(draft_ports)):
                drafts.start(index)
            wait_ready(hinted)
            streams = Streams(hinted, expected)
            with streams.asking():
                wait_until(lambda: hinted.num_accepted > 100, "hints are accepted", 120.0)
                calm_speed = streams.tokens_per_s(lambda: time.sleep(10.0))
                memory_before = memory_mb(hinted.process.process.pid)
                before = hinted.num_accepted

                def inject() -> None:
                    while sum(drafts.counts.values()) < num_faults:
                        drafts.inject(dice, hints_port)
                        time.sleep(dice.uniform(0.2, 1.5))

                faulty_speed = streams.tokens_per_s(inject)
                num_accepted = hinted.num_accepted - before
                drafts.all_are_back()
                before = hinted.num_accepted
                wait_until(lambda: hinted.num_accepted > before + 100, "hints are back", 120.0)
            memory_after = memory_mb(hinted.process.process.pid)
            wait_until(lambda: hinted.metric("vllm:num_requests_running") == 0, "nothing is left over")
        finally:
            drafts.stop()
    assert streams.failures == []
    for name, most in memory_before.items():
        assert memory_after[name] < most + MORE_MB, f"memory of the {name}"
    found: dict[str, Any] = {
        "faults": dict(drafts.counts),
        "requests": streams.num_done,
        "hints accepted meanwhile": num_accepted,
        "speed with hints": calm_speed / plain_speed,
        "speed during faults": faulty_speed / plain_speed,
        "memory before, MB": memory_before,
        "memory after, MB": memory_after,
    }
    record_property("found", found)
    print(json.dumps(found))
