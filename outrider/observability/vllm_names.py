"""Metrics under vLLM's names, for the dashboards and load tools that know those.

An alias is a second name of one metric, made when it is read: nothing is counted twice. Only metrics that mean the same
have one. No two kinds of process export the same name, so that sums over all processes are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Metric


class MetricsNames(StrEnum):
    """Names under which metrics are exported that vLLM has, too; others have only ours."""

    OUTRIDER = "outrider"
    VLLM = "vllm"
    BOTH = "both"


# As of vLLM 0.32 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py), by the names that prometheus_client
# gives the families: without _total.
COORDINATOR_ALIASES: Final[Mapping[str, Sequence[str]]] = {
    "outrider_num_requests_running": ("vllm:num_requests_running",),
    "outrider_num_requests_waiting": ("vllm:num_requests_waiting",),
    "outrider_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "outrider_prompt_tokens_cached": ("vllm:prompt_tokens_cached", "vllm:prefix_cache_hits"),
    "outrider_generation_tokens": ("vllm:generation_tokens",),
    "outrider_request_success": ("vllm:request_success",),
    "outrider_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    # The second is the name of the first in earlier versions, which dashboards still read.
    "outrider_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "outrider_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "outrider_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "outrider_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "outrider_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "outrider_spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "outrider_spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "outrider_spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "outrider_spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}
TARGET_ALIASES: Final[Mapping[str, Sequence[str]]] = {
    "outrider_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc",),
    "outrider_num_preemptions": ("vllm:num_preemptions",),
}


class AliasingRegistry(CollectorRegistry):
    """A registry that exports its metrics under other names, too, or instead."""

    def __init__(self, aliases: Mapping[str, Sequence[str]], names: MetricsNames) -> None:
        super().__init__()
        self._aliases = {} if names is MetricsNames.OUTRIDER else aliases
        self._keeps_own = names is not MetricsNames.VLLM

    def collect(self) -> Iterable[Metric]:
        """Every metric, each alias after its own name."""
        for metric in super().collect():
            aliases = self._aliases.get(metric.name, ())
            if self._keeps_own or not aliases:
                yield metric
            for alias in aliases:
                yield renamed(metric, alias)


def renamed(metric: Metric, name: str) -> Metric:
    """The same samples under another name."""
    made = Metric(name, metric.documentation, metric.type, metric.unit)
    made.samples = [sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples]
    return made
