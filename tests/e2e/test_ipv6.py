"""A whole system on IPv6: Redis, both workers and the coordinator listen on `::1` or `::`, and a text comes out."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import find_redis_server
from tests.e2e.replicas import metric, ready_line, wait_until_ready
from tests.e2e.system import Command, eventually, needs_the_pair
from tests.ipv6 import needs_ipv6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_the_pair, needs_ipv6]

PASSWORD = "s3cret"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def redis_url(stack: ExitStack, tmp_path: Path) -> str:
    (port,) = free_ports(1, "::1")
    words = [str(find_redis_server()), "--bind", "::1", "--port", str(port), "--requirepass", PASSWORD, "--save", ""]
    server = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.kill)
    return f"redis://:{PASSWORD}@[::1]:{port}/0"


def start(stack: ExitStack, folder: Path, *words: object) -> Command:
    command = Command.start(folder, *words)

    def stop() -> None:
        command.stop()
        for pid in command.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    stack.callback(stop)
    return command


def fact(command: Command, name: str) -> Any:
    """Reads a fact of a process' ready line."""
    line = ready_line(command)
    assert line is not None
    return line[name]


@pytest.mark.parametrize("proxy", ["haproxy", pytest.param("python", marks=pytest.mark.thorough)])
def test_a_text_comes_over_ipv6(stack: ExitStack, tmp_path: Path, redis_url: str, proxy: str) -> None:
    ray_folder = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))
    stack.callback(shutil.rmtree, ray_folder, ignore_errors=True)
    http_port, grpc_port = free_ports(2, "::1")
    coordinator = start(
        stack, tmp_path / "coordinator",
        *("coordinator", "--tokenizer", DEMO_TARGET, "--redis-url", redis_url, "--host", "::", "--insecure"),
        *("--port", http_port, "--grpc-port", grpc_port, "--ray-temp-dir", ray_folder / "ray", "--proxy", proxy),
    )  # fmt: skip
    wait_until_ready(coordinator)
    # As in a pod, whose manifest knows the address, and can write no brackets around it.
    target = start(
        stack, tmp_path / "target",
        *("target-worker", "--model", DEMO_TARGET, "--redis-url", redis_url),
        *("--host", "::", "--announce", "::1", "--insecure"),
    )  # fmt: skip
    draft = start(
        stack, tmp_path / "draft", "draft-worker", "--model", DEMO_DRAFT, "--redis-url", redis_url, "--host", "::1"
    )
    for worker in (target, draft):
        wait_until_ready(worker)
        assert str(fact(worker, "address")).startswith("[::1]:")
    url = f"http://[::1]:{http_port}"
    client = stack.enter_context(closing(httpx.Client(base_url=url, trust_env=False, timeout=120)))

    def num_workers() -> tuple[int, int]:
        seen = client.get("/health").json()
        return seen["num_target_workers"], seen["num_draft_workers"]

    eventually(num_workers, lambda seen: seen == (1, 1), "the coordinator knows a target and a draft")
    body = {"model": "target", "prompt": "The first day", "max_tokens": 48, "speculation": {"always": True}}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 48
    metrics = f"http://[::1]:{fact(target, 'metrics_port')}/metrics"
    assert metric(metrics, "outrider_hint_bytes_total") > 0, "hints came over IPv6 as well"
    assert httpx.get(f"http://127.0.0.1:{http_port}/livez", trust_env=False).status_code == 200, "IPv4 as before"
    for host in ("[::1]", "127.0.0.1"):
        with grpc.insecure_channel(f"{host}:{grpc_port}") as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
