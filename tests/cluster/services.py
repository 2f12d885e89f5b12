"""Services: the ready pods behind them, and their names. Reads the state of pods, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.cluster.pod import Pod
from tests.cluster.pod_plan import NAMESPACE
from tests.k8s.pods import Object, matches


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A service's own address, and for each of its ports the pods' port and the addresses of ready pods."""

    address: str
    ports: Mapping[int, tuple[int, tuple[str, ...]]]


def endpoints_of(service: Object, pods: Sequence[Pod], address: str) -> Endpoints:
    chosen = _chosen(service, pods)
    ready = tuple(pod.identity.address for pod in chosen if pod.is_ready)
    return Endpoints(
        address,
        {
            each["port"]: (_number(each.get("targetPort", each["port"]), chosen), ready)
            for each in service["spec"]["ports"]
        },
    )


def hosts_lines(services: Sequence[Object], pods: Sequence[Pod], addresses: Mapping[str, str]) -> list[str]:
    """The hosts file of all pods. Services without an address of their own may have that of pods that are not ready."""
    lines = ["127.0.0.1 localhost"]
    for service in services:
        name = service["metadata"]["name"]
        if name in addresses:
            found = [addresses[name]]
        elif service["spec"].get("publishNotReadyAddresses"):
            found = [pod.identity.address for pod in _chosen(service, pods)]
        else:
            continue
        names = f"{name} {name}.{NAMESPACE} {name}.{NAMESPACE}.svc.cluster.local"
        lines += [f"{address} {names}" for address in found]
    return lines


def _chosen(service: Object, pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if matches({"matchLabels": service["spec"]["selector"]}, pod.identity.labels)]


def _number(port: int | str, pods: Sequence[Pod]) -> int:
    """The number of a port that pods name; 0 if there is no pod."""
    if isinstance(port, int):
        return port
    for pod in pods:
        for container in pod.spec["containers"]:
            for each in container.get("ports", ()):
                if each["name"] == port:
                    return int(each["containerPort"])
    return 0
