"""A worker while its model loads: alive, not ready, with all of its metrics; it obeys SIGTERM and ends when stuck."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.errors import ConfigurationError, RegistryUnavailable
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import find_redis_server
from outrider.observability.telemetry import STATES, DraftMetrics, TargetMetrics, WorkerMetrics
from outrider.registry.registry import check_redis
from outrider.registry.worker_record import WorkerLoad
from outrider.worker import loading_thread, worker_process
from outrider.worker.loading_thread import work_done
from outrider.worker.stall_watch import LoadWatch, WorkDone
from outrider.worker.worker_facts import record_from_info
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import EXIT_STALLED, LIVENESS, WorkerProcess
from protos.outrider.v1 import common_pb2, draft_pb2_grpc
from tests.models import model_dir
from tests.outrider.test_worker_process import health

ROOT = Path(__file__).parents[2]
INFO = common_pb2.WorkerInfo(worker_id="w", max_num_seqs=1, max_model_len=1, vocab_size=1)
GET_INFO = "/outrider.v1.Draft/GetInfo"


class Told(draft_pb2_grpc.DraftServicer):
    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Any) -> common_pb2.WorkerInfo:
        return INFO


def options(**changes: Any) -> WorkerOptions:
    chosen: dict[str, Any] = {"worker_id": "w", "drain_grace_s": 1.0}
    return WorkerOptions(**(chosen | changes))


def samples(port: int) -> dict[str, float]:
    """The values of a worker's metrics, without the labels that all of them have."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {f"{sample.name} {sample.labels.get('state', '')}".strip(): sample.value for sample in found}


def state_of(seen: dict[str, float]) -> str:
    """The one state that a worker says it is in."""
    (state,) = (state for state in STATES if seen[f"outrider_worker_state {state}"] == 1.0)
    assert sum(seen[f"outrider_worker_state {each}"] for each in STATES) == 1.0
    return state


@pytest.mark.parametrize(
    ("kind", "zeros"),
    [
        (TargetMetrics, ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "max_num_seqs"]),
        (DraftMetrics, ["draft_sessions", "draft_nodes_sent_total", "max_num_seqs"]),
    ],
)  # fmt: skip
async def test_a_worker_that_loads_is_alive_and_not_ready_and_serves_all_metrics(
    kind: Callable[[str, str], WorkerMetrics], zeros: list[str]
) -> None:
    metrics, is_loaded = kind("model", "w"), threading.Event()
    async with WorkerProcess(options(health_port=0), "draft", ["outrider.v1.Draft"]) as process:
        process.show_state = metrics.show_state
        port = process.serve_metrics(metrics.registry)
        await process.listen()
        loading = asyncio.create_task(process.beside(lambda: is_loaded.wait(30)))
        channel: Any  # of bare bytes, which stubs know nothing of
        async with (
            grpc.aio.insecure_channel(process.address) as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{process.health_port}") as probes,
        ):
            for each in (channel, probes):
                assert await health(each, LIVENESS) == "SERVING"
                assert [await health(each, name) for name in ("", "outrider.v1.Draft")] == ["NOT_SERVING"] * 2
            with pytest.raises(grpc.aio.AioRpcError, match="loading its model") as refused:
                await channel.unary_unary(GET_INFO)(b"", timeout=20)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION, "it gives the call back"
            seen = await asyncio.to_thread(samples, port)
            assert state_of(seen) == "loading"
            assert [seen[f"outrider_{name}"] for name in zeros] == [0.0] * len(zeros)
            later = await asyncio.to_thread(samples, port)
            assert 0.0 < seen["outrider_model_load_seconds"] < later["outrider_model_load_seconds"]
            is_loaded.set()
            assert await loading
            draft_pb2_grpc.add_DraftServicer_to_server(Told(), process.services)
            with pytest.raises(grpc.aio.AioRpcError, match="loading its model"):
                await channel.unary_unary(GET_INFO)(b"", timeout=20)
            running = asyncio.create_task(process.run(record_from_info("draft", INFO), WorkerLoad, lambda: None, {}))
            async with asyncio.timeout(20):
                while await health(channel, "") != "SERVING":  # noqa: ASYNC110 - it is asked, it does not tell
                    await asyncio.sleep(0.01)
            assert await channel.unary_unary(GET_INFO)(b"", timeout=20) == INFO.SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary("/outrider.v1.Draft/Nothing")(b"", timeout=20)
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
            seen = await asyncio.to_thread(samples, port)
            assert state_of(seen) == "ready"
            again = await asyncio.to_thread(samples, port)
            assert seen["outrider_model_load_seconds"] == again["outrider_model_load_seconds"]
            process.request_stop()
            await running
        assert state_of(await asyncio.to_thread(samples, port)) == "draining"


