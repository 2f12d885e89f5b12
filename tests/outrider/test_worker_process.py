"""Tests of what all worker processes share: errors that callers can act on, access rules, addresses and stalls."""

from __future__ import annotations

import asyncio
import datetime
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from draft_worker import __main__ as draft_main
from outrider.addresses import join_address
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.observability.metrics_server import serve_metrics
from outrider.registry.worker_record import WorkerLoad
from outrider.security import call_admission
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Dialer, Role, TlsFiles
from outrider.worker import worker_process
from outrider.worker.rpc import OPEN_METHODS, abort
from outrider.worker.worker_facts import record_from_info
from outrider.worker.worker_options import WorkerOptions
from outrider.worker.worker_process import (
    EXIT_STALLED,
    LIVENESS,
    WorkerProcess,
    pin_to_cores,
    report_cause,
)
from protos.outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, hints_pb2, target_pb2
from target_worker import __main__ as target_main
from tests.ipv6 import needs_ipv6
from tests.raw_calls import framed, raw_connection


class Refusing(draft_pb2_grpc.DraftServicer):
    def __init__(self, error: OutriderError) -> None:
        self.error = error

    async def GetInfo(self, request: common_pb2.GetInfoRequest, context: Any) -> common_pb2.WorkerInfo:
        await abort(context, self.error)
        raise AssertionError("abort never returns")


async def refusal(error: OutriderError) -> grpc.aio.AioRpcError:
    """Returns the error as a caller receives it."""
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServicer_to_server(Refusing(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await draft_pb2_grpc.DraftStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=10)
            return caught.value
    finally:
        await server.stop(None)


async def test_a_full_worker_says_when_to_come_back() -> None:
    error = await refusal(Overloaded("all slots are taken", retry_after_s=1.5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "all slots are taken"
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.retry_delay.ToMilliseconds() == 1500


async def test_an_error_of_the_caller_carries_no_retry_hint() -> None:
    error = await refusal(InvalidRequest("top_p", "top_p is 7; permitted: above 0, at most 1"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    assert not status.details


def methods_of(*files: Any) -> set[str]:
    """/package.Service/Method of every service that the files define."""
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


@pytest.mark.parametrize(
    ("permitted", "files"),
    [(target_main.KIND.permitted, (target_pb2, hints_pb2)), (draft_main.KIND.permitted, (draft_pb2,))],
)
def test_every_method_that_a_worker_serves_has_a_rule(permitted: Mapping[str, Any], files: Any) -> None:
    assert set(permitted) == methods_of(*files)
    assert set(OPEN_METHODS) == methods_of(health_pb2, reflection_pb2)


def test_only_what_tells_nothing_about_requests_is_for_every_part() -> None:
    rules = {**OPEN_METHODS, **target_main.KIND.permitted, **draft_main.KIND.permitted}
    for method, roles in rules.items():
        is_open = method in OPEN_METHODS or method.endswith("/GetInfo")
        assert (len(roles) == 1) is not is_open, method


async def test_a_service_that_is_added_later_is_closed_until_a_rule_names_it(tmp_path: Path) -> None:
    authority = CertificateAuthority.make()
    for role in (Role.TARGET, Role.COORDINATOR):
        authority.issue(tmp_path / role.name, role, valid_for=datetime.timedelta(days=1))

    async def answer(request: bytes, context: Any) -> bytes:
        return request

    handlers = {"Tell": grpc.unary_unary_rpc_method_handler(answer)}
    options = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0, tls_dir=tmp_path / "TARGET")
    async with WorkerProcess(options, "target", [], target_main.KIND.permitted) as process:
        process.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("later.Service", handlers),))
        process._set_health(is_ready=True)
        await process.server.start()
        dialer = Dialer(TlsFiles(tmp_path / "COORDINATOR"))
        async with cast(Any, dialer.open(process.address, Role.TARGET, ())) as channel:
            status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/later.Service/Tell")(b"x", timeout=20)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_port_in_use_is_named() -> None:
    options = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0)
    async with WorkerProcess(options, "draft", []) as process:
        await process.server.start()
        taken = WorkerOptions("127.0.0.1", process.port, None, 0, "w", 1.0)
        with pytest.raises(OutriderError, match=rf"port {process.port} .*--port"):
            async with WorkerProcess(taken, "draft", []):
                pass


async def test_an_address_that_nobody_can_dial_is_not_announced() -> None:
    options = WorkerOptions("0.0.0.0", 0, "redis://127.0.0.1:1/0", 0, "w", 1.0, is_insecure=True)
    with pytest.raises(OutriderError, match=r"--host 0\.0\.0\.0 cannot be announced"):
        async with WorkerProcess(options, "draft", []):
            pass


async def test_an_address_given_is_announced_instead_of_the_one_it_listens_on() -> None:
    options = WorkerOptions("0.0.0.0", 0, None, 0, "w", 1.0, announce="worker.internal:7000", is_insecure=True)
    async with WorkerProcess(options, "draft", []) as process:
        assert process.address == "worker.internal:7000"
        assert process.port not in (0, 7000)


@pytest.mark.parametrize("host", ["worker.internal", "fd00::1", "[fd00::1]"])
async def test_an_address_without_a_port_is_announced_with_the_workers_own(host: str) -> None:
    options = WorkerOptions("0.0.0.0", 0, None, 0, "w", 1.0, announce=host, is_insecure=True)
    async with WorkerProcess(options, "draft", []) as process:
        assert process.address == join_address(host, process.port)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_worker_serves_on_ipv6(host: str) -> None:
    options = WorkerOptions(host, 0, None, 0, "w", 1.0, health_port=0, is_insecure=True)
    async with WorkerProcess(options, "draft", []) as process:
        process._set_health(is_ready=True)
        await process.server.start()
        assert process.address == f"[{host}]:{process.port}"
        for address in [f"[::1]:{process.port}", *([f"127.0.0.1:{process.port}"] if host == "::" else [])]:
            async with grpc.aio.insecure_channel(address) as channel:
                assert await health(channel, "") == "SERVING"


@pytest.mark.parametrize(
    "address",
    [
        *("", "worker:", ":7000", "worker:port", "worker:0", "worker:65536", "0.0.0.0", "[::]:7000"),
        *("fd00::1:50051", "[fd00::1", "[fd00::1]:", "[fd00::1]7000"),
    ],
)
async def test_what_nobody_can_dial_is_not_announced_by_name_either(address: str) -> None:
    options = WorkerOptions("127.0.0.1", 0, "redis://127.0.0.1:1/0", 0, "w", 1.0, announce=address)
    with pytest.raises(OutriderError, match=r"--announce .*HOST:PORT"):
        async with WorkerProcess(options, "draft", []):
            pass


async def test_a_metrics_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OutriderError, match="--metrics-port"):
            serve_metrics(CollectorRegistry(), "127.0.0.1", taken.getsockname()[1])


