"""One replica's Prometheus metrics: the names that vLLM's dashboards graph, with our prefix.

`generate_latest(metrics.registry)` renders them. Labels are `model_name` and `engine`; the engine is always
"coordinator" here, for workers export the same names about themselves.

Several replicas stand behind one door, and a scrape through it reaches another one each time. Their counts differ, so
Prometheus would take every turn for a restart. Each replica therefore has a port of its own (`serve_replica`); what the
door shows is for looking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.priors import Evidence, PriorKey
from coordinator.settings import METRICS_PORTS, CoordinatorSettings
from coordinator.statistics import RequestTimes
from outrider.errors import ConfigurationError
from outrider.metrics_server import serve_metrics
from outrider.telemetry import show_expiry, show_loop_lag
from outrider.tls import TlsFiles

_LABELS: Final = ("model_name", "engine")
_ENGINE: Final = "coordinator"
_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
FAILURE_CODES: Final = (
    "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED",
    "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL",
)  # fmt: skip
"""That a request may end with."""
_FALLBACK_STATES: Final = ("speculating", "probing", "undrafted", "paused", "disabled")
# Positions beyond the longest block anybody may ask for do not occur.
_POSITIONS_MAX: Final = 32


class CoordinatorMetrics:
    """Every metric of one replica in a registry of its own, so that two in one process do not collide."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        """`files`: this replica's certificates, whose expiry is told."""
        self.registry = CollectorRegistry()
        if files is not None:
            show_expiry(files, self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"outrider_{name}", text, _LABELS, registry=self.registry, buckets=_SECONDS)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, labels, registry=self.registry)

        self.num_drafts = counter("spec_decode_num_drafts", "Steps that verified hints", *_LABELS)
        self.num_draft_tokens = counter("spec_decode_num_draft_tokens", "Hints verified", *_LABELS)
        self.num_accepted = counter("spec_decode_num_accepted_tokens", "Hints accepted", *_LABELS)
        self.num_accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Hints accepted by position", *_LABELS, "position"
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens", *_LABELS)
        self.generation_tokens = counter("generation_tokens", "Tokens generated", *_LABELS)
        self.request_success = counter("request_success", "Requests finished", *_LABELS, "finished_reason")
        self.request_failure = counter("request_failure", "Requests failed, by gRPC code", "code")
        for code in FAILURE_CODES:  # from 0 on, or Prometheus would not see the first one as an increase
            self.request_failure.labels(code)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token")
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Gap between chunks; a chunk may carry several tokens"
        )
        self.e2e_request_latency = histogram("e2e_request_latency_seconds", "Arrival to end")
        self.request_queue_time = histogram("request_queue_time_seconds", "Waiting for a target, and at it")
        self.request_prefill_time = histogram("request_prefill_time_seconds", "Prefill at the target")
        self.request_decode_time = histogram("request_decode_time_seconds", "First token to end")
        self.num_requests_running = gauge("num_requests_running", "Requests with a first token", *_LABELS)
        self.num_requests_waiting = gauge("num_requests_waiting", "Requests before theirs", *_LABELS)
        self.num_requests_queued = gauge(
            "num_requests_queued", "Texts that wait in the coordinator for a place at a target", *_LABELS
        )
        self.observe_loop_lag = show_loop_lag(self.registry, _ENGINE)
        self.live_workers = gauge("live_workers", "Usable workers", "pool")
        self.registry_degraded = gauge("registry_degraded", "1 while Redis does not answer")
        self.fallback_transitions = counter("fallback_transitions", "Fallback state changes", "state")
        self.fallback_requests = gauge(
            "fallback_requests",
            "Texts by what their request does about speculation: speculating, probing, undrafted (it would, and no "
            "draft worker has room), paused, disabled",
            *_LABELS,
            "state",
        )
        self.fallback_starts = counter(
            "fallback_starts", "Texts by the mode they started in", *_LABELS, "mode"
        )
        self.fallback_probes = counter("fallback_probes", "Probes by what ended them", *_LABELS, "outcome")
        self.num_priors = gauge("num_priors", "Models, routes and tenants with a prior")
        self.priors_degraded = gauge("priors_degraded", "1 while priors are not shared for want of Redis")
        prior_labels = (*_LABELS, "route")
        self.prior_num_judged = gauge(
            "prior_judged_requests", "Verdicts that a prior rests on, faded", *prior_labels
        )
        self.prior_paused_share = gauge(
            "prior_paused_share", "Share of them that paused speculation", *prior_labels
        )
        self.prior_acceptance = gauge(
            "prior_acceptance", "Accepted share of the hints decided", *prior_labels
        )
        self.prior_extra_tokens = gauge(
            "prior_extra_tokens_per_step", "Tokens gained per step with hints", *prior_labels
        )
        self.journal_degraded = gauge(
            "journal_degraded", "1 while streams cannot be resumed for want of Redis"
        )
        self.api_keys_degraded = gauge(
            "api_keys_degraded", "1 while the file of API keys, or an entry of it, cannot be read"
        )
        self.attach_failures = counter("draft_attach_failures", "Attachments that a draft worker ended")
        self.poisonous_prompt = gauge(
            "poisonous_prompt",
            "1 for a prompt that is refused, because target workers were lost to it one after the other",
            "prompt_digest",
        )
        self.draft_acceptance_alarm = gauge(
            "draft_acceptance_alarm",
            "1 where hardly any hint of a draft worker holds",
            *_LABELS,
            "draft_worker",
        )
        self.target_replays = counter("target_replays", "Sessions moved to another target")
        self.slow_readers = counter(
            "slow_readers",
            "Clients that let output wait for too long: requests that were ended, and connections that were closed",
            "ended",
        )
        for ended in ("request", "connection"):
            self.slow_readers.labels(ended)
        self.canary_requests = counter("canary_requests", "Requests that got an arm of a canary", "arm")
        self.canary_share = gauge(
            "canary_share", "Share of the keys that get the canary's arm, 1 when promoted"
        )
        self.canary_divergences = counter(
            "canary_divergences", "Requests of a canary that plain decoding answers otherwise"
        )
        self.canary_degraded = gauge(
            "canary_degraded", "1 while a canary cannot be followed for want of Redis"
        )

    def waiting(self, model: str) -> Gauge:
        """Requests of a model that have no token yet."""
        return self.num_requests_waiting.labels(model, _ENGINE)

    def running(self, model: str) -> Gauge:
        """Requests of a model that have one."""
        return self.num_requests_running.labels(model, _ENGINE)

    def queued(self, model: str) -> AbstractContextManager[None]:
        """Around a text's wait for a place."""
        return self.num_requests_queued.labels(model, _ENGINE).track_inprogress()

    def observe_gap(self, model: str, gap_s: float) -> None:
        """Seconds between two chunks of one request."""
        self.inter_token_latency.labels(model, _ENGINE).observe(gap_s)

    def observe_step(self, model: str, num_draft_tokens: int, num_accepted: int) -> None:
        """One target step of one request that verified at least one hint."""
        self.num_drafts.labels(model, _ENGINE).inc()
        self.num_draft_tokens.labels(model, _ENGINE).inc(num_draft_tokens)
        self.num_accepted.labels(model, _ENGINE).inc(num_accepted)
        for position in range(min(num_accepted, _POSITIONS_MAX)):
            self.num_accepted_per_pos.labels(model, _ENGINE, str(position)).inc()

    def know(self, model: str) -> None:
        """A model is served: what autoscalers ask about it is 0 from now on, and not unknown until somebody asks."""
        self.num_requests_queued.labels(model, _ENGINE)
        for state in _FALLBACK_STATES:
            self.fallback_requests.labels(model, _ENGINE, state)

    def move_fallback(self, model: str, before: str | None, after: str | None) -> None:
        """A text goes from one state to another; None: it begins, or ends."""
        if before == after:
            return
        if before is not None:
            self.fallback_requests.labels(model, _ENGINE, before).dec()
        if after is not None:
            self.fallback_requests.labels(model, _ENGINE, after).inc()

    def count_start(self, model: str, mode: str) -> None:
        """A text that begins speculating, paused, probing or disabled."""
        self.fallback_starts.labels(model, _ENGINE, mode).inc()

    def count_probe(self, model: str, outcome: str) -> None:
        """A probe that ended, by the trigger that ended it."""
        self.fallback_probes.labels(model, _ENGINE, outcome).inc()

    def show_priors(self, priors: Mapping[PriorKey, Evidence], num_priors: int) -> None:
        """What is known by model and route, all tenants together; `num_priors` counts tenants' own too."""
        self.num_priors.set(num_priors)
        for gauge in (
            self.prior_num_judged, self.prior_paused_share, self.prior_acceptance, self.prior_extra_tokens,
        ):  # fmt: skip
            gauge.clear()  # of models that are gone
        for key, evidence in priors.items():
            labels = (key.model, _ENGINE, key.route)
            self.prior_num_judged.labels(*labels).set(evidence.num_judged)
            self.prior_paused_share.labels(*labels).set(evidence.paused_share)
            self.prior_acceptance.labels(*labels).set(evidence.acceptance)
            self.prior_extra_tokens.labels(*labels).set(evidence.extra_tokens)

    def show_draft_alarms(self, alarms: Iterable[tuple[str, str]]) -> None:
        """Draft worker and model, of those that stand."""
        self.draft_acceptance_alarm.clear()
        for worker_id, model in alarms:
            self.draft_acceptance_alarm.labels(model, _ENGINE, worker_id).set(1)

    def show_poison(self, prompt_digests: Iterable[str]) -> None:
        """The prompts that are refused because workers were lost to them."""
        self.poisonous_prompt.clear()
        for digest in prompt_digests:
            self.poisonous_prompt.labels(digest).set(1)

    def observe_end(
        self, model: str, reason: str, num_prompt_tokens: int, num_output_tokens: int, times: RequestTimes
    ) -> None:
        """A request that finished as it should."""
        labels = (model, _ENGINE)
        self.request_success.labels(*labels, reason).inc()
        self.prompt_tokens.labels(*labels).inc(num_prompt_tokens)
        self.generation_tokens.labels(*labels).inc(num_output_tokens)
        self.e2e_request_latency.labels(*labels).observe(times.generation_ms / 1000)
        if times.time_to_first_token_ms is not None:
            self.time_to_first_token.labels(*labels).observe(times.time_to_first_token_ms / 1000)
            decode_ms = times.generation_ms - times.time_to_first_token_ms
            self.request_decode_time.labels(*labels).observe(decode_ms / 1000)
        if times.queue_ms is not None:
            self.request_queue_time.labels(*labels).observe(times.queue_ms / 1000)
        if times.prefill_ms is not None:
            self.request_prefill_time.labels(*labels).observe(times.prefill_ms / 1000)


def serve_replica(registry: CollectorRegistry, settings: CoordinatorSettings) -> int | None:
    """Serves a replica's own `/metrics` for as long as its process lives, to whoever has a certificate where there are
    certificates. Returns the port; None where none is asked for. Raises ConfigurationError where none is free."""
    first = settings.metrics_port
    if first is None:
        return None
    files = None if settings.tls_dir is None else TlsFiles(Path(settings.tls_dir))
    for port in range(first, first + METRICS_PORTS):
        try:
            return serve_metrics(registry, settings.metrics_host, port, files)
        except ConfigurationError as error:  # another replica's, most likely
            failure = error
    raise ConfigurationError(
        f"none of the {METRICS_PORTS} ports from --metrics-port {first} on can be used: {failure.message}"
    )
