"""The chart with draft pools alone: nothing else is installed, and its worker serves an engine without Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helm_python import HelmError

from k8s.helm.chart import merged, notes, preset, render
from outrider.local.free_ports import free_ports
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import draft_pb2
from tests.cluster.images import image_of
from tests.cluster.pod_plan import Contents, Identity, Probe, plan_pod
from tests.cluster.probes import ask
from tests.engines import test_hint_server as engines
from tests.k8s.pods import matches, pods
from tests.k8s.test_manifests import SECURED, container_of, first, spec_of

ROOT = Path(__file__).parents[2]
DEMO = {
    "attach": {"enabled": True},
    "pairs": [{"name": "demo", "draft": {"model": "/models/draft"}, "tokenizer": "/models/target"}],
}
EVERYTHING = merged(merged(preset("draft-pool"), SECURED), {"autoscaling": {"enabled": True}})
WITHIN_S = 120.0


def of(kind: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


class TestObjects:
    def test_without_more_they_are_draft_workers_and_what_belongs_to_them(self) -> None:
        open_ones = {"tls": {"enabled": False}, "networkPolicy": {"enabled": False}}
        kinds = sorted(each["kind"] for each in render(merged(DEMO, open_ones)))
        assert kinds == ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]
        assert {pod.name for pod in pods(render(DEMO))} == {"draft", "certificates"}

    def test_no_part_of_the_rest_is_there_whatever_else_is_on(self) -> None:
        more = {"coordinator": {"hosting": "ray", "ray": {"faultTolerance": {"enabled": True}}}}
        objects = render(merged(EVERYTHING, more))
        assert {pod.name for pod in pods(objects)} == {"draft", "fetch"}
        assert {each["kind"] for each in objects}.isdisjoint({"Secret", "Gateway", "RayService"})
        words = " ".join(container_of(objects, "draft")["args"])
        assert "redis" not in words
        for each in objects:
            assert not any(part in each["metadata"]["name"] for part in ("target", "coordinator", "redis")), each

    def test_engines_find_all_workers_by_the_name_of_a_headless_service(self) -> None:
        objects = render(EVERYTHING, release="drafts")
        (service,) = of("Service", objects)
        assert service["metadata"]["name"] == "drafts-outrider-llama-70b-draft-workers"
        assert service["spec"]["clusterIP"] == "None"
        assert "publishNotReadyAddresses" not in service["spec"], "only those that are ready"
        (draft,) = [pod for pod in pods(objects) if pod.name == "draft"]
        assert matches({"matchLabels": service["spec"]["selector"]}, draft.labels)
        assert {port["port"] for port in service["spec"]["ports"]} == {50051, 9100}

    def test_two_pools_of_one_namespace_share_no_name_and_no_pod(self) -> None:
        one, two = (render(EVERYTHING, release=f"outrider-{name}") for name in ("one", "two"))
        names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in (one, two)]
        assert names[0].isdisjoint(names[1])
        for each in (*of("Service", one), *of("PodMonitor", one)):
            selector = each["spec"]["selector"]
            labels = selector if each["kind"] == "Service" else selector["matchLabels"]
            assert not any(matches({"matchLabels": labels}, pod.labels) for pod in pods(two))

    def test_it_may_stand_beside_a_whole_system(self) -> None:
        names = [
            {(each["kind"], each["metadata"]["name"]) for each in objects}
            for objects in (render(EVERYTHING, release="drafts"), render(SECURED, release="outrider"))
        ]
        assert names[0].isdisjoint(names[1])

    def test_the_autoscaler_counts_what_the_workers_of_its_pool_report(self) -> None:
        (scaled,) = of("ScaledObject", render(merged(EVERYTHING, {"draft": {"replicas": {"min": 0}}})))
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["metadata"]["query"] == (
            'sum(outrider_draft_sessions{namespace="outrider",job="outrider-draft",model_name="llama-70b-draft"})'
        )
        assert scaled["spec"]["minReplicaCount"] == 1, "nobody would count for a pool without workers"

    def test_the_certificate_for_engines_has_both_of_their_names(self) -> None:
        certificates = {each["metadata"]["name"]: each["spec"] for each in of("Certificate", render(EVERYTHING))}
        assert set(certificates) == {f"outrider-{part}" for part in ("ca", "engine", "draft", "operator")}
        names = certificates["outrider-engine"]["dnsNames"]
        assert names == ["target.outrider.internal", "coordinator.outrider.internal"]

    def test_certificates_may_come_from_a_secret(self) -> None:
        objects = render(merged(DEMO, {"attach": {"tlsSecret": "drafts-tls"}, "monitoring": {"enabled": True}}))
        words = container_of(objects, "draft")["args"]
        assert "--tls-dir=/etc/outrider/tls" in words
        assert "--insecure" not in words
        (volume,) = [each for each in spec_of(objects, "draft")["volumes"] if each["name"] == "tls"]
        assert volume["secret"]["secretName"] == "drafts-tls"
        (monitor,) = of("PodMonitor", objects)
        assert monitor["spec"]["podMetricsEndpoints"][0]["tlsConfig"]["keySecret"]["name"] == "drafts-tls"

    def test_other_engines_may_be_let_in(self) -> None:
        peer = {"namespaceSelector": {"matchLabels": {"team": "search"}}}
        values = merged(EVERYTHING, {"attach": {"engines": [peer], "hintPorts": {"first": 9000, "last": 9000}}})
        policy = first(render(values), "NetworkPolicy", "draft")["spec"]
        assert policy["ingress"][0]["from"] == policy["egress"][0]["to"] == [peer]
        assert policy["egress"][0]["ports"] == [{"protocol": "TCP", "port": 9000, "endPort": 9000}]

    def test_notes_say_what_an_engine_is_told(self) -> None:
        text = notes(DEMO)
        assert '"draft_workers": ["outrider-demo-draft-workers.outrider:50051"]' in text
        assert "curl" not in text
        assert '"tls_dir": "/etc/outrider/tls"' in text
        assert "outrider-engine-tls" in text
        assert '"is_insecure": true' in notes(merged(DEMO, {"tls": {"enabled": False}}))

    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            ({"attach": {"enabled": True}}, "demo has a target"),
            ({"attach": {"enabled": True}, "pairs": [{"name": "a"}]}, "a has no draft"),
            ({"pairs": [{"name": "a", "draft": {"model": "/a"}}]}, "target"),
            (
                {"pairs": [{"name": "a", "servedModelName": "a", "target": {"model": "/a"}, "tokenizer": "/a"}]},
                "tokenizer of a",
            ),
            (merged(DEMO, {"attach": {"tlsSecret": "a"}, "tls": {"enabled": True}}), "attach.tlsSecret"),
            ({"attach": {"tlsSecret": "a"}}, "attach.tlsSecret"),
            (merged(DEMO, {"attach": {"engines": []}}), "engines"),
            (merged(DEMO, {"attach": {"hintPorts": {"last": 7000}}}), "first is above last"),
        ],
    )
    def test_a_mistake_is_refused_by_its_name(self, values: dict[str, Any], reason: str) -> None:
        with pytest.raises(HelmError, match=reason):
            render(values)


class Worker:
    """The rendered draft worker as a process of this machine, with its probes."""

    def __init__(self, process: subprocess.Popen[bytes], probes: dict[str, Probe], metrics_port: int) -> None:
        self.process = process
        self._probes = probes
        self._metrics_port = metrics_port

    async def answers(self, kind: str) -> bool:
        async def execute(_: object) -> bool:
            raise AssertionError("no probe of a worker is a command")

        return await ask(self._probes[kind], "127.0.0.1", execute)

    async def metric(self, name: str) -> float:
        """A metric of the pool's model, as the autoscaler selects it."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{self._metrics_port}/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        assert 'model_name="demo-draft"' in line
        return float(line.rpartition(" ")[2])


