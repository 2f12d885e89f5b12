"""Model of Kubernetes' horizontal autoscaler and of KEDA. Pure.

Sources: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/ ("Algorithm details" and
"Configurable scaling behavior", 1.33) and https://keda.sh/docs/2.17/concepts/scaling-deployments/: KEDA takes a
deployment from 0 to 1 and back, the autoscaler does the rest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

TOLERANCE: Final = 0.1  # deviation of a metric from its target that causes no action
SYNC_S: Final = 15.0  # between two decisions


@dataclass(frozen=True, slots=True)
class Policy:
    """Limit on the speed of scaling."""

    kind: str  # Pods or Percent
    value: int
    period_s: float

    def most(self, before: int) -> int:
        """Replicas that may be added or removed within the period, given their number at its beginning."""
        return self.value if self.kind == "Pods" else math.ceil(before * self.value / 100)


@dataclass(frozen=True, slots=True)
class Rules:
    """One direction of `behavior`."""

    window_s: float
    policies: tuple[Policy, ...]

    @classmethod
    def parse(cls, rules: Mapping[str, Any]) -> Self:
        """Parses a manifest's rules. Raises ValueError for anything the model does not support."""
        if rules.get("selectPolicy", "Max") != "Max":
            raise ValueError(f"selectPolicy {rules['selectPolicy']} is not modelled")
        policies = tuple(Policy(each["type"], each["value"], each["periodSeconds"]) for each in rules["policies"])
        return cls(rules["stabilizationWindowSeconds"], policies)


@dataclass(frozen=True, slots=True)
class Trigger:
    """One metric of a ScaledObject, of the kind AverageValue."""

    query: str
    threshold: float  # per replica
    activation: float  # activation threshold

    def wanted(self, current: int, total: float) -> int:
        """Replicas for a metric that sums to `total`."""
        if current and abs(total / (self.threshold * current) - 1) <= TOLERANCE:
            return current
        return math.ceil(total / self.threshold)


@dataclass(slots=True)
class Autoscaler:
    """Autoscaler of one ScaledObject. `decide` is called every SYNC_S."""

    name: str
    min_replicas: int
    max_replicas: int
    cooldown_s: float
    up: Rules
    down: Rules
    triggers: tuple[Trigger, ...]
    _recommended: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)  # time, and number of replicas
    _active_at_s: float = -math.inf

    @classmethod
    def parse(cls, manifest: Mapping[str, Any]) -> Self:
        """Parses a ScaledObject. Raises ValueError or KeyError for anything the model does not support."""
        spec = manifest["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        triggers = []
        for trigger in spec["triggers"]:
            if trigger["type"] != "prometheus" or trigger.get("metricType", "AverageValue") != "AverageValue":
                raise ValueError(f"trigger {trigger['name']} is not modelled")
            known = trigger["metadata"]
            activation = float(known.get("activationThreshold", 0))
            triggers.append(Trigger(known["query"], float(known["threshold"]), activation))
        return cls(
            manifest["metadata"]["name"],
            spec["minReplicaCount"],
            spec["maxReplicaCount"],
            spec["cooldownPeriod"],
            Rules.parse(behavior["scaleUp"]),
            Rules.parse(behavior["scaleDown"]),
            tuple(triggers),
        )

    def decide(self, now_s: float, current: int, totals: Sequence[float]) -> int:
        """Number of replicas from now on, given `current` and the sums of the triggers' metrics, `totals`."""
        if any(total > trigger.activation for trigger, total in zip(self.triggers, totals, strict=True)):
            self._active_at_s = now_s
        if self.min_replicas == 0:
            # KEDA does this itself; the autoscaler does not count it among its changes.
            if current == 0:
                return 1 if self._active_at_s == now_s else 0
            if now_s - self._active_at_s >= self.cooldown_s:
                return 0
        wanted = max(trigger.wanted(current, total) for trigger, total in zip(self.triggers, totals, strict=True))
        wanted = min(max(wanted, self.min_replicas, 1), self.max_replicas)
        return self._change(now_s, current, self._within_rates(now_s, current, self._calmed(now_s, current, wanted)))

    def _calmed(self, now_s: float, current: int, wanted: int) -> int:
        """Stabilized number: at most the smallest of the window up, at least the largest of the window down."""
        self._recommended.append((now_s, wanted))
        while now_s - self._recommended[0][0] > max(self.up.window_s, self.down.window_s):
            self._recommended.popleft()
        most = min(each for at_s, each in self._recommended if now_s - at_s <= self.up.window_s)
        least = max(each for at_s, each in self._recommended if now_s - at_s <= self.down.window_s)
        return min(max(current, most), least)

    def _within_rates(self, now_s: float, current: int, wanted: int) -> int:
        if wanted > current:
            bounds = []
            for policy in self.up.policies:
                before = current - self._changed(now_s, policy.period_s)
                bounds.append(before + policy.most(before))
            return max(min(wanted, max(bounds)), current)
        if wanted < current:
            bounds = []
            for policy in self.down.policies:
                before = current - self._changed(now_s, policy.period_s)
                bounds.append(before - policy.most(before))
            return min(max(wanted, min(bounds)), current)
        return current

    def _changed(self, now_s: float, period_s: float) -> int:
        return sum(by for at_s, by in self._changes if now_s - at_s < period_s)

    def _change(self, now_s: float, current: int, replicas: int) -> int:
        if replicas != current:
            self._changes.append((now_s, replicas - current))
        longest_s = max(policy.period_s for policy in (*self.up.policies, *self.down.policies))
        while self._changes and now_s - self._changes[0][0] >= longest_s:
            self._changes.popleft()
        return replicas