STALLING = """
import argparse, asyncio, sys, time
from outrider.worker.worker_options import WorkerOptions
from outrider.registry.worker_record import WorkerLoad
from outrider.worker.worker_facts import record_from_info
from outrider.worker.worker_process import WorkerProcess, run_worker
from protos.outrider.v1 import common_pb2

class Core:
    def handle(self, event, now):
        return []
    def run_next(self, now):
        time.sleep({seconds})
        return [], None

async def serve():
    options = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0, stall_s=0.3, stall_exit_s=1.5)
    info = common_pb2.WorkerInfo(worker_id="w", max_num_seqs=1, max_model_len=1, vocab_size=1)
    async with WorkerProcess(options, "draft", []) as process:
        thread = process.make_thread(Core(), lambda actions: None)
        thread.start()
        asyncio.get_running_loop().call_later(1.0, thread.submit, "a step")
        await process.run(record_from_info("draft", info), WorkerLoad, lambda: None, {{}})
        thread.stop()

sys.exit(run_worker(serve))
"""


@pytest.fixture
def stalling(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A worker whose first step, soon, takes as many seconds."""
    program = STALLING.format(seconds=request.param)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


async def health(channel: grpc.aio.Channel, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def address_of(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return str(json.loads(worker.stdout.readline())["address"])


async def becomes(channel: grpc.aio.Channel, status: str) -> None:
    async with asyncio.timeout(10):
        while await health(channel, "") != status:  # noqa: ASYNC110 - it is asked, it does not tell
            await asyncio.sleep(0.02)


async def test_a_watcher_that_takes_nothing_holds_up_no_worker() -> None:
    """Found: gRPC's own service waited for it before the next status, and the worker was never ready, or never
    drained. Whoever reaches the health port could do it."""
    options = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0, health_port=0)
    async with WorkerProcess(options, "draft", []) as process:
        await process.listen()
        address = f"127.0.0.1:{process.health_port}"
        async with raw_connection(address, window=0) as stranger, grpc.aio.insecure_channel(address) as channel:
            call = await stranger.begin("/grpc.health.v1.Health/Watch")
            await stranger.send(call, framed(b""))
            for is_ready, status in ((True, "SERVING"), (False, "NOT_SERVING")) * 2:
                process._set_health(is_ready=is_ready)
                assert await health(channel, "") == status


async def test_strangers_with_many_watches_shut_out_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_admission, "OPEN_CALLS_MAX", 4)
    monkeypatch.setattr(call_admission, "MADE_ROOM_S", 0.0)
    options = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0, health_port=0)
    async with WorkerProcess(options, "draft", []) as process:
        await process.listen()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{process.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = []
            for _ in range(12):
                watches.append(stub.Watch(health_pb2.HealthCheckRequest(), timeout=20))
                assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health(channel, LIVENESS) == "SERVING"
            codes = [await watch.code() for watch in watches[:9]]
            assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            process._set_health(is_ready=True)
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.thorough
@pytest.mark.parametrize("stalling", [60], indirect=True)
async def test_a_model_that_hangs_makes_the_worker_not_ready_and_ends_it(
    stalling: subprocess.Popen[str],
) -> None:
    async with grpc.aio.insecure_channel(address_of(stalling)) as channel:
        await becomes(channel, "SERVING")
        await becomes(channel, "NOT_SERVING")
        assert await health(channel, LIVENESS) == "SERVING", "it ends by itself"
    assert await asyncio.to_thread(stalling.wait, 10) == EXIT_STALLED
    assert stalling.stderr is not None
    assert "no sign of life" in stalling.stderr.read()


@pytest.mark.thorough
@pytest.mark.parametrize("stalling", [0.9], indirect=True)
async def test_a_model_that_was_only_slow_is_ready_again(stalling: subprocess.Popen[str]) -> None:
    async with grpc.aio.insecure_channel(address_of(stalling)) as channel:
        await becomes(channel, "NOT_SERVING")
        await becomes(channel, "SERVING")
    stalling.terminate()
    assert await asyncio.to_thread(stalling.wait, 10) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("stalling", [2.5], indirect=True)
async def test_a_worker_that_was_stopped_as_a_whole_does_not_take_that_for_a_stall(
    stalling: subprocess.Popen[str],
) -> None:
    """It is stopped in the middle of a step, for longer than its model may show no sign of life."""
    async with grpc.aio.insecure_channel(address_of(stalling)) as channel:
        await becomes(channel, "NOT_SERVING")  # the step has begun, and takes two seconds more
        stalling.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)
        stalling.send_signal(signal.SIGCONT)
        await becomes(channel, "SERVING")
    stalling.terminate()
    assert await asyncio.to_thread(stalling.wait, 10) == 0


async def test_a_worker_that_was_paused_does_not_end_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model owed a sign of life for the whole pause, and gives it as soon as both run again."""
    owed_s = [2.0]
    ends: list[int] = []
    monkeypatch.setattr(worker_process, "leave", ends.append)
    options = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0, stall_s=0.3, stall_exit_s=1.5)
    process = WorkerProcess(options, "draft", [])
    monkeypatch.setattr(process, "_stalled_s", lambda: owed_s.pop() if owed_s else 0.0)
    watching = asyncio.create_task(process._watch_until_stop(None))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 - the whole loop stands still, for longer than --stall-s
    async with asyncio.timeout(10):
        while owed_s:  # noqa: ASYNC110 - until the watch has looked
            await asyncio.sleep(0.01)
    process.request_stop()
    await watching
    assert ends == []