@asynccontextmanager
async def started(port: int, log: Path) -> AsyncIterator[Worker]:
    """The worker as its pod would run it, but for ports and the place of the models."""
    spec = spec_of(render(merged(DEMO, {"tls": {"enabled": False}})), "draft")
    (container,) = plan_pod(spec, Identity("draft-0", "127.0.0.1", {}), Contents(), image_of).containers
    (metrics_port,) = free_ports(1)
    assert container.words[:3] == ("python", "-m", "draft_worker")
    given = {"/models": str(ROOT / "demo"), "--port=50051": f"--port={port}", "=9100": f"={metrics_port}"}
    words = [sys.executable, *container.words[1:]]
    for written, instead in given.items():
        words = [word.replace(written, instead) for word in words]
    environment = {**os.environ, "OUTRIDER_ZONE": container.environment["OUTRIDER_ZONE"]}
    probes = {kind: replace(probe, port=port) for kind, probe in container.probes.items()}
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield Worker(process, probes, metrics_port)
    finally:
        process.kill()
        process.wait(30)


async def until(is_done: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await is_done():  # noqa: ASYNC110 - it asks another process
            await asyncio.sleep(0.05)
    assert what


@pytest.mark.timeout(300)
async def test_the_rendered_worker_serves_an_engine_without_redis_and_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "VOCAB_SIZE", 4096)
    (port,) = free_ports(1)
    settings = {"draft_workers": [f"localhost:{port}"], "host": "0.0.0.0", "is_insecure": True}
    async with started(port, tmp_path / "log") as worker, engines.running([], **settings) as engine:
        await until(lambda: worker.answers("startup"), "it is alive")
        await until(lambda: worker.answers("readiness"), "it is ready")
        parameters = SamplingParams(temperature=0.0, max_tokens=1000).to_proto()
        engine.open("a", draft_pb2.AttachRequest(session_id="a", hint_token="of a", sampling=parameters))

        async def has_hints() -> bool:
            engine.step()
            return await worker.metric("outrider_draft_nodes_sent_total") > 10

        await until(has_hints, "hints arrive")
        assert await worker.metric("outrider_draft_sessions") == 1
        worker.process.send_signal(signal.SIGTERM)

        async def is_drained() -> bool:
            engine.step()
            return not await worker.answers("readiness")

        await until(is_drained, "it is not ready any more")
        assert worker.process.poll() is None, "what runs may end"
        assert await worker.answers("liveness")
        engine.close("a")
        assert await asyncio.to_thread(worker.process.wait, WITHIN_S) == 0
