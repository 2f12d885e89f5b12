"""Tests of worker metrics: the estimated speed-up is exported once it is known, without a label look-up each time."""

from __future__ import annotations

import pytest
from prometheus_client import Gauge

from outrider.observability.telemetry import TargetMetrics


def shown(metrics: TargetMetrics) -> float | None:
    labels = {"model_name": "model", "engine": "target-0"}
    return metrics.registry.get_sample_value("outrider_estimated_speedup", labels)


def test_a_speedup_is_shown_once_it_is_known_and_its_gauge_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = TargetMetrics("model", "target-0")
    metrics.show_speedup(None)
    assert shown(metrics) is None
    metrics.show_speedup(1.5)
    assert shown(metrics) == 1.5
    monkeypatch.setattr(Gauge, "labels", None)
    metrics.show_speedup(1.75)
    metrics.show_speedup(None)
    assert shown(metrics) == 1.75
