"""Metrics that each kind of process exports, read from its real registry after everything has happened once."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.access.tokens import Reason
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.observability.statistics import RequestTimes
from coordinator.speculation.fallback import FallbackState, Trigger
from coordinator.speculation.priors import Evidence, PriorKey
from outrider import errors
from outrider.canary.plan import ArmName
from outrider.errors import OutriderError
from outrider.observability.telemetry import DraftMetrics, TargetMetrics, show_expiry
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role, TlsFiles

Labels = Mapping[str, frozenset[str]]  # by label, its values
Exports = Mapping[str, Mapping[str, Labels]]  # by job and name of a sample

_MODEL: Final = "model"


def exports(folder: Path) -> Exports:
    """The exported metrics of all processes. folder: for certificates, whose expiry is exported as well."""
    authority, files = CertificateAuthority.make(), {}
    for role in (Role.COORDINATOR, Role.TARGET, Role.DRAFT):
        authority.issue(folder / role.name, role, names=(), valid_for=datetime.timedelta(days=1))
        files[role] = TlsFiles(folder / role.name)
    return {
        "outrider-target": _read(_target(files[Role.TARGET])),
        "outrider-draft": _read(_draft(files[Role.DRAFT])),
        "outrider-coordinator": _read(_coordinator(files[Role.COORDINATOR])),
    }


def _target(files: TlsFiles) -> CollectorRegistry:
    metrics = TargetMetrics(_MODEL, "target-0")
    metrics.show_speedup(1.5)
    metrics.observe_accepted(2)
    show_expiry(files, metrics.registry)
    return metrics.registry


def _draft(files: TlsFiles) -> CollectorRegistry:
    metrics = DraftMetrics(_MODEL, "draft-0")
    show_expiry(files, metrics.registry)
    return metrics.registry


def _coordinator(files: TlsFiles) -> CollectorRegistry:
    metrics = CoordinatorMetrics(files)
    for gauge in (metrics.waiting(_MODEL), metrics.running(_MODEL)):
        gauge.set(1)
    with metrics.queued(_MODEL):
        pass
    metrics.observe_step(_MODEL, 4, 2)
    metrics.observe_gap(_MODEL, 0.1)
    times = RequestTimes(0.0, first_token_s=1.0, last_chunk_s=2.0, end_s=2.0, queue_ms=1.0, prefill_ms=1.0)
    for reason in ("stop", "length"):
        metrics.observe_end(_MODEL, reason, 3, 5, times)
    for is_met in (True, False):
        metrics.observe_objective(_MODEL, {"ttft": is_met, "tpot": is_met})
    for state in (*(each.name.lower() for each in FallbackState), "undrafted"):
        metrics.move_fallback(_MODEL, None, state)
        metrics.fallback_transitions.labels(state).inc()
        metrics.count_start(_MODEL, state)
    for trigger in Trigger:
        metrics.count_probe(_MODEL, trigger.name.lower())
    for arm in ArmName:
        metrics.canary_requests.labels(arm).inc()
    for pool in ("target", "draft"):
        metrics.live_workers.labels(pool).set(1)
    metrics.show_priors({PriorKey(_MODEL, "text/free/greedy"): Evidence(1, 1, 8, 9, 1)}, 1)
    for reason in Reason:
        metrics.token_refusals.labels(reason).inc()
    metrics.show_draft_alarms([("draft-0", _MODEL)])
    metrics.show_poison(["0123456789ab"])
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, OutriderError):
            metrics.request_failure.labels(kind.grpc_code).inc()
    return metrics.registry


def _read(registry: CollectorRegistry) -> Mapping[str, Labels]:
    """Labels of each metric that has a sample; a metric without one is left out, since a query for it finds nothing."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return {name: {label: frozenset(values) for label, values in labels.items()} for name, labels in found.items()}
