"""Rules for a pod, from policies. The chart's own policies are tried in the kernel (`test_cluster.py`)."""

from __future__ import annotations

from typing import Any

import pytest

from k8s.helm.chart import render
from tests.cluster.firewall import Peer, Service, rules
from tests.k8s.policy_rules import OTHERS, Party

NODE = "10.244.0.1"
TARGET = Party({"part": "target"})
COORDINATOR = Peer(Party({"part": "coordinator"}), "10.244.0.2")
STRANGER = Peer(OTHERS["stranger"], "10.244.0.3")


def policy(**rest: Any) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {"part": "target"}}, **rest}


def lines(own: Party, *policies: dict[str, Any], services: tuple[Service, ...] = ()) -> list[str]:
    return rules(own, policies, [COORDINATOR, STRANGER], services, NODE).splitlines()


def test_a_pod_that_no_policy_chooses_takes_and_sends_everything() -> None:
    assert "drop" not in lines(Party({"part": "other"}), policy(policyTypes=["Ingress", "Egress"]))
    assert "drop" not in lines(STRANGER.party, policy(policyTypes=["Ingress", "Egress"]))


def test_what_is_not_listed_is_dropped_but_the_node_and_answers() -> None:
    found = lines(TARGET, policy(policyTypes=["Ingress"]))
    assert found.count("drop") == 1
    assert found.index(f"ip saddr {NODE} accept") < found.index("drop")
    assert found.index("ct state established,related accept") < found.index("drop")


def test_a_listed_peer_gets_in_at_the_listed_port() -> None:
    peers = [{"podSelector": {"matchLabels": {"part": "coordinator"}}}]
    rule = {"from": peers, "ports": [{"protocol": "TCP", "port": 50051}]}
    found = lines(TARGET, policy(policyTypes=["Ingress"], ingress=[rule]))
    assert f"ip saddr {{ {COORDINATOR.address} }} tcp dport 50051 accept" in found
    assert not any(STRANGER.address in line for line in found)


def test_a_rule_whose_peers_are_not_there_permits_nothing() -> None:
    rule = {"to": [{"podSelector": {"matchLabels": {"part": "gone"}}}]}
    found = lines(TARGET, policy(policyTypes=["Egress"], egress=[rule]))
    assert found[found.index("drop") - 1] == 'oif "lo" accept'


def test_blocks_of_addresses_and_rules_without_peers() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "169.254.20.10/32"}}], "ports": [{"protocol": "UDP", "port": 53}]}
    found = lines(TARGET, policy(policyTypes=["Egress"], egress=[rule, {"ports": [{"protocol": "TCP", "port": 443}]}]))
    assert "ip daddr { 169.254.20.10/32 } udp dport 53 accept" in found
    assert "tcp dport 443 accept" in found


@pytest.mark.parametrize(
    "rule",
    [
        {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]},
        {"ports": [{"protocol": "TCP", "port": "grpc"}]},
        {"ports": [{"protocol": "TCP", "port": 1, "endPort": 2}]},
        {"from": [{"nodeSelector": {}}]},
    ],
)
def test_what_is_not_understood_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"peer|port"):
        lines(TARGET, policy(policyTypes=["Ingress"], ingress=[rule]))


def test_a_service_leads_to_its_ready_pods_and_refuses_without_one() -> None:
    ready = Service("10.96.0.2", {6379: (6380, ("10.244.0.5", "10.244.0.6"))})
    empty = Service("10.96.0.3", {8000: (8000, ())})
    found = lines(TARGET, services=(ready, empty))
    choices = "0 : 10.244.0.5 . 6380, 1 : 10.244.0.6 . 6380"
    assert f"ip daddr 10.96.0.2 tcp dport 6379 dnat ip to numgen random mod 2 map {{ {choices} }}" in found
    assert not any("10.96.0.3" in line and "dnat" in line for line in found)
    assert "ip daddr 10.96.0.3 meta l4proto tcp reject with tcp reset" in found


def test_all_policies_of_the_chart_are_understood() -> None:
    values = {"networkPolicy": {"enabled": True}, "gateway": {"enabled": True, "className": "any"}}
    policies = [each["spec"] for each in render(values) if each["kind"] == "NetworkPolicy"]
    ours = {"app.kubernetes.io/instance": "outrider", "app.kubernetes.io/component": "coordinator"}
    target = Peer(Party(ours | {"app.kubernetes.io/component": "target"}), "10.244.0.7")
    text = rules(Party(ours), policies, [target, Peer(OTHERS["proxy"], "10.244.0.8"), STRANGER], [], NODE)
    assert "ip saddr { 10.244.0.8 } tcp dport 8000 accept" in text
    assert "ip daddr { 10.244.0.7 } tcp dport 50051 accept" in text
    assert STRANGER.address not in text
