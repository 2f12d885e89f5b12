"""KubeRay's controllers: clusters of a RayService, its application on their dashboards, and its services.

As ray-operator/controllers/ray/rayservice_controller.go and raycluster_controller.go of KubeRay 1.6.2: a new
specification of the cluster makes a second one, which takes over when its application runs; a new configuration of the
application goes to the cluster that there is, and so does the old one if the cluster has lost it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import secrets
import string
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from tests.cluster.kuberay.pods import TOKEN_KEY, head_pod, worker_pods
from tests.cluster.kuberay.services import application, check, head_service, serve_service
from tests.cluster.network import CommandError, command, inside
from tests.cluster.pod import Pod, Say
from tests.k8s.pods import Object

OPERATOR: Final = "operator"
"""Its network namespace."""
REQUEUE_S: Final = 2.0
REQUEST_TIMEOUT_S: Final = 2.0
_PATH: Final = "/api/serve/applications/"


class Node(Protocol):
    """The parts of a cluster that the controllers need."""

    def apply(self, objects: Sequence[Object]) -> None: ...

    def put_secret(self, name: str, files: dict[str, bytes]) -> None: ...

    async def create(self, owner: str, name: str, template: Object, revision: str) -> Pod: ...

    def of(self, owner: str) -> list[Pod]: ...


@dataclass
class Cluster:
    """A RayCluster."""

    name: str
    spec: Object
    token: str
    submitted: str = ""  # the configuration of the application
    statuses: dict[str, str] = field(default_factory=dict)  # by application
    trouble: str = "its dashboard has not been asked yet"
    leaves_at_s: float | None = None

    @property
    def head(self) -> str:
        """The owner of its head."""
        return f"{self.name}-head"

    @property
    def groups(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Number and template of pods, by owner."""
        found = {self.head: (1, head_pod(self.spec, self.name))}
        return found | {f"{self.name}-{group}": pair for group, pair in worker_pods(self.spec, self.name).items()}

    @property
    def is_running(self) -> bool:
        return bool(self.statuses) and set(self.statuses.values()) == {"RUNNING"}