def test_bounds_of_a_stall_that_make_no_sense_are_refused_by_the_flag() -> None:
    with pytest.raises(OutriderError, match="--stall-exit-s"):
        WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0, stall_s=5.0, stall_exit_s=5.0)


@pytest.mark.parametrize("cores", ["x", "0,,1", "100000"])
def test_cores_that_do_not_exist_are_refused_by_the_flag(cores: str) -> None:
    with pytest.raises(OutriderError, match="--cpu-affinity"):
        pin_to_cores(cores)


def test_the_cause_of_an_end_is_in_torchruns_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    report_cause("no such model")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    report_cause("3 ranks cannot share 2 heads")
    assert json.loads(path.read_text())["message"]["message"] == "3 ranks cannot share 2 heads"
    assert capsys.readouterr().err == "error: no such model\nerror: 3 ranks cannot share 2 heads\n"


async def test_a_worker_whose_ticks_fail_begins_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_begun, again = 0, asyncio.Event()

    async def fail(*_: object) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun > 1:
            again.set()
        raise KeyError("nobody foresaw it")

    monkeypatch.setattr(worker_process, "keep_ticking", fail)
    info = common_pb2.WorkerInfo(worker_id="w", max_num_seqs=1, max_model_len=1, vocab_size=1)
    async with WorkerProcess(WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0), "draft", []) as process:
        running = asyncio.create_task(process.run(record_from_info("draft", info), WorkerLoad, lambda: None, {}))
        async with asyncio.timeout(30):
            await again.wait()
        process.request_stop()
        await running
