"""A process under a clock of ours sees the time jump, and no other clock with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.chaos.clocks import Clock, find_library

CODE = "import time; print(time.time(), time.monotonic())"


@pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed")
def test_a_clock_jumps_for_those_who_go_by_it(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock", find_library())
    clock.set(3600)
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(words, env=os.environ | clock.environment, capture_output=True, text=True, check=True)
    shown, monotonic = map(float, done.stdout.split())
    assert abs(shown - time.time() - 3600) < 60
    assert abs(monotonic - time.monotonic()) < 60


@pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed")
def test_a_clock_may_run_fast(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock", find_library())
    clock.set(-3600, rate=1.5)
    code = f"import time; began = time.time(); time.sleep(1); print(time.time() - began); {CODE}"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=os.environ | clock.environment, capture_output=True, text=True, check=True)
    passed, shown, _ = map(float, done.stdout.split())
    assert 1.4 < passed < 5.0
    assert abs(shown - time.time() + 3600) < 60


SERVER_AND_CALLER = """
import asyncio, grpc.aio
async def hang(request, context):
    await asyncio.sleep(60)
async def main():
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(hang)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Hang": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    began_s = asyncio.get_running_loop().time()
    try:
        await channel.unary_unary("/test.Test/Hang")(b"", timeout=0.5)
    except grpc.aio.AioRpcError as error:
        print(error.code().name, asyncio.get_running_loop().time() - began_s)
    await channel.close()
    await server.stop(None)
asyncio.run(main())
"""


@pytest.mark.skipif(find_library() is None, reason="libfaketime is not installed")
@pytest.mark.parametrize(
    ("seconds", "rate"),
    [(3600, 1.0), (-3600, 1.0), (0, 1.01)],
    ids=["an hour ahead", "an hour behind", "fast"],
)
def test_grpc_keeps_its_deadlines_under_a_clock_that_was_wrong_from_the_start(
    seconds: int, rate: float, tmp_path: Path
) -> None:
    clock = Clock(tmp_path / "clock", find_library())
    clock.set(seconds, rate)
    words = [sys.executable, "-c", SERVER_AND_CALLER]
    done = subprocess.run(
        words, env=os.environ | clock.environment, capture_output=True, text=True, check=True, timeout=60
    )
    code, took_s = done.stdout.split()
    assert code == "DEADLINE_EXCEEDED"
    assert 0.4 < float(took_s) < 10.0


def test_without_the_library_nothing_is_changed(tmp_path: Path) -> None:
    assert Clock(tmp_path / "clock", None).environment == {}
