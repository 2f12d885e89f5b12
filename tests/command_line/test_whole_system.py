"""The command line over the real workers, Ray included, with the small demo pair."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import httpx
import pytest

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from tests.command_line.conftest import commands
from tests.command_line.fakes import expect_eventually, is_alive

Run = Callable[..., subprocess.Popen[str]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (DEMO_TARGET.is_dir() and DEMO_DRAFT.is_dir()), reason="the demo pair is not in this checkout"
    ),
]


@pytest.mark.thorough
async def test_no_process_of_ray_outlives_a_killed_serve(real_outrider: Run) -> None:
    process = real_outrider("serve", "--port", "0", "--grpc-port", "0")
    assert process.stdout is not None
    url = process.stdout.readline().split()[3]
    running = commands(process)
    assert any("gcs_server" in word for words in running.values() for word in words), "Ray is part of the family"
    body = {"prompt": "def f(x):\n", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{url}/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 8
    process.kill()
    await expect_eventually(lambda: not any(map(is_alive, running)), "every process gone", timeout_s=60)


@pytest.mark.first
async def test_the_demo_is_exact_and_leaves_nothing(real_outrider: Run) -> None:
    process = real_outrider("demo", "--small", "--json", "--num-tokens", "40", "--budget-s", "1")
    seen: set[int] = set()

    def has_everything() -> bool:
        seen.update(commands(process))
        return len(seen) > 15

    await expect_eventually(has_everything, "Redis, workers, coordinator and Ray's processes", timeout_s=120)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert result["identical"] is True
    assert result["on"]["mean_acceptance_length"] > 1.5
    assert "killed, it did not end" not in stderr
    assert not any(map(is_alive, seen))
