"""Prometheus metrics of one replica: the names that vLLM's dashboards use, with our prefix and with vLLM's own.

`generate_latest(metrics.registry)` renders them. Labels are `model_name` and `engine`; the engine is always
"coordinator" here, for workers export the same names.

A scrape of the service's common address reaches another replica each time. Their counts differ, so Prometheus would see
restarts. Each replica therefore has its own port (`serve_replica`); `/metrics` of the service is for people.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.observability.statistics import RequestTimes
from coordinator.settings import METRICS_PORTS, CoordinatorSettings
from coordinator.speculation.priors import Evidence, PriorKey
from outrider.errors import ConfigurationError
from outrider.objective import KINDS as OBJECTIVE_KINDS
from outrider.observability.metrics_server import serve_metrics
from outrider.observability.telemetry import show_expiry, show_loop_lag
from outrider.observability.vllm_names import COORDINATOR_ALIASES, AliasingRegistry, MetricsNames
from outrider.security.tls import TlsFiles

_LABELS: Final = ("model_name", "engine")
_ENGINE: Final = "coordinator"
_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
FAILURE_CODES: Final = (
    "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED",
    "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL",
)  # fmt: skip
"""Codes with which a request may fail."""
FINISH_REASONS: Final = ("stop", "length")
LINE_RESULTS: Final = ("completed", "failed")
_OBJECTIVES: Final = (*OBJECTIVE_KINDS, "all")
_RESULTS: Final = ("met", "missed")
_FALLBACK_STATES: Final = ("speculating", "probing", "undrafted", "paused", "disabled")
# Positions beyond the longest block that a request may ask for do not occur.
_POSITIONS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class _StepMetrics:
    """Metrics of one model that every step of its sequences changes."""

    gap: Histogram
    drafts: Counter
    draft_tokens: Counter
    accepted: Counter
    accepted_at: list[Counter] = field(default_factory=list)  # by position


class CoordinatorMetrics:
    """All metrics of one replica, in a registry of its own so that two in one process do not collide."""

    def __init__(self, files: TlsFiles | None = None, names: MetricsNames = MetricsNames.BOTH) -> None:
        """`files`: this replica's certificates, whose expiry is exported."""
        self.registry: CollectorRegistry = AliasingRegistry(COORDINATOR_ALIASES, names)
        self._by_model: list[Counter | Gauge | Histogram] = []  # those whose labels are only `_LABELS`
        if files is not None:
            show_expiry(files, self.registry)
        self._steps: dict[str, _StepMetrics] = {}  # by model, as many as the metrics have
        self._make_request_metrics()
        self._make_speculation_metrics()
        self._make_fleet_metrics()
        self._make_batch_metrics()
        self.observe_loop_lag = show_loop_lag(self.registry, _ENGINE)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(f"outrider_{name}", text, labels, registry=self.registry)
        if labels == _LABELS:
            self._by_model.append(made)
        return made

    def _histogram(self, name: str, text: str) -> Histogram:
        made = Histogram(f"outrider_{name}", text, _LABELS, registry=self.registry, buckets=_SECONDS)
        self._by_model.append(made)
        return made

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made = Gauge(f"outrider_{name}", text, labels, registry=self.registry)
        if labels == _LABELS:
            self._by_model.append(made)
        return made

    def _make_speculation_metrics(self) -> None:
        self.num_drafts = self._counter("spec_decode_num_drafts", "Steps that verified hints", *_LABELS)
        self.num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Hints verified", *_LABELS)
        self.num_accepted = self._counter("spec_decode_num_accepted_tokens", "Hints accepted", *_LABELS)
        self.num_accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Hints accepted by position", *_LABELS, "position"
        )
        self.fallback_transitions = self._counter("fallback_transitions", "Fallback state changes", "state")
        self.fallback_requests = self._gauge(
            "fallback_requests",
            "Sequences by the state of their request's speculation: speculating, probing, undrafted (it would, and no "
            "draft worker has room), paused, disabled",
            *_LABELS,
            "state",
        )
        self.fallback_starts = self._counter(
            "fallback_starts", "Sequences by the mode they started in", *_LABELS, "mode"
        )
        self.fallback_probes = self._counter("fallback_probes", "Probes by what ended them", *_LABELS, "outcome")
        self.num_priors = self._gauge("num_priors", "Models, routes and tenants with a prior")
        self.priors_degraded = self._gauge("priors_degraded", "1 while priors are not shared for want of Redis")
        prior_labels = (*_LABELS, "route")
        self.prior_num_judged = self._gauge(
            "prior_judged_requests", "Verdicts that a prior rests on, faded", *prior_labels
        )
        self.prior_paused_share = self._gauge(
            "prior_paused_share", "Share of them that paused speculation", *prior_labels
        )
        self.prior_acceptance = self._gauge("prior_acceptance", "Accepted share of the hints decided", *prior_labels)
        self.prior_extra_tokens = self._gauge(
            "prior_extra_tokens_per_step", "Tokens gained per step with hints", *prior_labels
        )

    def _make_request_metrics(self) -> None:
        self.slo_requests = self._counter(
            "slo_requests",
            "Requests with a service-level objective that ended, by its kind (ttft, tpot; all: whether all that it has "
            "are met, so that the met ones are the goodput) and by result; a failed request missed it",
            *_LABELS,
            "objective",
            "result",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens", *_LABELS)
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens whose KV was in the target's cache", *_LABELS
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated", *_LABELS)
        self.request_success = self._counter("request_success", "Requests finished", *_LABELS, "finished_reason")
        self.request_failure = self._counter("request_failure", "Requests failed, by gRPC code", "code")
        for code in FAILURE_CODES:  # from 0 on, or Prometheus would not count the first one as an increase
            self.request_failure.labels(code)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Gap between chunks; a chunk may carry several tokens"
        )
        self.e2e_request_latency = self._histogram("e2e_request_latency_seconds", "Arrival to end")
        self.request_queue_time = self._histogram("request_queue_time_seconds", "Waiting for a target, and there")
        self.request_prefill_time = self._histogram("request_prefill_time_seconds", "Prefill at the target")
        self.request_decode_time = self._histogram("request_decode_time_seconds", "First token to end")
        self.num_requests_running = self._gauge("num_requests_running", "Requests with a first token", *_LABELS)
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests without a first token", *_LABELS)
        self.num_requests_queued = self._gauge(
            "num_requests_queued", "Sequences that wait in the coordinator for a slot at a target", *_LABELS
        )

    def _make_fleet_metrics(self) -> None:
        self.live_workers = self._gauge("live_workers", "Usable workers", "pool")
        self.registry_degraded = self._gauge("registry_degraded", "1 while Redis does not answer")
        self.journal_degraded = self._gauge("journal_degraded", "1 while streams cannot be resumed for want of Redis")
        self.api_keys_degraded = self._gauge(
            "api_keys_degraded", "1 while the file of API keys, or an entry of it, cannot be read"
        )
        self.identity_provider_degraded = self._gauge(
            "identity_provider_degraded", "1 while the keys of the identity provider cannot be read"
        )
        self.token_refusals = self._counter(
            "token_refusals", "Tokens of the identity provider that were refused, by reason", "reason"
        )
        self.models_file_degraded = self._gauge(
            "models_file_degraded", "1 while the file of models is wrong, so that its last change has no effect"
        )
        self.unpaired_workers = self._gauge(
            "draft_head_unpaired_workers",
            "Pairs of draft and target workers that are not made because the target keeps no features for the draft "
            "worker's draft head",
            *_LABELS,
        )
        self.attach_failures = self._counter("draft_attach_failures", "Attachments that a draft worker ended")
        self.poisonous_prompt = self._gauge(
            "poisonous_prompt",
            "1 for a prompt that is refused, because target workers were lost to it one after the other",
            "prompt_digest",
        )
        self.draft_acceptance_alarm = self._gauge(
            "draft_acceptance_alarm",
            "1 while hardly any hint of a draft worker is accepted",
            *_LABELS,
            "draft_worker",
        )
        self.target_replays = self._counter("target_replays", "Sessions moved to another target")
        self.slow_readers = self._counter(
            "slow_readers",
            "Clients that read output too slowly: requests that were ended, and connections that were closed",
            "ended",
        )
        for ended in ("request", "connection"):
            self.slow_readers.labels(ended)
        self.canary_requests = self._counter("canary_requests", "Requests that got an arm of a canary", "arm")
        self.canary_share = self._gauge("canary_share", "Share of the keys that get the canary's arm, 1 when promoted")
        self.canary_divergences = self._counter(
            "canary_divergences", "Requests of a canary whose output differs from plain decoding"
        )
        self.canary_degraded = self._gauge("canary_degraded", "1 while a canary cannot be followed for want of Redis")

    def _make_batch_metrics(self) -> None:
        self.batch_lines = self._counter("batch_lines", "Lines of batches that ended here, by result", "result")
        for result in LINE_RESULTS:
            self.batch_lines.labels(result)
        self.batch_lines_running = self._gauge("batch_lines_running", "Lines of batches that run here")
        self.batches_open = self._gauge("batches_open", "Batches that are not over, of all coordinators")
        self.batch_lines_left = self._gauge(
            "batch_lines_left", "Lines that have not ended, of all batches that run on any coordinator"
        )
        self.batches_degraded = self._gauge(
            "batches_degraded", "1 while batches wait for Redis or the storage of their files"
        )

    def waiting(self, model: str) -> Gauge:
        """Gauge of a model's requests without a token."""
        return self.num_requests_waiting.labels(model, _ENGINE)

    def running(self, model: str) -> Gauge:
        """Gauge of a model's requests with a token."""
        return self.num_requests_running.labels(model, _ENGINE)

    def queued(self, model: str) -> AbstractContextManager[None]:
        """Counts a sequence that waits for a slot, while the context is open."""
        return self.num_requests_queued.labels(model, _ENGINE).track_inprogress()

    def observe_gap(self, model: str, gap_s: float) -> None:
        """Observes the seconds between two chunks of one request."""
        self._of_steps(model).gap.observe(gap_s)

    def observe_step(self, model: str, num_draft_tokens: int, num_accepted: int) -> None:
        """Counts one target step of one request that verified at least one hint."""
        counters = self._of_steps(model)
        counters.drafts.inc()
        counters.draft_tokens.inc(num_draft_tokens)
        counters.accepted.inc(num_accepted)
        num_positions = min(num_accepted, _POSITIONS_MAX)
        for position in range(len(counters.accepted_at), num_positions):
            counters.accepted_at.append(self.num_accepted_per_pos.labels(model, _ENGINE, str(position)))
        for at_position in counters.accepted_at[:num_positions]:
            at_position.inc()

    def _of_steps(self, model: str) -> _StepMetrics:
        """A model's own metrics of steps, found once: a search for each took longer than to count."""
        found = self._steps.get(model)
        if found is None:
            found = self._steps[model] = _StepMetrics(
                gap=self.inter_token_latency.labels(model, _ENGINE),
                drafts=self.num_drafts.labels(model, _ENGINE),
                draft_tokens=self.num_draft_tokens.labels(model, _ENGINE),
                accepted=self.num_accepted.labels(model, _ENGINE),
            )
        return found

    def know(self, model: str) -> None:
        """Exports a served model's metrics as 0: autoscalers and load tools need not wait for a first request, and
        Prometheus counts that one as an increase."""
        for metric in self._by_model:
            metric.labels(model, _ENGINE)
        for reason in FINISH_REASONS:
            self.request_success.labels(model, _ENGINE, reason)
        for kind, result in itertools.product(_OBJECTIVES, _RESULTS):
            self.slo_requests.labels(model, _ENGINE, kind, result)
        for state in _FALLBACK_STATES:
            self.fallback_requests.labels(model, _ENGINE, state)

    def move_fallback(self, model: str, before: str | None, after: str | None) -> None:
        """Moves a sequence between fallback states; None: it begins, or ends."""
        if before == after:
            return
        if before is not None:
            self.fallback_requests.labels(model, _ENGINE, before).dec()
        if after is not None:
            self.fallback_requests.labels(model, _ENGINE, after).inc()

    def count_start(self, model: str, mode: str) -> None:
        """Counts a sequence by its starting mode: speculating, paused, probing or disabled."""
        self.fallback_starts.labels(model, _ENGINE, mode).inc()

    def count_probe(self, model: str, outcome: str) -> None:
        """Counts a probe by the trigger that ended it."""
        self.fallback_probes.labels(model, _ENGINE, outcome).inc()

    def show_priors(self, priors: Mapping[PriorKey, Evidence], num_priors: int) -> None:
        """Exports priors by model and route, all tenants together; `num_priors` counts tenants' own too."""
        self.num_priors.set(num_priors)
        for name in ("num_judged", "paused_share", "acceptance", "extra_tokens"):
            gauge: Gauge = getattr(self, f"prior_{name}")
            gauge.clear()  # models that are gone
            for key, evidence in priors.items():
                gauge.labels(key.model, _ENGINE, key.route).set(getattr(evidence, name))

    def show_draft_alarms(self, alarms: Iterable[tuple[str, str]]) -> None:
        """Exports the standing alarms, each with draft worker and model."""
        self.draft_acceptance_alarm.clear()
        for worker_id, model in alarms:
            self.draft_acceptance_alarm.labels(model, _ENGINE, worker_id).set(1)

    def show_unpaired(self, num_pairs: Mapping[str, int]) -> None:
        """Exports pairs of workers that draft heads rule out, by model."""
        for model, num in num_pairs.items():
            self.unpaired_workers.labels(model, _ENGINE).set(num)

    def show_poison(self, prompt_digests: Iterable[str]) -> None:
        """Exports the prompts that are refused because workers were lost to them."""
        self.poisonous_prompt.clear()
        for digest in prompt_digests:
            self.poisonous_prompt.labels(digest).set(1)

    def observe_end(
        self,
        model: str,
        reason: str,
        num_prompt_tokens: int,
        num_generated_tokens: int,
        times: RequestTimes,
        num_cached_tokens: int = 0,
    ) -> None:
        """Observes a request that completed; `num_cached_tokens` of its prompt had their KV in the cache."""
        labels = (model, _ENGINE)
        self.request_success.labels(*labels, reason).inc()
        self.prompt_tokens.labels(*labels).inc(num_prompt_tokens)
        self.prompt_tokens_cached.labels(*labels).inc(num_cached_tokens)
        self.generation_tokens.labels(*labels).inc(num_generated_tokens)
        self.e2e_request_latency.labels(*labels).observe(times.generation_ms / 1000)
        if times.time_to_first_token_ms is not None:
            self.time_to_first_token.labels(*labels).observe(times.time_to_first_token_ms / 1000)
            decode_ms = times.generation_ms - times.time_to_first_token_ms
            self.request_decode_time.labels(*labels).observe(decode_ms / 1000)
        if times.queue_ms is not None:
            self.request_queue_time.labels(*labels).observe(times.queue_ms / 1000)
        if times.prefill_ms is not None:
            self.request_prefill_time.labels(*labels).observe(times.prefill_ms / 1000)

    def observe_objective(self, model: str, outcome: Mapping[str, bool]) -> None:
        """Counts a request that ended by whether it met each part of its objective, and all; empty without one."""
        if outcome:
            for kind, is_met in {**outcome, "all": all(outcome.values())}.items():
                self.slo_requests.labels(model, _ENGINE, kind, _RESULTS[not is_met]).inc()


def serve_replica(registry: CollectorRegistry, settings: CoordinatorSettings) -> int | None:
    """Serves a replica's own `/metrics` for the life of its process, to clients with a certificate if certificates are
    in use. Returns the port; None if none is asked for. Raises ConfigurationError if none is free."""
    first = settings.metrics_port
    if first is None:
        return None
    files = None if settings.tls_dir is None else TlsFiles(Path(settings.tls_dir))
    for port in range(first, first + METRICS_PORTS):
        try:
            return serve_metrics(registry, settings.metrics_host, port, files)
        except ConfigurationError as error:  # probably another replica's
            failure = error.message
    raise ConfigurationError(f"none of the {METRICS_PORTS} ports from --metrics-port {first} on can be used: {failure}")
