"""KubeRay's controllers with a node that only keeps what it is given, and a dashboard that answers as it is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from k8s.helm.chart import render
from tests.cluster.kuberay.controller import Cluster, RayServiceController
from tests.cluster.network import CommandError
from tests.k8s.pods import Object

RUNNING = json.dumps({"applications": {"outrider": {"status": "RUNNING", "message": "", "deployments": {}}}})
NOTHING = json.dumps({"applications": {}})


class Node:
    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.pods: dict[str, list[Any]] = {}

    def apply(self, objects: Sequence[Object]) -> None:
        self.objects |= {each["metadata"]["name"]: each for each in objects}

    def put_secret(self, name: str, files: dict[str, bytes]) -> None:
        self.secrets[name] = files

    async def create(self, owner: str, name: str, template: Object, revision: str) -> Any:
        pod = SimpleNamespace(is_ready=True, name=name, labels=template["metadata"]["labels"])
        self.pods.setdefault(owner, []).append(pod)
        return pod

    def of(self, owner: str) -> list[Any]:
        return self.pods.get(owner, [])


class Controller(RayServiceController):
    """Its dashboard gives these answers, and notes what was submitted."""

    def __init__(self, node: Node, service: Object) -> None:
        super().__init__(node, service, lambda _: None)
        self.answers: list[str | CommandError] = []
        self.submitted: list[str] = []

    async def _ask(self, cluster: Cluster, head: Any, method: str, query: str, body: str = "") -> str:
        if method == "PUT":
            self.submitted.append(body)
            return ""
        answer = self.answers.pop(0)
        if isinstance(answer, CommandError):
            raise answer
        return answer

    async def looks(self, *answers: str | CommandError) -> str:
        """Looks once for each answer; returns what is missing then."""
        self.answers += answers
        for _ in answers:
            await self._reconcile(self.clusters[-1])
        return "; ".join(self.missing())


@pytest.fixture
def service() -> dict[str, Any]:
    values = {"coordinator": {"hosting": "ray", "replicas": {"min": 2}}}
    return copy.deepcopy(next(each for each in render(values) if each["kind"] == "RayService"))


async def test_a_cluster_has_a_head_workers_a_token_and_a_service(service: dict[str, Any]) -> None:
    node = Node()
    controller = Controller(node, service)
    for _ in range(2):
        await controller.step(service)
    (cluster,) = controller.clusters
    assert {owner: len(pods) for owner, pods in node.pods.items()} == {cluster.head: 1, f"{cluster.name}-replicas": 2}
    assert list(node.secrets) == [cluster.name]
    assert list(node.objects) == [f"{cluster.name}-head-svc"]
    assert "no application" in "; ".join(controller.missing())


async def test_the_services_come_when_the_application_runs(service: dict[str, Any]) -> None:
    node = Node()
    controller = Controller(node, service)
    await controller.step(service)
    assert "refused" in await controller.looks(CommandError("refused"))
    assert controller.submitted == []
    assert "no application" in await controller.looks(NOTHING)
    assert len(controller.submitted) == 1
    assert "outrider-coordinator-serve-svc" not in node.objects
    assert await controller.looks(RUNNING) == ""
    selector = node.objects["outrider-coordinator-serve-svc"]["spec"]["selector"]
    assert selector == {"ray.io/cluster": controller.clusters[0].name, "ray.io/serve": "true"}


async def test_a_lost_or_changed_application_is_submitted_again(service: dict[str, Any]) -> None:
    controller = Controller(Node(), service)
    await controller.step(service)
    await controller.looks(NOTHING, RUNNING, NOTHING)
    assert len(controller.submitted) == 2
    changed = copy.deepcopy(service)
    changed["spec"]["serveConfigV2"] = service["spec"]["serveConfigV2"].replace("num_replicas: 2", "num_replicas: 1")
    await controller.step(changed)
    assert len(controller.clusters) == 1
    await controller.looks(RUNNING)
    assert len(controller.submitted) == 3


async def test_a_changed_pod_makes_a_second_cluster_that_takes_over_when_it_runs(service: dict[str, Any]) -> None:
    node = Node()
    controller = Controller(node, service)
    await controller.step(service)
    await controller.looks(NOTHING, RUNNING)
    changed = copy.deepcopy(service)
    changed["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = "other"
    await controller.step(changed)
    old, new = controller.clusters
    assert "no application" in await controller.looks(NOTHING)
    assert (controller.active, old.leaves_at_s) == (old, None)
    assert await controller.looks(RUNNING) == ""
    assert controller.active is new
    assert old.leaves_at_s is not None
    assert node.objects["outrider-coordinator-serve-svc"]["spec"]["selector"]["ray.io/cluster"] == new.name


async def test_more_workers_join_the_cluster_that_there_is(service: dict[str, Any]) -> None:
    node = Node()
    controller = Controller(node, service)
    await controller.step(service)
    changed = copy.deepcopy(service)
    changed["spec"]["rayClusterConfig"]["workerGroupSpecs"][0] |= {"replicas": 3, "maxReplicas": 3}
    await controller.step(changed)
    (cluster,) = controller.clusters
    assert len(node.of(f"{cluster.name}-replicas")) == 3


async def test_an_unready_head_is_not_asked(service: dict[str, Any]) -> None:
    node = Node()
    controller = Controller(node, service)
    await controller.step(service)
    await controller.looks(NOTHING, RUNNING)
    (head,) = node.of(controller.clusters[0].head)
    head.is_ready = False
    await controller._reconcile(controller.clusters[0])
    assert "its head is not ready" in "; ".join(controller.missing())
