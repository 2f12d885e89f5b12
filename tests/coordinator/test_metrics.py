"""Each replica's metrics are to be had from that replica, however many there are behind one door."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.answer.openai_response import ResponseWriter
from coordinator.observability import metrics as metrics_module
from coordinator.observability.metrics import CoordinatorMetrics, serve_replica
from coordinator.settings import METRICS_PORTS, CoordinatorSettings
from coordinator.speculation.fallback import FallbackState
from outrider import errors
from outrider.errors import AnotherLife, ConfigurationError, OutriderError, WorkerLeaves
from outrider.local.free_ports import free_ports
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role
from tests.coordinator.conftest import ClusterFactory

ROOT = Path(__file__).resolve().parents[2]
NUM_REQUESTS = 20


def settings(port: int | None, **others: object) -> CoordinatorSettings:
    return CoordinatorSettings(tokenizer_dir="unused", redis_url="unused", metrics_port=port, **others)  # type: ignore[arg-type]


def failures(text: str) -> float:
    """Requests that a replica counts as failed."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "outrider_request_failure_total"
    )


def scrape(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics").text


def test_failures_of_every_kind_are_counted_from_zero_on() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, OutriderError)]
    metrics = CoordinatorMetrics()
    counted = {
        sample.labels["code"]: sample.value
        for family in metrics.request_failure.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    # A configuration that is wrong ends the process; of a worker that has gone, or goes, the coordinator is told.
    never_told_to_clients = (ConfigurationError, AnotherLife, WorkerLeaves)
    assert counted == {each.grpc_code: 0.0 for each in kinds if not issubclass(each, never_told_to_clients)}


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_defect_of_ours_counts_as_internal(
    clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, is_streaming: bool
) -> None:
    def break_down(self: ResponseWriter, *arguments: object) -> None:
        raise RuntimeError("a defect, by the test")

    monkeypatch.setattr(ResponseWriter, "event" if is_streaming else "whole", break_down)
    async with clusters.open([clusters.target()]) as cluster:
        if is_streaming:  # the stream has begun, and ends with an event that says so
            await cluster.complete(stream=True)
        else:
            with pytest.raises(RuntimeError, match="a defect"):
                await cluster.complete(stream=False)
        metrics = cluster.service.environment.metrics
    assert metrics.registry.get_sample_value("outrider_request_failure_total", {"code": "INTERNAL"}) == 1.0


async def test_a_load_tool_that_knows_vllm_finds_its_names_where_it_sends_requests(clusters: ClusterFactory) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        await cluster.complete(stream=False)
        text = (await cluster.client.get("http://coordinator/metrics")).text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:") and sample.labels.get("finished_reason") in (None, "length")
    }
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:request_success_total"] == found["vllm:e2e_request_latency_seconds_count"] == 1
    assert found["vllm:prompt_tokens_total"] > 0
    assert found["vllm:generation_tokens_total"] > 0


def test_without_a_port_there_is_none() -> None:
    assert serve_replica(CoordinatorMetrics().registry, settings(None)) is None


def test_replicas_of_one_machine_take_one_port_each_and_tell_their_own_counts() -> None:
    (first,) = free_ports(1)
    ports = []
    for count in (3, 5):
        metrics = CoordinatorMetrics()
        metrics.request_failure.labels("INTERNAL").inc(count)
        ports.append(serve_replica(metrics.registry, settings(first)) or 0)
    assert first <= ports[0] < ports[1]
    assert [failures(scrape(port)) for port in ports for _ in range(3)] == [3.0] * 3 + [5.0] * 3


def test_where_no_port_is_free_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "METRICS_PORTS", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="--metrics-port"):
            serve_replica(CoordinatorMetrics().registry, settings(taken.getsockname()[1]))


def test_with_certificates_the_port_is_for_those_who_have_one(tmp_path: Path) -> None:
    authority, day = CertificateAuthority.make(), datetime.timedelta(days=1)
    for role in (Role.COORDINATOR, Role.OPERATOR):
        authority.issue(tmp_path / role.name, role, names=("127.0.0.1",), valid_for=day)
    secured = settings(free_ports(1)[0], tls_dir=str(tmp_path / "COORDINATOR"))
    url = f"https://127.0.0.1:{serve_replica(CoordinatorMetrics().registry, secured)}/metrics"
    context = ssl.create_default_context(cafile=str(tmp_path / "OPERATOR" / "ca.crt"))
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=context)
    context.load_cert_chain(tmp_path / "OPERATOR" / "tls.crt", tmp_path / "OPERATOR" / "tls.key")
    assert "outrider_live_workers" in httpx.get(url, verify=context).text


def test_where_callers_need_keys_the_port_needs_certificates() -> None:
    with pytest.raises(ValueError, match="tls_dir"):
        settings(9100, api_keys_file="keys.toml")
    assert settings(9100, api_keys_file="keys.toml", tls_dir="certificates").metrics_port == 9100


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_without_others_behind_it_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="--metrics-port"):
        settings(port)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(180)
async def test_what_two_replicas_behind_one_door_count_adds_up(clusters: ClusterFactory, redis_url: str) -> None:
    door, grpc_door, first = free_ports(3)
    temp_dir = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))  # short, for Ray's sockets
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator", "--tokenizer", str(clusters.model_dir), "--num-replicas", "2",
        "--port", str(door), "--grpc-port", str(grpc_door), "--metrics-port", str(first),
        "--ray-temp-dir", str(temp_dir),
        cwd=ROOT, env={**os.environ, "OUTRIDER_REDIS_URL": redis_url}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            url = json.loads(await process.stdout.readline())["http"]
        for _ in range(NUM_REQUESTS):  # there is no target: each is refused, and counted by whoever took it
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        # The second is not on the next port where somebody else has that.
        counts = []
        for port in range(first, first + METRICS_PORTS):
            try:
                counts.append(failures(scrape(port)))
            except (httpx.TransportError, ValueError):
                continue
        assert sum(counts) == NUM_REQUESTS
        assert len(counts) == 2
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
        shutil.rmtree(temp_dir, ignore_errors=True)


def test_what_autoscalers_ask_of_a_served_model_is_zero_before_anybody_asks() -> None:
    """No sample at all would be no answer to them, and no reason to shrink."""
    metrics = CoordinatorMetrics()
    metrics.know("large")
    metrics.know("large")
    labels = {"model_name": "large", "engine": "coordinator"}
    assert metrics.registry.get_sample_value("outrider_num_requests_queued", labels) == 0
    for state in (*(each.name.lower() for each in FallbackState), "undrafted"):
        known = metrics.registry.get_sample_value("outrider_fallback_requests", labels | {"state": state})
        assert known == 0, state
