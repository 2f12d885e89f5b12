"""Which pods may connect to which, by the rendered network policies. Pure: rendered objects in, sentences out.

A connection needs two permissions, to leave one pod and to enter the other. Only what our own policies are made of is
understood; anything else raises KeyError or ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.k8s.pods import Object, matches, pods

OURS: Final = {"kubernetes.io/metadata.name": "outrider"}


@dataclass(frozen=True, slots=True)
class Party:
    """One end of a connection: a pod of ours, or somebody in another namespace."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: Mapping[str, str] = field(default_factory=lambda: OURS)

    @property
    def is_ours(self) -> bool:
        return self.namespace == OURS


def labelled(name: str) -> Party:
    return Party(namespace={"kubernetes.io/metadata.name": "elsewhere", name: "true"})


OTHERS: Final = {
    "gateway": labelled("outrider.dev/may-ask"),
    "prometheus": labelled("outrider.dev/may-watch"),
    "operator": labelled("outrider.dev/may-operate"),
    "stranger": labelled("outrider.dev/nothing"),
    "neighbour": Party({"app": "another"}),  # in the same namespace
    "engine": Party({"outrider.dev/takes-hints": "true"}),  # of others, for draft pools alone
    "proxy": Party({"gateway.networking.k8s.io/gateway-name": "outrider"}),  # of the gateway, beside it
    "dns": Party({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"}),
}
# From, to, port. Pods are named by their component; one that an installation lacks is passed over.
NEEDED: Final = (
    ("proxy", "stranger", 443),  # policies are for our own pods
    ("stranger", "proxy", 443),
    ("neighbour", "stranger", 443),
    ("test", "coordinator", 8000),
    ("test", "dns", 53),
    ("fetch", "dns", 53),
    ("fetch", "stranger", 443),
    ("certificates", "stranger", 443),  # the API server, which is no pod
    ("certificates", "stranger", 6443),
    ("gateway", "coordinator", 8000),
    ("gateway", "coordinator", 9000),
    ("proxy", "coordinator", 8000),
    ("proxy", "coordinator", 9000),
    ("prometheus", "coordinator", 9100),
    ("prometheus", "target", 9100),
    ("prometheus", "draft", 9100),
    ("operator", "ray-head", 8265),
    ("coordinator", "ray-head", 6379),
    ("ray-head", "coordinator", 52365),
    ("ray-head", "ray-redis", 6379),
    ("coordinator", "redis", 6379),
    ("target", "redis", 6379),
    ("draft", "redis", 6379),
    ("coordinator", "target", 50051),
    ("coordinator", "draft", 50051),
    ("draft", "target", 50051),
    ("target-follower", "target", 29500),
    ("target", "target-follower", 41234),  # NCCL chooses
    ("coordinator", "dns", 53),
    ("ray-head", "dns", 53),
    ("target", "dns", 53),
    ("target-follower", "dns", 53),
    ("draft", "dns", 53),
    ("prometheus", "memory", 9100),
    ("memory", "redis", 6379),
    ("coordinator", "memory", 50051),
    ("memory", "target", 50051),
    ("memory", "dns", 53),
)
NEEDED_BY_ENGINES: Final = (
    ("engine", "draft", 50051),
    ("draft", "engine", 7100),
    ("draft", "engine", 7107),  # of the eighth of a data-parallel group
)
NEEDED_ON_RAY: Final = (("coordinator", "coordinator", 30000),)  # HAProxy of one pod, a replica in another
FORBIDDEN: Final = (
    ("neighbour", "coordinator", 8000),
    ("neighbour", "target", 50051),
    ("proxy", "target", 50051),
    ("fetch", "redis", 6379),
    ("certificates", "redis", 6379),
    ("certificates", "target", 50051),
    ("certificates", "stranger", 80),
    ("test", "target", 50051),
    ("stranger", "coordinator", 8000),
    ("stranger", "target", 50051),
    ("stranger", "ray-head", 8265),
    ("stranger", "redis", 6379),
    ("gateway", "coordinator", 8404),  # HAProxy's statistics
    ("gateway", "coordinator", 9100),
    ("gateway", "coordinator", 9190),
    ("gateway", "ray-head", 8265),
    ("gateway", "target", 50051),
    ("prometheus", "coordinator", 8000),
    ("prometheus", "redis", 6379),
    ("operator", "coordinator", 8000),
    ("operator", "ray-redis", 6379),
    ("target", "ray-head", 6379),
    ("target", "draft", 50051),
    ("target", "coordinator", 8000),
    ("draft", "ray-head", 6379),
    ("draft", "coordinator", 8000),
    ("draft", "draft", 50051),
    ("draft", "ray-redis", 6379),
    ("draft", "target-follower", 29500),
    ("coordinator", "ray-redis", 6379),
    ("redis", "target", 50051),
    ("redis", "stranger", 443),
    ("draft", "stranger", 443),
    ("target", "stranger", 443),
    ("coordinator", "stranger", 443),
    ("memory", "coordinator", 8000),
    ("memory", "draft", 50051),
    ("memory", "stranger", 443),
    ("draft", "memory", 50051),
    ("target", "memory", 50051),
    ("neighbour", "memory", 50051),
    ("stranger", "memory", 50051),
    ("neighbour", "draft", 50051),
    ("stranger", "draft", 50051),
    ("prometheus", "draft", 50051),
    ("engine", "draft", 9100),
    ("draft", "engine", 8000),  # requests of clients
    ("draft", "neighbour", 7100),
)
FORBIDDEN_TO_ENGINES: Final = (("engine", "draft", 50051), ("draft", "engine", 7100))
"""Hops of engines that others run, forbidden where coordinators attach requests."""


def hops_that_are_shut(objects: Sequence[Object]) -> Iterator[str]:
    names = {pod.name for pod in pods(objects)}
    more = (NEEDED_ON_RAY if "ray-head" in names else ()) + (() if "coordinator" in names else NEEDED_BY_ENGINES)
    for source, destination, port, is_permitted in _asked(objects, NEEDED + more):
        if not is_permitted:
            yield f"{source} cannot reach port {port} of {destination}"


def pods_that_are_not_looked_at(objects: Sequence[Object]) -> Iterator[str]:
    """Sentences about pods that are not in the table `NEEDED`, whose connections would not be checked."""
    if any(each["kind"] == "NetworkPolicy" for each in objects):
        known = {end for source, destination, _ in NEEDED for end in (source, destination)}
        for name in sorted({pod.name for pod in pods(objects)} - known):
            yield f"nobody says whom {name} has to reach"


def hops_that_stand_open(objects: Sequence[Object]) -> Iterator[str]:
    has_coordinators = any(pod.name == "coordinator" for pod in pods(objects))
    more = FORBIDDEN_TO_ENGINES if has_coordinators else ()
    for source, destination, port, is_permitted in _asked(objects, FORBIDDEN + more):
        if is_permitted:
            yield f"{source} reaches port {port} of {destination}"


def _asked(objects: Sequence[Object], hops: Sequence[tuple[str, str, int]]) -> Iterator[tuple[str, str, int, bool]]:
    """Hops between parties that exist, and whether the policies permit each; nothing where there are no policies."""
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    has_gateway = any(each["kind"] == "Gateway" for each in objects)
    parties = {name: party for name, party in OTHERS.items() if has_gateway or name != "proxy"}
    parties |= {pod.name: Party(pod.labels) for pod in pods(objects)}
    for source, destination, port in hops:
        if policies and {source, destination} <= parties.keys():
            ends = parties[source], parties[destination]
            yield source, destination, port, can_reach(policies, *ends, port)


def can_reach(policies: Sequence[Object], source: Party, destination: Party, port: int) -> bool:
    return _permits(policies, "Egress", source, destination, port) and _permits(
        policies, "Ingress", destination, source, port
    )


def _permits(policies: Sequence[Object], direction: str, ours: Party, other: Party, port: int) -> bool:
    """Whether one end lets it happen: a pod that no policy chooses for this direction lets everything."""
    if not ours.is_ours:
        return True
    chosen = [
        policy
        for policy in policies
        if direction in policy["policyTypes"] and matches(policy["podSelector"], ours.labels)
    ]
    peers = "to" if direction == "Egress" else "from"
    rules = [rule for policy in chosen for rule in policy.get(direction.lower(), ())]
    return not chosen or any(
        (peers not in rule or any(is_peer(peer, other) for peer in rule[peers]))
        and (
            "ports" not in rule
            or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        )
        for rule in rules
    )


def is_peer(peer: Object, other: Party) -> bool:
    match sorted(peer):
        case ["ipBlock"]:
            return False  # of an address outside the cluster's pods
        case ["podSelector"]:
            return other.is_ours and matches(peer["podSelector"], other.labels)
        case ["namespaceSelector"]:
            return matches(peer["namespaceSelector"], other.namespace)
        case ["namespaceSelector", "podSelector"]:
            return matches(peer["namespaceSelector"], other.namespace) and matches(peer["podSelector"], other.labels)
        case kinds:
            raise ValueError(f"a peer of {kinds}")
