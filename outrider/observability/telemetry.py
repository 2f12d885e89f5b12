"""Metrics of the worker processes, under names that people already graph (vLLM's, with our prefix), and those that
every process exports.

A worker serves its metrics before it loads its model: all of them are there from the start, with 0 where nothing has
happened yet, so that sums over a pool in which no worker is ready are 0 and not missing."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.observability.vllm_names import TARGET_ALIASES, AliasingRegistry, MetricsNames
from outrider.security.tls import TlsFiles

MILLISECOND_BUCKETS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LABELS = ("model_name", "engine")
STATES = ("loading", "ready", "stalled", "draining")


def show_expiry(files: TlsFiles, registry: CollectorRegistry) -> None:
    """Adds the expiry time of the process' current certificate."""
    expiry = Gauge(
        "outrider_certificate_expiry_timestamp_seconds",
        "When this process' own certificate expires, since the epoch",
        registry=registry,
    )
    expiry.set_function(lambda: files.current().expires_at_s)


def show_loop_lag(registry: CollectorRegistry, engine: str) -> Callable[[float, float], None]:
    """Adds the lag of a process' event loop. Returns a function that takes each lag and the part of it that was the
    process' own work, in seconds."""

    def histogram(name: str, text: str) -> Histogram:
        return Histogram(f"outrider_{name}", text, ("engine",), registry=registry, buckets=LAG_BUCKETS_S)

    lag = histogram(
        "loop_lag_seconds",
        "How late the event loop ran a timer, which delays every request of this process",
    ).labels(engine)
    own = histogram(
        "loop_own_lag_seconds",
        "The same without the time that the loop had no processor: delay by the process' own work",
    ).labels(engine)

    def observe(lag_s: float, own_s: float) -> None:
        lag.observe(lag_s)
        own.observe(own_s)

    return observe


class WorkerMetrics:
    """A registry whose metrics all carry the labels `model_name` and `engine` (the worker id)."""

    def __init__(self, model_name: str, worker_id: str, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._values = (model_name, worker_id)

        self.num_integrity_failures = self._counter(
            "kv_cache_integrity_failures",
            "Times that an idle worker found KV blocks lost or owned twice; anything but 0 is a defect",
        )
        self.max_num_seqs = self._gauge(
            "max_num_seqs", "Sessions that run, or are drafted for, at once at most; 0 until the worker is ready"
        )
        self._state = Gauge(
            "outrider_worker_state",
            "1 for the state that the worker is in, 0 for the others",
            (*LABELS, "state"),
            registry=registry,
        )
        self._began_s, self._load_s = time.monotonic(), 0.0
        self._gauge(
            "model_load_seconds", "Time from the start until the worker was ready; while it loads its model, so far"
        ).set_function(lambda: self._load_s or time.monotonic() - self._began_s)
        self.show_state("loading")

    def show_state(self, state: str) -> None:
        """Sets the state: one of STATES."""
        if state != "loading" and not self._load_s:
            self._load_s = time.monotonic() - self._began_s
        for each in STATES:
            self._state.labels(*self._values, each).set(each == state)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"outrider_{name}", text, LABELS, registry=self.registry).labels(*self._values)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"outrider_{name}", text, LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = MILLISECOND_BUCKETS) -> Histogram:
        histogram = Histogram(f"outrider_{name}", text, LABELS, registry=self.registry, buckets=buckets)
        return histogram.labels(*self._values)


