"""Draft workers are killed, frozen and made to flood while an engine has 32 requests: its steps do not wait."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from outrider.local.free_ports import free_ports
from tests.engines.draft_faults import MORE_MB, DraftWorkers
from tests.engines.test_hint_server import PROMPT, Engine, after, running

NUM_REQUESTS = 32
TEXT_LEN = 60
STEP_S = 0.01


class Load:
    """An engine with so many requests open, of which each that has ended is followed by another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_opened = 0
        self.step_s: list[float] = []
        for _ in range(NUM_REQUESTS):
            self._open()

    def _open(self) -> None:
        self._num_opened += 1
        self._engine.open(f"request-{self._num_opened}")

    @property
    def num_done(self) -> int:
        return self._num_opened - NUM_REQUESTS

    def step(self) -> None:
        began = time.thread_time()
        self._engine.step()
        self.step_s.append(time.thread_time() - began)
        for name in [name for name, text in self._engine.texts.items() if len(text) >= TEXT_LEN]:
            self._engine.close(name)
            self._open()


@pytest.mark.parametrize("num_faults", [12, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_faults_of_draft_workers_cost_hints_and_nothing_else(
    num_faults: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dice = random.Random(num_faults)
    hints_port, *ports = free_ports(4)
    text = list(PROMPT)
    while len(text) < TEXT_LEN + 20:
        text.append(after(text))
    (tmp_path / "texts.json").write_text(json.dumps([[PROMPT, text[len(PROMPT) :]]]))
    drafts = DraftWorkers(tmp_path, ports, tmp_path / "texts.json")
    try:
        for index in range(len(ports)):
            drafts.start(index)
        async with running(ports, port=hints_port) as engine:
            load = Load(engine)
            until = time.monotonic() + 60.0
            while engine.num_accepted < 200:
                assert time.monotonic() < until, "hints are accepted"
                load.step()
                await asyncio.sleep(STEP_S)
            process = engine.link._process
            assert isinstance(process, subprocess.Popen)
            hint_server = psutil.Process(process.pid)
            memory_before = hint_server.memory_info().rss / 1e6
            before = engine.num_accepted
            next_at = time.monotonic()
            while sum(drafts.counts.values()) < num_faults:
                if time.monotonic() >= next_at:
                    await asyncio.to_thread(drafts.inject, dice, hints_port)
                    next_at = time.monotonic() + dice.uniform(0.1, 0.8)
                load.step()
                await asyncio.sleep(STEP_S)
            num_accepted = engine.num_accepted - before
            await asyncio.to_thread(drafts.all_are_back)
            before, until = engine.num_accepted, time.monotonic() + 60.0
            while engine.num_accepted < before + 200:
                assert time.monotonic() < until, "hints are back"
                load.step()
                await asyncio.sleep(STEP_S)
            memory_after = hint_server.memory_info().rss / 1e6
            assert engine.hints.is_on
            assert engine.link.num_starts == 1, "the hint server outlives what draft workers do"
    finally:
        drafts.stop()
    slowest_ms = sorted(1e3 * each for each in load.step_s)[int(-0.01 * len(load.step_s)) - 1]
    found = {
        "faults": dict(drafts.counts), "requests": load.num_done, "steps": len(load.step_s),
        "hints accepted meanwhile": num_accepted, "slowest hundredth of the steps, ms": slowest_ms,
        "memory of the hint server, MB": (memory_before, memory_after),
    }  # fmt: skip
    record_property("found", found)
    print(json.dumps(found))
    assert memory_after < memory_before + MORE_MB
    assert num_accepted > 0
