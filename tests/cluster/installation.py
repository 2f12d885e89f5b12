"""The installed objects, and the controllers that act on them: deployments, services, policies, certificates, routes.

Invariant: a pod starts only when its own rules, and those of everybody who may talk to it, are loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from tests.cluster import firewall
from tests.cluster.accounts import Accounts
from tests.cluster.api_server import Store, serving
from tests.cluster.certificate_issuer import CertificateIssuer
from tests.cluster.container import FILES, prepare
from tests.cluster.firewall import Peer, Service
from tests.cluster.gateway import NAME as GATEWAY
from tests.cluster.gateway import Gateway
from tests.cluster.gateway_config import backends
from tests.cluster.kuberay.controller import OPERATOR, RayServiceController
from tests.cluster.network import NODE, Network
from tests.cluster.pod import Pod, Say, remove_files
from tests.cluster.pod_plan import Contents, Identity, service_links
from tests.cluster.rolling_update import Counts, next_step, strategy_of
from tests.cluster.services import Endpoints, endpoints_of, hosts_lines
from tests.e2e.chaos.cgroups import Place as GroupPlace
from tests.k8s.pods import Object
from tests.k8s.policy_rules import OTHERS, Party

LOOK_S: Final = 0.25
"""Between two rounds of the controllers, if nothing has changed."""
ISSUES_S: Final = 1.0
"""The time that a certificate takes to be issued."""
API_PORT: Final = 6443
CLIENT: Final = "client"
OUTSIDERS: Final = {
    GATEWAY: OTHERS["proxy"],
    CLIENT: OTHERS["stranger"],
    **{name: OTHERS[name] for name in ("prometheus", OPERATOR)},
}
"""Parties that always have a network namespace beside the pods of the installation."""
SHARED_GROUP: Final = 10001
"""The group that volumes of our pods belong to."""
PASSIVE: Final = frozenset(
    {
        *("ServiceAccount", "PriorityClass", "PodDisruptionBudget", "Issuer", "Certificate", "Service"),
        *("Role", "RoleBinding", "CronJob"),
        *("NetworkPolicy", "Gateway", "HTTPRoute", "GRPCRoute", "Deployment", "RayService", "Job"),
    }
)
"""Kinds that are only kept: controllers look at them, or nothing here does."""


class Installation:
    """A cluster of one node with one installation."""

    def __init__(self, say: Say, group_place: GroupPlace | None) -> None:
        self.pods: list[Pod] = []
        self.gateway = Gateway()
        self.outsiders: dict[str, Party] = {}
        self.addresses: dict[str, str] = {}  # of outsiders
        self._say, self._group_place = say, group_place
        self._network, self._issuer = Network(), CertificateIssuer()
        self._accounts = Accounts(NODE)
        self._api = serving(
            lambda: self.store,
            host=NODE,
            port=API_PORT,
            tls=self._accounts.server_tls,
            may=lambda request: self._accounts.may(self.objects, request),
        )
        self._objects: dict[tuple[str, str], Object] = {}
        self._secrets: dict[str, Mapping[str, bytes]] = {}
        self._config_maps: dict[str, Mapping[str, bytes]] = {}
        self._claims: dict[str, Path] = {}
        self._release: set[tuple[str, str]] = set()  # what the chart has, and nobody else has made
        self._completed: set[str] = set()  # Jobs
        self._service_addresses: dict[str, str] = {}
        self._hosts: list[str] = []  # lines
        self._ray_services: dict[str, RayServiceController] = {}
        self._beside: list[asyncio.Task[None]] = []  # tasks of controllers that take their time
        self._waiting: list[Pod] = []  # for their rules
        self._changed = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._controllers: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        prepare()
        (FILES / "hosts").write_text("127.0.0.1 localhost\n")
        (FILES / "logs").mkdir(exist_ok=True)
        await self._network.open()
        for name, party in OUTSIDERS.items():
            await self.add_outsider(name, party)
        await self._api.__aenter__()
        await self._tasks.__aenter__()
        self._controllers = self._tasks.create_task(self._control())
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._controllers is not None:
            self._controllers.cancel()
        for task in self._beside:
            task.cancel()
        for pod in self.pods:
            pod.abandon()
        await self.gateway.stop()
        await self._tasks.__aexit__(*error)
        await self._api.__aexit__(*error)

    @property
    def secrets(self) -> Mapping[str, Mapping[str, bytes]]:
        return self._secrets

    @property
    def store(self) -> Store:
        """The objects that the API server shows."""
        return Store(self._secrets, self._config_maps, self.objects)

    @property
    def objects(self) -> list[Object]:
        return list(self._objects.values())

    def routes_without_service(self) -> list[str]:
        """Services that routes lead to and that are not there yet."""
        return sorted({name for name, _ in backends(self.objects)} - self._service_addresses.keys())

    @property
    def policies(self) -> list[Object]:
        return [each["spec"] for each in self._of("NetworkPolicy")]

    @property
    def endpoints(self) -> dict[str, Endpoints]:
        """Services that have an address, by name."""
        return {
            name: endpoints_of(service, self.pods, self._service_addresses[name])
            for service in self._of("Service")
            if (name := service["metadata"]["name"]) in self._service_addresses
        }

    async def add_outsider(self, name: str, party: Party) -> str:
        """Makes a network namespace of somebody who has no pod; returns its address."""
        self.addresses[name] = await self._network.add(name)
        self.outsiders[name] = party
        return self.addresses[name]

    def release(self, objects: Sequence[Object]) -> None:
        """Takes a revision of the chart over, as Helm does: what the earlier one had, and this one has not, goes."""
        kept = {key for key, each in self._objects.items() if "helm.sh/resource-policy" in _annotations(each)}
        new = {(each["kind"], each["metadata"]["name"]) for each in objects}
        for kind, name in self._release - new - kept:
            if kind == "RayService":
                raise ValueError(f"another hosting than that of the RayService {name} is not understood here")
            del self._objects[kind, name]
            if kind == "Secret":
                del self._secrets[name]
            elif kind == "ConfigMap":
                del self._config_maps[name]
            elif kind == "Service":
                self._service_addresses.pop(name, None)
            if kind in ("Deployment", "Job"):
                for pod in self.of(name):
                    self._tasks.create_task(pod.end())
        self._release = new
        self.apply(objects)

    def add_claim(self, name: str) -> Path:
        """Makes a claim with an empty volume, which pods share; returns its folder."""
        folder = FILES / "claims" / name
        folder.mkdir(parents=True)
        os.chown(folder, 0, SHARED_GROUP)
        folder.chmod(0o2775)
        self._claims[name] = folder
        return folder

    def apply(self, objects: Sequence[Object]) -> None:
        """Takes objects over, one after the other; controllers act on them from the next round on.

        Raises ValueError for a kind that is not understood here.
        """
        for each in objects:
            kind, name = each["kind"], each["metadata"]["name"]
            if kind == "Secret":
                if "stringData" in each:
                    self._secrets[name] = {key: value.encode() for key, value in each["stringData"].items()}
                else:
                    self._secrets.setdefault(name, {})  # what others have written into it stays
            elif kind == "ConfigMap":
                self._config_maps[name] = {key: value.encode() for key, value in each["data"].items()}
            elif kind == "PersistentVolumeClaim":
                if name not in self._claims:
                    self.add_claim(name)
            elif kind not in PASSIVE:
                raise ValueError(f"objects of kind {kind} are not understood here")
            if kind == "Service" and each["spec"].get("clusterIP") != "None" and name not in self._service_addresses:
                self._service_addresses[name] = self._network.service_address()
            if kind == "Certificate" and (kind, name) not in self._objects:
                self._tasks.create_task(self._issue(each))
            earlier = self._objects.get((kind, name), each)
            if kind == "Job" and earlier["spec"]["template"] != each["spec"]["template"]:
                raise ValueError(f"the template of the Job {name} is another one, and Kubernetes refuses such a change")
            self._objects[kind, name] = each
        self._write_hosts()
        self._changed.set()

    def put_secret(self, name: str, files: dict[str, bytes]) -> None:
        """Makes a secret."""
        self._secrets[name] = files

    async def run_pod(self, each: Object) -> Pod:
        """Starts a pod that has no owner; returns it."""
        return await self.create("", each["metadata"]["name"], {**each, "metadata": {**each["metadata"]}}, "")

    def of(self, owner: str) -> list[Pod]:
        """Pods of a deployment, or of a group of a Ray cluster, that are not ending."""
        return [pod for pod in self.pods if pod.owner == owner and not pod.is_ending]

    @property
    def owners(self) -> list[str]:
        """Deployments, and groups of Ray clusters: workers first."""
        clusters = [cluster for service in self._ray_services.values() for cluster in service.clusters]
        groups = [owner for cluster in clusters for owner in reversed(cluster.groups)]
        return [*groups, *(each["metadata"]["name"] for each in self._of("Deployment"))]

    def what_is_missing(self) -> str:
        """Deployments and RayServices that are not rolled out, in words; empty when all are and no pod is ending."""
        missing = []
        for deployment in self._of("Deployment"):
            strategy, name = strategy_of(deployment), deployment["metadata"]["name"]
            current = [pod for pod in self.of(name) if pod.revision == _revision(deployment)]
            num_ready = sum(pod.is_available(strategy.min_ready_s) for pod in current)
            if not num_ready == len(self.of(name)) == strategy.num_wanted:
                missing.append(f"{name}: {num_ready} of {strategy.num_wanted} available, {len(self.of(name))} in all")
        for name in [each["metadata"]["name"] for each in self._of("RayService")]:
            missing += self._ray_services[name].missing() if name in self._ray_services else [f"{name}: not looked at"]
        missing += [
            f"Job {each['metadata']['name']} is not complete"
            for each in self._of("Job")
            if each["metadata"]["name"] not in self._completed
        ]
        missing += [f"{pod} is ending" for pod in self.pods if pod.is_ending]
        return "; ".join(missing)

    async def delete_all(self) -> None:
        """Deletes everything as an uninstallation does; returns when no pod is left."""
        for task in self._beside:
            task.cancel()
        for key in [key for key in self._objects if key[0] in ("Deployment", "Job", "RayService")]:
            del self._objects[key]
        await asyncio.gather(*(pod.end() for pod in list(self.pods)))
        while self.pods:  # noqa: ASYNC110 - controllers look at it as often
            await asyncio.sleep(LOOK_S)

    def _of(self, kind: str) -> list[Object]:
        return [each for (found, _), each in self._objects.items() if found == kind]

    async def _issue(self, certificate: Object) -> None:
        while True:
            await asyncio.sleep(ISSUES_S)
            issuers = {each["metadata"]["name"]: each for each in self._of("Issuer")}
            if (files := self._issuer.issue(certificate, issuers)) is not None:
                self._secrets[certificate["spec"]["secretName"]] = files
                return

    async def _control(self) -> None:
        while True:
            self._changed.clear()
            for deployment in self._of("Deployment"):
                await self._step(deployment)
            for service in self._of("RayService"):
                await self._step_ray(service)
            for name, job in ((each["metadata"]["name"], each) for each in self._of("Job")):
                if name not in self._completed and not self.of(name):
                    suffix = "".join(random.choices(string.ascii_lowercase, k=5))
                    await self.create(name, f"{name}-{suffix}", job["spec"]["template"], "")
            self._write_hosts()
            await self._load_rules()
            for pod in self._waiting:
                self._tasks.create_task(self._live(pod))
            self._waiting.clear()
            if self._of("Gateway"):
                found = self.endpoints
                wanted = [pair for pair in backends(self.objects) if pair[0] in found]
                self.gateway.show({(name, port): found[name].ports[port] for name, port in wanted})
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def _step(self, deployment: Object) -> None:
        """Creates and ends pods of a deployment as its strategy wants."""
        name, strategy, revision = deployment["metadata"]["name"], strategy_of(deployment), _revision(deployment)
        new = [pod for pod in self.of(name) if pod.revision == revision]
        old = [pod for pod in self.of(name) if pod.revision != revision]

        def counts(pods: Sequence[Pod]) -> Counts:
            return Counts(len(pods), sum(pod.is_available(strategy.min_ready_s) for pod in pods))

        num_ending = sum(pod.owner == name and pod.is_ending for pod in self.pods)
        step = next_step(strategy, counts(new), counts(old), num_ending)
        for pods, number in ((old, step.num_old_to_end), (new, step.num_new_to_end)):
            for pod in sorted(pods, key=lambda pod: pod.is_available(strategy.min_ready_s))[:number]:
                self._say(f"{pod}: ending")
                self._tasks.create_task(pod.end())
        for _ in range(step.num_new):
            suffix = "".join(random.choices(string.ascii_lowercase, k=5))
            await self.create(name, f"{name}-{revision}-{suffix}", deployment["spec"]["template"], revision)

    async def _step_ray(self, service: Object) -> None:
        name = service["metadata"]["name"]
        if name not in self._ray_services:
            self._ray_services[name] = RayServiceController(self, service, self._say)
            self._beside.append(self._tasks.create_task(self._ray_services[name].serve()))
        await self._ray_services[name].step(service)

    async def create(self, owner: str, name: str, template: Object, revision: str) -> Pod:
        """Makes a pod, which starts when its rules are loaded."""
        spec = template["spec"]
        self._check_admission(spec)
        links = {
            each["metadata"]["name"]: (
                self._service_addresses[each["metadata"]["name"]],
                {port["name"]: port["port"] for port in each["spec"]["ports"]},
            )
            for each in self._of("Service")
            if each["metadata"]["name"] in self._service_addresses
        }
        links["kubernetes"] = (NODE, {"https": API_PORT})
        account = self._accounts.files(spec["serviceAccountName"]) if spec.get("automountServiceAccountToken") else {}
        address = await self._network.add(name)
        identity = Identity(name, address, template["metadata"]["labels"], service_links(links), account)
        pod = Pod(identity, spec, owner, revision, self._say, self._changed.set, self._group_place)
        self.pods.append(pod)
        self._waiting.append(pod)
        self._changed.set()
        return pod

    def _check_admission(self, spec: Object) -> None:
        """Raises ValueError for an account or a class of priority that is not there."""
        for kind, field in (("ServiceAccount", "serviceAccountName"), ("PriorityClass", "priorityClassName")):
            if field in spec and (kind, spec[field]) not in self._objects:
                raise ValueError(f"the {kind} {spec[field]} is not there")

    async def _live(self, pod: Pod) -> None:
        await pod.run(lambda: Contents(self._secrets, self._config_maps, self._claims))
        if ("Job", pod.owner) in self._objects and pod.statuses == [0]:
            self._completed.add(pod.owner)
        await self._network.remove(pod.identity.name)
        remove_files(pod.identity.name)
        self.pods.remove(pod)
        self._changed.set()

    async def _load_rules(self) -> None:
        """Loads the rules of every pod and outsider, as they are for the pods that there are now."""
        parties = {name: (party, self.addresses[name]) for name, party in self.outsiders.items()}
        parties |= {pod.identity.name: (Party(pod.identity.labels), pod.identity.address) for pod in self.pods}
        peers = [Peer(*each) for each in parties.values()]
        services = [Service(each.address, each.ports) for each in self.endpoints.values()]
        for name, (party, _) in parties.items():
            await self._network.load(name, firewall.rules(party, self.policies, peers, services, NODE))

    def _write_hosts(self) -> None:
        """Names of services, in the file that all pods have as /etc/hosts."""
        lines = hosts_lines(self._of("Service"), self.pods, self._service_addresses)
        if lines != self._hosts:
            with (FILES / "hosts").open("r+") as file:  # in place: pods have this very file
                file.write("\n".join([*lines, ""]))
                file.truncate()
            self._hosts = lines


def _annotations(each: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = each["metadata"].get("annotations", {})
    return found


def _revision(deployment: Object) -> str:
    text = json.dumps(deployment["spec"]["template"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def tails(num_lines: int, folder: Path = FILES / "logs") -> str:
    """The ends of all logs."""
    parts = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-num_lines:]
        parts += [f"--- {path.stem}", *(line[:300] for line in lines)]
    return "\n".join(parts)
