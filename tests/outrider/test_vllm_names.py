"""vLLM's names of metrics: those of vLLM 0.32, with its types and labels, and the values of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.observability.statistics import RequestTimes
from outrider.observability.telemetry import TargetMetrics
from outrider.observability.vllm_names import (
    COORDINATOR_ALIASES,
    TARGET_ALIASES,
    AliasingRegistry,
    MetricsNames,
)

ALIASES: Final = {"ours": ("vllm:a", "vllm:b")}
# As vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py declare them: the type, and the labels beside
# model_name and engine. time_per_output_token_seconds is of earlier versions.
OF_VLLM: Final[Mapping[str, tuple[str, frozenset[str]]]] = {
    "vllm:num_requests_running": ("gauge", frozenset()),
    "vllm:num_requests_waiting": ("gauge", frozenset()),
    "vllm:kv_cache_usage_perc": ("gauge", frozenset()),
    "vllm:num_preemptions": ("counter", frozenset()),
    "vllm:prompt_tokens": ("counter", frozenset()),
    "vllm:prompt_tokens_cached": ("counter", frozenset()),
    "vllm:prefix_cache_queries": ("counter", frozenset()),
    "vllm:prefix_cache_hits": ("counter", frozenset()),
    "vllm:generation_tokens": ("counter", frozenset()),
    "vllm:request_success": ("counter", frozenset({"finished_reason"})),
    "vllm:time_to_first_token_seconds": ("histogram", frozenset()),
    "vllm:inter_token_latency_seconds": ("histogram", frozenset()),
    "vllm:time_per_output_token_seconds": ("histogram", frozenset()),
    "vllm:e2e_request_latency_seconds": ("histogram", frozenset()),
    "vllm:request_queue_time_seconds": ("histogram", frozenset()),
    "vllm:request_prefill_time_seconds": ("histogram", frozenset()),
    "vllm:request_decode_time_seconds": ("histogram", frozenset()),
    "vllm:spec_decode_num_drafts": ("counter", frozenset()),
    "vllm:spec_decode_num_draft_tokens": ("counter", frozenset()),
    "vllm:spec_decode_num_accepted_tokens": ("counter", frozenset()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("counter", frozenset({"position"})),
}  # fmt: skip


def used_coordinator() -> CoordinatorMetrics:
    metrics = CoordinatorMetrics()
    metrics.know("m")
    metrics.observe_step("m", 4, 2)
    times = RequestTimes(0.0, first_token_s=1.0, last_chunk_s=2.0, end_s=2.0, queue_ms=1.0, prefill_ms=1.0)
    metrics.observe_end("m", "stop", 9, 5, times, num_cached_tokens=3)
    return metrics


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and further labels of everything under vLLM's names, as a scraper reads it."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if family.name.startswith("vllm:") and not family.name.endswith("_created"):
            labels = {name for sample in family.samples for name in sample.labels}
            assert {"model_name", "engine"} <= labels, family.name
            found[family.name] = (family.type, frozenset(labels - {"model_name", "engine", "le"}))
    return found


def test_names_types_and_labels_are_those_of_vllm() -> None:
    coordinator, target = exported(used_coordinator().registry), exported(TargetMetrics("m", "target-0").registry)
    assert not coordinator.keys() & target.keys(), "a sum over all processes would count twice"
    assert coordinator | target == OF_VLLM


def test_every_alias_is_that_of_a_metric() -> None:
    for aliases, registry in (
        (COORDINATOR_ALIASES, CoordinatorMetrics().registry),
        (TARGET_ALIASES, TargetMetrics("m", "target-0").registry),
    ):
        assert aliases.keys() <= {family.name for family in registry.collect()}


def test_an_alias_has_the_values_of_its_metric() -> None:
    value = used_coordinator().registry.get_sample_value
    labels = {"model_name": "m", "engine": "coordinator"}
    assert value("vllm:prefix_cache_queries_total", labels) == value("outrider_prompt_tokens_total", labels) == 9
    assert value("vllm:prefix_cache_hits_total", labels) == 3
    assert value("vllm:request_success_total", labels | {"finished_reason": "stop"}) == 1
    assert value("vllm:request_success_total", labels | {"finished_reason": "length"}) == 0
    assert value("vllm:e2e_request_latency_seconds_sum", labels) == 2.0
    assert value("vllm:e2e_request_latency_seconds_bucket", labels | {"le": "+Inf"}) == 1
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", labels | {"position": "1"}) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (MetricsNames.OUTRIDER, ["ours", "other"]),
        (MetricsNames.VLLM, ["vllm:a", "vllm:b", "other"]),
        (MetricsNames.BOTH, ["ours", "vllm:a", "vllm:b", "other"]),
    ],
)
def test_the_setting_chooses_the_names_of_those_that_have_two(names: MetricsNames, expected: list[str]) -> None:
    registry = AliasingRegistry(ALIASES, names)
    Gauge("ours", "has aliases", registry=registry).set(3)
    Gauge("other", "has none", registry=registry)
    assert [family.name for family in registry.collect()] == expected
    assert registry.get_sample_value(expected[0]) == 3


@pytest.mark.parametrize("kind", [Counter, Gauge, Histogram])
def test_an_alias_renames_every_series_of_its_metric(kind: type[Counter | Gauge | Histogram]) -> None:
    registry = AliasingRegistry(ALIASES, MetricsNames.BOTH)
    kind("ours", "text", registry=registry)
    ours, first, second = registry.collect()
    for alias in (first, second):
        assert [sample.name.removeprefix(alias.name) for sample in alias.samples] == [
            sample.name.removeprefix(ours.name) for sample in ours.samples
        ]