class TargetMetrics(WorkerMetrics):
    def __init__(self, model_name: str, worker_id: str, names: MetricsNames = MetricsNames.BOTH) -> None:
        super().__init__(model_name, worker_id, AliasingRegistry(TARGET_ALIASES, names))
        self.num_drafts = self._counter("spec_decode_num_drafts", "Steps that verified hints, by session")
        self.num_draft_tokens = self._counter("spec_decode_num_draft_tokens", "Hints verified")
        self.num_accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Hints accepted")
        self.num_accepted_tokens_per_pos = Counter(
            "outrider_spec_decode_num_accepted_tokens_per_pos",
            "Hints accepted, by their position in the block",
            (*LABELS, "position"),
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sessions that ran to their end")
        self.generation_tokens = self._counter("generation_tokens", "Tokens committed")
        self.num_requests_running = self._gauge("num_requests_running", "Sessions in the batch")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sessions waiting for a batch slot")
        self.kv_cache_usage_perc = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1")
        self.num_preemptions = self._counter(
            "num_preemptions",
            "Sessions that lost their KV blocks to others and were recomputed later",
        )
        self.step_ms = self._histogram("step_milliseconds", "Forward pass and verification of a batch")
        self.num_steps_on_all_cores = self._counter(
            "steps_on_all_cores",
            "Steps that also ran on the cores of draft workers (--num-threads-beside-draft)",
        )
        self.step_sessions = self._histogram("step_sessions", "Sessions in a step", BATCH_BUCKETS)
        self.step_gap_ms = self._histogram("step_gap_milliseconds", "From a step's end to the next one's start")
        self.hint_wait_s = self._counter("hint_wait_seconds", "Time that steps waited for hints")
        self.bubble_s = self._counter(
            "bubble_seconds",
            "Time between two steps while there were sessions to go on with, waits for hints included",
        )
        self._estimated_speedup = Gauge(
            "outrider_estimated_speedup",
            "Speed of recent steps relative to measured plain decoding of the same batches; absent until known",
            LABELS,
            registry=self.registry,
        )
        self._own_speedup: Gauge | None = None
        self.num_stale_hints = self._counter(
            "stale_hints", "Hints dropped because the committed tokens differ, of sessions that ended"
        )
        self.num_late_hints = self._counter(
            "late_hints", "Hints that were right and came too late to be verified, of sessions that ended"
        )
        self.num_bad_hints = self._counter("bad_hint_messages", "Invalid hint messages")
        self.num_hint_frames = self._counter("hint_frames", "Messages received on draft workers' streams")
        self.num_commit_frames = self._counter("commit_frames", "Messages sent on draft workers' streams")
        self.num_hint_bytes = self._counter("hint_bytes", "Bytes of hint messages")
        self.num_commit_bytes = self._counter("commit_bytes", "Bytes of commit messages to draft workers")
        self.num_forced_tokens = self._counter(
            "grammar_forced_tokens", "Tokens that a grammar forced and that cost no step of their own"
        )
        self.num_lookup_tokens = self._counter(
            "lookup_accepted_tokens", "Tokens found by lookup that cost no step of their own"
        )
        self.num_memory_tokens = self._counter(
            "memory_accepted_tokens", "Tokens that a memory worker hinted at and that cost no step of their own"
        )
        self.num_accepted_prediction_tokens = self._counter(
            "prediction_accepted_tokens", "Tokens of clients' predictions that were verified and accepted"
        )
        self.num_rejected_prediction_tokens = self._counter(
            "prediction_rejected_tokens", "Tokens of clients' predictions that were verified and not accepted"
        )
        self._source_steps = self._by_source("hint_source_steps", "Steps that verified hints of a source, by session")
        self._source_verified = self._by_source("hint_source_verified", "Hints verified, by their source")
        self._source_accepted = self._by_source(
            "hint_source_accepted", "Hints that cost no step of their own, by their source; over its steps: its gain"
        )
        self.head_ms = self._histogram("head_milliseconds", "Turn of the draft head beside the model, before a step")
        self.num_outcomes = self._counter("outcomes", "Steps that verified hints and had a successor")
        self.num_predicted_outcomes = self._counter(
            "predicted_outcomes",
            "Of these, those whose accepted hints and next token were in the hint tree",
        )
        self.num_ready_outcomes = self._counter("ready_outcomes", "Of these, those with hints ready for the next step")
        self.num_cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens whose KV was in the cache")

    def show_speedup(self, speedup: float | None) -> None:
        """Sets the estimated speedup; does nothing while it is unknown."""
        if speedup is None:
            return
        if self._own_speedup is None:  # looked up once, because this runs with every step and event
            self._own_speedup = self._estimated_speedup.labels(*self._values)
        self._own_speedup.set(speedup)

    def _by_source(self, name: str, text: str) -> Counter:
        return Counter(f"outrider_{name}", text, (*LABELS, "source"), registry=self.registry)

    def observe_source(self, source: str, num_verified: int, num_accepted: int) -> None:
        """Counts a step's hints of one source."""
        self._source_steps.labels(*self._values, source).inc()
        self._source_verified.labels(*self._values, source).inc(num_verified)
        self._source_accepted.labels(*self._values, source).inc(num_accepted)

    def observe_accepted(self, num_accepted: int) -> None:
        for position in range(num_accepted):
            self.num_accepted_tokens_per_pos.labels(*self._values, str(position)).inc()


class DraftMetrics(WorkerMetrics):
    def __init__(self, model_name: str, worker_id: str) -> None:
        super().__init__(model_name, worker_id, CollectorRegistry())
        self.num_sessions = self._gauge("draft_sessions", "Sessions attached")
        self.idle_s = self._counter("draft_idle_seconds", "Time without any session")
        self.wait_s = self._counter(
            "draft_wait_seconds",
            "Time with sessions and nothing to draft: lookahead is used up, or targets accept no hints",
        )
        self.num_sent_nodes = self._counter("draft_nodes_sent", "Hint tree nodes sent")
        self.num_cached_tokens = self._counter("draft_prefix_cache_hits", "Tokens whose KV was in the cache")
        self.step_ms = self._histogram("draft_step_milliseconds", "Forward pass of a batch of nodes")


class MemoryMetrics(DraftMetrics):
    """Metrics of a draft worker without a model."""

    def __init__(self, model_name: str, worker_id: str) -> None:
        super().__init__(model_name, worker_id)
        self.num_tokens = self._gauge("memory_tokens", "Tokens remembered, with 32 more for each piece of a sequence")
        self.num_scopes = self._gauge("memory_scopes", "Tenants, times their cache salts, of which something is kept")
        self.num_forgotten_tokens = self._counter("memory_forgotten_tokens", "Tokens forgotten to make room for others")
        self.num_lookups = self._counter("memory_lookups", "Times that hints were looked for")
        self.num_hits = self._counter("memory_hits", "Lookups that found the last tokens of a session elsewhere")
        self.num_verified = self._counter("memory_hints_verified", "Hints that targets verified")
        self.num_accepted = self._counter("memory_hints_accepted", "Hints that targets accepted")
