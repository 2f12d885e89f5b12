"""One target on a busy node, paused for longer than its lease and its own bound for a model that stands still."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.system import needs_the_pair, running_system

NUM_BUSY = 30
PAUSE_S = 40.0
"""Beyond a lease (6 s), a model's bound for a sign of life (10 s), and that for its process (30 s)."""
AFTER_S = 30.0
AGAIN_S_MAX = 20.0
"""Until the target answers again once it goes on; a few seconds are usual."""
EVERY_S = 1.0


def spin() -> None:
    while True:
        pass


@needs_the_pair
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_target_that_was_paused_on_a_busy_node_answers_again_at_once(tmp_path: Path) -> None:
    """Prints how many requests were answered and refused, and after how long the first one was answered again."""
    words = {"prompt": "The old man", "max_tokens": 4, "temperature": 0}
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(NUM_BUSY)]
    with running_system(tmp_path / "cache", "--dtype", "float32") as system, ThreadPoolExecutor(200) as pool:
        pid = system.ready_lines("target-0")[-1]["pid"]

        def ask() -> tuple[float, float, int]:
            """When it was asked, when it was answered, and how."""
            asked_s = time.monotonic()
            status = httpx.post(f"{system.url}/v1/completions", json=words, timeout=100).status_code
            return asked_s, time.monotonic(), status

        def ask_for(seconds: float) -> None:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                asked.append(pool.submit(ask))
                time.sleep(EVERY_S)

        asked = [pool.submit(ask)]
        for process in busy:
            process.start()
        try:
            ask_for(EVERY_S)
            os.kill(pid, signal.SIGSTOP)
            ask_for(PAUSE_S)
            os.kill(pid, signal.SIGCONT)
            goes_on_s = time.monotonic()
            ask_for(AFTER_S)
            seen = [each.result() for each in asked]
        finally:
            for process in busy:
                process.kill()
        after = [each for each in seen if each[0] >= goes_on_s]
        again_s = min(ended_s for _, ended_s, status in after if status == httpx.codes.OK) - goes_on_s
        num_refused = sum(status == httpx.codes.SERVICE_UNAVAILABLE for *_, status in seen)
        print(f"refused meanwhile: {num_refused} of {len(seen)}; answered again after {again_s:.1f} s")
        assert {status for *_, status in seen} <= {200, 503}
        assert again_s < AGAIN_S_MAX
        assert all(status == httpx.codes.OK for asked_s, _, status in after if asked_s > goes_on_s + AGAIN_S_MAX)
        assert [each["pid"] for each in system.ready_lines("target-0")] == [pid], "it did not load anew"
