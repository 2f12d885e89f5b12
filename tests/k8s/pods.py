"""The pods in rendered manifests with their owners, and which of them a selector chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Object = Mapping[str, Any]

WORKLOADS: Final = ("Deployment", "StatefulSet", "Job", "CronJob")
NAME: Final = "app.kubernetes.io/component"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, and whose it is."""

    owner: str  # such as Deployment/target
    labels: Mapping[str, str]
    spec: Object
    claims: frozenset[str] = frozenset()  # volumes that are made for it

    @property
    def name(self) -> str:
        return self.labels.get(NAME, "")

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def pods(objects: Sequence[Object]) -> Iterator[Pod]:
    """Every pod, and every pod template of core workloads, of RayServices and of LeaderWorkerSets."""
    for each in objects:
        name = f"{each['kind']}/{each['metadata']['name']}"
        templates = []
        claims = frozenset[str]()
        if each["kind"] in WORKLOADS:
            spec = each["spec"]["jobTemplate"]["spec"] if each["kind"] == "CronJob" else each["spec"]
            templates = [(name, spec["template"])]
            claims = frozenset(claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ()))
        elif each["kind"] == "Pod":
            templates = [(name, each)]
        elif each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            templates = [(f"{name} head", cluster["headGroupSpec"]["template"])]
            templates += [(f"{name} {group['groupName']}", group["template"]) for group in cluster["workerGroupSpecs"]]
        elif each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            templates = [
                (f"{name} {kind}", group[kind]) for kind in ("leaderTemplate", "workerTemplate") if kind in group
            ]
        for owner, template in templates:
            yield Pod(owner, template.get("metadata", {}).get("labels", {}), template["spec"], claims)


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels and the operator In) chooses a pod."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ())
    )