async def test_what_loading_raises_is_raised() -> None:
    def fail() -> None:
        raise ConfigurationError("no such model")

    async with WorkerProcess(options(), "draft", []) as process:
        await process.listen()
        with pytest.raises(ConfigurationError, match="no such model"):
            await process.beside(fail)
        assert await process.beside(lambda: 7) == 7


LOADING = """
import argparse, sys, time
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import WorkerProcess, leave, run_worker

async def serve():
    async with WorkerProcess(WorkerOptions(worker_id="w"{options}), "draft", []) as process:
        await process.listen()
        print("listening", flush=True)
        await process.find_redis()
        await process.beside(lambda: time.sleep(600))

leave(run_worker(serve))
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a worker that loads for ten minutes, with further options."""
    started: list[subprocess.Popen[str]] = []

    def begin(more: str = "") -> subprocess.Popen[str]:
        words = [sys.executable, "-c", LOADING.format(options=more)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("waits_for", ["the model", pytest.param("Redis", marks=pytest.mark.thorough)])
def test_a_signal_ends_a_worker_that_loads(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals, waits_for: str
) -> None:
    (port,) = free_ports(1)
    worker = start(f', redis_url="redis://127.0.0.1:{port}/0", redis_wait_s=600' if waits_for == "Redis" else "")
    worker.send_signal(number)
    assert worker.wait(10) == 0
    assert worker.stderr is not None
    said = worker.stderr.read()
    assert "stopped before the worker was ready" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "status"), [(0, 0), (1, -signal.SIGTERM)])