class RayServiceController:
    """Acts on one RayService. `step` comes with every round of the node's controllers, `serve` runs beside them."""

    def __init__(self, node: Node, service: Object, say: Say) -> None:
        check(service)
        self.clusters: list[Cluster] = []  # the newest is the last
        self.active: Cluster | None = None
        self._node, self._service, self._say = node, service, say

    async def step(self, service: Object) -> None:
        """Makes clusters, and their pods."""
        check(service)
        self._service = service
        spec = service["spec"]["rayClusterConfig"]
        if not self.clusters or _revision(self.clusters[-1].spec) != _revision(spec):
            self.clusters.append(self._new_cluster(spec))
        self.clusters[-1].spec = spec
        for cluster in self.clusters:
            for owner, (number, template) in cluster.groups.items():
                for _ in range(number - len(self._node.of(owner))):
                    kind = "" if owner == cluster.head else "-worker"
                    await self._node.create(owner, f"{owner}{kind}-{_suffix()}", template, "")

    async def serve(self) -> None:
        """Looks after the application until it is cancelled."""
        while True:
            await asyncio.sleep(REQUEUE_S)
            for cluster in self.clusters[-1:]:
                await self._reconcile(cluster)
            for cluster in list(self.clusters):
                if cluster.leaves_at_s is not None and time.monotonic() > cluster.leaves_at_s:
                    self.clusters.remove(cluster)
                    self._say(f"{cluster.name}: the old cluster ends")
                    pods = [pod for owner in cluster.groups for pod in self._node.of(owner)]
                    await asyncio.gather(*(pod.end() for pod in pods))

    def missing(self) -> Iterator[str]:
        """Names, in words, everything that is not as the RayService says."""
        name = self._service["metadata"]["name"]
        if not self.clusters:
            yield f"{name}: there is no cluster"
            return
        newest = self.clusters[-1]
        for owner, (number, _) in newest.groups.items():
            num_ready = sum(pod.is_ready for pod in self._node.of(owner))
            if num_ready != number:
                yield f"{owner}: {num_ready} of {number} ready"
        if newest.submitted != application(self._service) or not newest.is_running:
            yield f"{newest.name}: {newest.statuses or 'no application'} ({newest.trouble})"
        elif newest is not self.active:
            yield f"{newest.name}: the services do not lead to it yet"

    def _new_cluster(self, spec: Object) -> Cluster:
        name = f"{self._service['metadata']['name']}-{_suffix()}"
        token = base64.b64encode(secrets.token_bytes(32)).decode()
        self._node.put_secret(name, {TOKEN_KEY: token.encode()})
        self._node.apply([head_service(name, name, spec)])
        self._say(f"{name}: a new cluster")
        return Cluster(name, spec, token)

    async def _reconcile(self, cluster: Cluster) -> None:
        """Submits the application where it is not, and leads the services to the cluster once it runs."""
        heads = [pod for pod in self._node.of(cluster.head) if pod.is_ready]
        if not heads:
            cluster.trouble, cluster.statuses = "its head is not ready", {}
            return
        try:
            found = await self._ask(cluster, heads[0], "GET", "?api_type=declarative")
            cluster.statuses = {name: each["status"] for name, each in json.loads(found)["applications"].items()}
            cluster.trouble = _messages(found)
            wanted = application(self._service)
            if cluster.submitted != wanted or not cluster.statuses:
                await self._ask(cluster, heads[0], "PUT", "", wanted)
                cluster.submitted, cluster.statuses = wanted, {}
                self._say(f"{cluster.name}: the application is submitted")
                return
        except CommandError as error:
            cluster.trouble = str(error)[-500:]
            return
        if cluster.is_running and cluster is not self.active:
            self._lead_to(cluster)

    def _lead_to(self, cluster: Cluster) -> None:
        spec = self._service["spec"]
        name = self._service["metadata"]["name"]
        service = head_service(name, cluster.name, cluster.spec)
        self._node.apply([service, serve_service(self._service, cluster.name)])
        for other in self.clusters:
            if other is not cluster and other.leaves_at_s is None:
                other.leaves_at_s = time.monotonic() + spec["rayClusterDeletionDelaySeconds"]
        self.active = cluster
        self._say(f"{cluster.name}: runs the application, and gets the requests")

    async def _ask(self, cluster: Cluster, head: Pod, method: str, query: str, body: str = "") -> str:
        """One request from the operator's namespace, within KubeRay's own time. Raises CommandError."""
        script = str(Path(__file__).with_name("dashboard.py"))
        url = f"http://{head.identity.address}:8265{_PATH}{query}"
        words = ["python3", "-I", "-S", script, method, url, str(REQUEST_TIMEOUT_S)]
        status, _, text = (await command(*inside(OPERATOR), *words, text=f"{cluster.token}\n{body}")).partition("\n")
        if not 200 <= int(status) < 300:
            raise CommandError(f"{method} {url} is answered with {status}: {text}")
        return text


def _revision(spec: Object) -> str:
    """A hash of everything whose change makes a new cluster: all but the numbers of pods."""
    groups = [
        {key: value for key, value in group.items() if key not in ("replicas", "minReplicas", "maxReplicas")}
        for group in spec["workerGroupSpecs"]
    ]
    text = json.dumps({**spec, "workerGroupSpecs": groups}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _messages(found: str) -> str:
    """The dashboard's messages about applications and deployments."""
    messages = []
    with suppress(KeyError):
        for application_found in json.loads(found)["applications"].values():
            messages.append(application_found["message"])
            messages += [each["message"] for each in application_found["deployments"].values()]
    return " ".join(filter(None, messages))[-500:]


def _suffix() -> str:
    return "".join(random.choices(string.ascii_lowercase, k=5))
