"""Rules of nftables for one pod: its network policies, and the services that it reaches by their addresses. Pure.

Every pod enforces its own ends of connections, as network plugins do. The node reaches every pod, as kubelets must.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.k8s.pods import Object, matches
from tests.k8s.policy_rules import Party, is_peer


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody with an address."""

    party: Party
    address: str


@dataclass(frozen=True, slots=True)
class Service:
    """A virtual address, and the ready pods behind each of its ports."""

    address: str
    ports: Mapping[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Maps the service's port to that of the pods, and their addresses."""


def rules(own: Party, policies: Sequence[Object], peers: Sequence[Peer], services: Sequence[Service], node: str) -> str:
    """The whole file for `nft -f -`, which replaces the earlier rules at once."""
    lines = ["table inet pod {}", "delete table inet pod", "table inet pod {"]
    lines += _services(services)
    for direction, ends, chain in (("Ingress", "from", "input"), ("Egress", "to", "output")):
        lines += [f"chain {chain} {{", f"type filter hook {chain} priority 0; policy accept"]
        chosen = [each for each in policies if own.is_ours and _chooses(each, direction, own)]
        if chain == "output":
            # Nobody is behind what was not translated. kube-proxy answers so, before any policy.
            lines += [f"ip daddr {each.address} meta l4proto tcp reject with tcp reset" for each in services]
        if chosen:
            lines += ["ct state established,related accept", f'{chain[0]}if "lo" accept']
            if chain == "input":
                lines.append(f"ip saddr {node} accept")
            for policy in chosen:
                for rule in policy.get(direction.lower(), ()):
                    lines += _permits(rule, ends, peers)
            lines.append("drop")
        lines.append("}")
    return "\n".join([*lines, "}", ""])


def _chooses(policy: Object, direction: str, own: Party) -> bool:
    return direction in policy["policyTypes"] and matches(policy["podSelector"], own.labels)


def _permits(rule: Object, ends: str, peers: Sequence[Peer]) -> Iterator[str]:
    """Raises ValueError for a peer or a port that is not understood here."""
    address = ""
    if ends in rule:
        found = sorted({each for peer in rule[ends] for each in _addresses(peer, peers)})
        if not found:
            return
        address = f"ip {'saddr' if ends == 'from' else 'daddr'} {{ {', '.join(found)} }} "
    if "ports" not in rule:
        yield f"{address}accept"
    for port in rule.get("ports", ()):
        if port.keys() != {"protocol", "port"} or not isinstance(port["port"], int):
            raise ValueError(f"the port {port} is not understood here")
        yield f"{address}{port['protocol'].lower()} dport {port['port']} accept"


def _addresses(peer: Object, peers: Sequence[Peer]) -> Iterator[str]:
    if "ipBlock" in peer:
        if peer["ipBlock"].keys() != {"cidr"}:
            raise ValueError(f"the peer {peer} is not understood here")
        yield peer["ipBlock"]["cidr"]
    else:
        yield from (each.address for each in peers if is_peer(peer, each.party))


def _services(services: Sequence[Service]) -> Iterator[str]:
    yield from ("chain services {", "type nat hook output priority -100")
    for service in services:
        for port, (target, addresses) in service.ports.items():
            if addresses:
                choices = ", ".join(f"{number} : {address} . {target}" for number, address in enumerate(addresses))
                chosen = f"numgen random mod {len(addresses)} map {{ {choices} }}"
                yield f"ip daddr {service.address} tcp dport {port} dnat ip to {chosen}"
    yield "}"