def test_a_signal_ends_a_rank_that_waits_for_the_others(tmp_path: Path, rank: int, status: int) -> None:
    """A group is stopped by a signal to every process. The other rank is not even there yet."""
    port, metrics_port = free_ports(2)
    words = [*("--model", str(model_dir("llama"))), *("--metrics-port", str(metrics_port))]
    group = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (tmp_path / "said").open("wb") as said:
        worker = subprocess.Popen(
            [sys.executable, "-m", "target_worker", *words], cwd=ROOT, env=os.environ | group, stderr=said
        )
    try:
        deadline = time.monotonic() + 120
        while "the model runs on cpu" not in (tmp_path / "said").read_text():  # from here on it waits
            assert worker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker.terminate()
        assert worker.wait(20) == status
    finally:
        worker.kill()
        worker.wait()
    assert "Traceback" not in (tmp_path / "said").read_text()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended. It looks five times a second at what it has done."""
    found: list[int] = []
    watch = loading_thread.watch_progress
    monkeypatch.setattr(worker_process, "leave", found.append)
    monkeypatch.setattr(worker_process, "watch_progress", lambda longest_idle_s: watch(longest_idle_s, 0.2))
    return found


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashlib.sha256(bytes(1 << 20)).digest()


async def test_loading_that_is_stuck_ends_the_process(ends: list[int], caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()
    async with WorkerProcess(options(load_stall_exit_s=1.0), "draft", []) as process:
        await process.listen()
        loading = asyncio.create_task(process.beside(lambda: is_over.wait(30)))
        async with asyncio.timeout(20):
            while not ends:  # noqa: ASYNC110 - the process would be gone
                await asyncio.sleep(0.02)
        is_over.set()
        await loading
    assert ends == [EXIT_STALLED]
    assert "neither computed nor read anything for 1 s (--load-stall-exit-s)" in caplog.text


async def test_loading_that_computes_is_not_stuck(ends: list[int]) -> None:
    async with WorkerProcess(options(load_stall_exit_s=1.0), "draft", []) as process:
        await process.listen()
        await process.beside(lambda: compute(2.5))
    assert ends == []


async def test_a_rank_that_waits_for_others_is_not_stuck(ends: list[int]) -> None:
    async with WorkerProcess(options(load_stall_exit_s=0.5), "draft", []) as process:
        await process.listen()
        await process.beside(lambda: time.sleep(1.5), is_watched=False)
    assert ends == []


def looks(*works: WorkDone) -> list[float]:
    """Idle seconds by a watch that looks at these, ten seconds apart."""
    watch = LoadWatch(10.0, WorkDone(0.0, 0, 0), 0.0)
    return [watch.look(work, 10.0 * number) for number, work in enumerate(works, 1)]


def test_time_counts_in_which_nothing_is_done() -> None:
    scraped = WorkDone(0.05, 4000, 0)
    assert looks(scraped, scraped, scraped) == [10.0, 20.0, 30.0]


@pytest.mark.parametrize(
    "work",
    [WorkDone(0.6, 0, 0), WorkDone(0.0, 1 << 20, 0), WorkDone(0.0, 0, 20)],
    ids=["it computes", "it reads", "it reads mapped files"],
)
def test_work_of_any_kind_is_progress(work: WorkDone) -> None:
    nothing = WorkDone(0.0, 0, 0)
    assert looks(nothing, work, work) == [10.0, 0.0, 10.0]


def test_a_process_that_was_stopped_was_not_stuck() -> None:
    watch = LoadWatch(10.0, WorkDone(0.0, 0, 0), 0.0)
    assert watch.look(WorkDone(0.0, 0, 0), 3600.0) == 20.0


def test_what_this_process_does_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 << 20))
    before = work_done()
    compute(0.1)
    path.read_bytes()
    after = work_done()
    assert after.cpu_s > before.cpu_s
    if Path("/proc/self/io").exists():
        assert after.num_bytes_read - before.num_bytes_read >= 4 << 20
    assert work_done(tmp_path / "nowhere").num_bytes_read == 0


async def test_redis_may_come_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        waiting = asyncio.create_task(check_redis(f"redis://:secret@{address}/0", 60.0))
        async with asyncio.timeout(20):
            while not caplog.records:  # noqa: ASYNC110 - until it has said that it waits
                await asyncio.sleep(0.02)
    assert "waiting for Redis, for 60 s at most" in caplog.text
    assert address in caplog.text
    assert "secret" not in caplog.text
    words = [str(find_redis_server()), "--port", address.rpartition(":")[2], "--requirepass", "secret", "--save", ""]
    server = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20):
            await waiting
    finally:
        server.kill()
        server.wait()


async def test_a_redis_that_stays_away_is_told_after_the_time_for_it() -> None:
    (port,) = free_ports(1)
    began_s = time.monotonic()
    with pytest.raises(RegistryUnavailable, match=f"127.0.0.1:{port}/0 does not answer"):
        await check_redis(f"redis://127.0.0.1:{port}/0", 1.0)
    assert 1.0 <= time.monotonic() - began_s < 20.0


async def test_a_wrong_password_is_refused_at_once(redis_url: str) -> None:
    address = redis_url.rpartition("@")[2]
    for wrong in (f"redis://:wrong@{address}", f"redis://{address}"):
        async with asyncio.timeout(20):
            with pytest.raises(RegistryUnavailable, match=r"WRONGPASS|invalid|authenticated"):
                await check_redis(wrong, 600.0)
