"""The page of metrics: what each process registers with prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry, Metric

from coordinator.observability.metrics import CoordinatorMetrics
from docs.generate.markdown import code, literal, page, sentence, table
from outrider.observability.telemetry import DraftMetrics, MemoryMetrics, TargetMetrics, show_expiry, show_loop_lag
from outrider.observability.vllm_names import COORDINATOR_ALIASES, TARGET_ALIASES
from outrider.security.tls import TlsFiles

_FILES: Final = cast(TlsFiles, None)  # is read when a metric is scraped, which nobody does here
_ENDINGS: Final = {"counter": "_total"}


def metrics_page() -> str:
    """All metrics by process."""
    target, draft = TargetMetrics("model", "target-0"), DraftMetrics("model", "draft-0")
    memory = MemoryMetrics("memory", "memory-0")
    for each in (target, draft, memory):
        show_expiry(_FILES, each.registry)
        show_loop_lag(each.registry, "worker")
    registries = {
        "Coordinator": CoordinatorMetrics(_FILES).registry,
        "Target worker": target.registry,
        "Draft worker": draft.registry,
        "Memory worker": memory.registry,
    }
    return page(
        "Metrics",
        "Names are vLLM's with the prefix `outrider_` where vLLM has such a metric. Workers export the labels "
        "`model_name` and `engine`, the worker's id; at a coordinator `engine` is `coordinator`. A histogram has the "
        "series `_bucket`, `_sum` and `_count`. [Observability](../operations/observability.md) says where to scrape.",
        *(f"## {title}\n\n{_table(registry)}" for title, registry in registries.items()),
        "## vLLM's names\n\nWith `--metrics-names both`, the default, these metrics have vLLM's names as well, with "
        "`vllm` instead. [Observability](../operations/observability.md#tools-that-know-vllm) says how to use them, "
        "and what they do not tell.\n\n" + table(["vLLM's name", "Process", "Metric"], sorted(_aliases(registries))),
    )


def _aliases(registries: Mapping[str, CollectorRegistry]) -> Iterator[tuple[str, str, str]]:
    for title, aliases in (("Coordinator", COORDINATOR_ALIASES), ("Target worker", TARGET_ALIASES)):
        types = {metric.name: metric.type for _, metric in _families(registries[title])}
        for name, names in aliases.items():
            ending = _ENDINGS.get(types[name], "")
            yield from ((code(alias + ending), title.lower(), code(name + ending)) for alias in names)


def _table(registry: CollectorRegistry) -> str:
    return table(["Metric", "Type", "Labels", "Meaning"], sorted(_rows(registry)))


def _rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    for collector, metric in _families(registry):
        name = metric.name + _ENDINGS.get(metric.type, "")
        labels = code(*getattr(collector, "_labelnames", ()))
        yield code(name), metric.type, labels, sentence(literal(metric.documentation))


def _families(registry: CollectorRegistry) -> Iterator[tuple[Any, Metric]]:
    collectors: list[Any] = list(registry._collector_to_names)
    for collector in collectors:
        for metric in collector.describe():
            yield collector, metric
