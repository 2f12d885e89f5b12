"""Runs the scheduler's steps on the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.engine.kv.idle_check import IdleCheck
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers.features import packed
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.sampling.logit_edits import edits_of, is_idle
from outrider.engine.sampling.logprobs import ScoredRows
from outrider.engine.sampling.transfers import filled
from outrider.engine.sampling.verification import Verdict, VerificationRequest, greedy_verdicts, verify
from outrider.grammar import GrammarViolation
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import DecodingMode
from target_worker.core_sharing import CoreSharing
from target_worker.messages import (
    Action,
    CommitPublished,
    Event,
    HintsArrived,
    Step,
    StepItem,
    StepResult,
    WaitForHints,
)
from target_worker.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


@torch.inference_mode()
def run_step(engine: Engine, step: Step) -> StepResult:
    """One forward pass over the batch, then verification of all sessions at once."""
    started = time.perf_counter()
    chunks: list[SequenceChunk] = []
    for item in step.items:
        if item.branches:
            chunks += _branched(item)
        else:
            chunks.append(SequenceChunk(item.kv, item.token_ids, item.num_logits))
    logits = engine.forward(chunks)
    if all(map(_is_simple, step.items)):  # the usual step, and those of small models are short
        verdicts = greedy_verdicts(logits, [(item.hints, item.branches, item.num_decided) for item in step.items])
        _move_entries(engine, step.items, verdicts)
        return StepResult(verdicts, (time.perf_counter() - started) * 1e3)
    requests: list[VerificationRequest | None] = []
    prompts: list[ScoredRows] = []
    end = 0
    for item in step.items:
        start, end = end, end + item.num_logits
        requests.append(_request(item, end - item.num_decided, logits.shape[-1]))
        if num_prompt_rows := len(item.prompt_targets):
            # The item's first rows; always the model's own.
            targets = filled(item.prompt_targets, np.int64, logits.device)
            rows = logits[start : start + num_prompt_rows]
            prompts.append(ScoredRows(rows, targets, item.sampling.num_prompt_logprobs or 0))
    decided, scored = verify(logits, [request for request in requests if request is not None], prompts)
    verdicts_in_order, scores_in_order = iter(decided), iter(scored)
    verdicts = [
        None if not item.num_decided else Verdict([], 0, 0) if request is None else next(verdicts_in_order)
        for item, request in zip(step.items, requests, strict=True)
    ]
    _move_entries(engine, step.items, verdicts)
    prompt_logprobs = [next(scores_in_order) if item.prompt_targets else [] for item in step.items]
    return StepResult(verdicts, (time.perf_counter() - started) * 1e3, prompt_logprobs)


def _branched(item: StepItem) -> list[SequenceChunk]:
    """An item's rows: those of committed tokens and the path, then those of branches."""
    num_branches = len(item.branches)
    paths = [item.seen_entries(branch) for branch in item.branches]
    on_path = KVSequence(item.kv.allocator, item.kv.block_ids, item.kv.length - num_branches)  # a view, never freed
    committed = item.kv.length - item.num_fed_hints
    return [
        SequenceChunk(on_path, item.token_ids[:-num_branches], item.num_logits - num_branches),
        SequenceChunk(item.kv, item.token_ids[-num_branches:], num_branches, committed, paths),
    ]


def _move_entries(engine: Engine, items: Sequence[StepItem], verdicts: Sequence[Verdict | None]) -> None:
    """Moves the KV of accepted branches to where the committed tokens have theirs."""
    sources, destinations = [], []
    for item, verdict in zip(items, verdicts, strict=True):
        if item.branches and verdict is not None and verdict.trail:
            first = item.kv.length - item.num_fed_hints  # what moves was fed in this step
            slots = item.kv.slots(first, item.kv.length)
            source, destination = (np.array(entries) - first for entries in item.moved_entries(verdict))
            sources.append(slots[source])
            destinations.append(slots[destination])
    if sources:
        engine.move_entries(np.concatenate(sources), np.concatenate(destinations))


def _is_simple(item: StepItem) -> bool:
    """Whether the model's own logits decide an item, and nothing else is asked of them."""
    sampling = item.sampling
    if sampling.num_logprobs is not None or item.prompt_targets:
        return False
    return sampling.decoding_mode is DecodingMode.GREEDY and is_idle(sampling, item.context)


def _request(item: StepItem, first_row: int, vocab_size: int) -> VerificationRequest | None:
    """Returns the verification of an item; None if it has none, or a limit of its grammar's parser leaves no token."""
    if not item.num_decided:
        return None
    context, hints = item.context, item.hints
    try:
        edits = edits_of(item.sampling, context, vocab_size)
    except GrammarViolation:
        logger.info("session %s: a limit of the grammar's parser; some hints are dropped", item.session_id)
        # Where that is depends on the hints before it only, so that it biases nothing; these are still verified.
        num_rows = max(_num_rows_within_limits(item), 1)
        context, hints = replace(context, continuations=context.continuations[:num_rows]), hints[:num_rows]
        try:
            edits = edits_of(item.sampling, context, vocab_size)
        except GrammarViolation:
            return None
    return VerificationRequest(
        *(first_row, context, hints, item.sampling, item.seed, item.acceptance_rule, edits, item.branches)
    )


def _num_rows_within_limits(item: StepItem) -> int:
    for row, continuation in enumerate(item.context.continuations):
        try:
            if item.context.grammar is not None:
                item.context.grammar.masks([continuation])
        except GrammarViolation:
            return row
    return item.num_decided


def with_features(actions: list[Action], features: torch.Tensor | None) -> list[Action]:
    """The same actions, whose commits have the features that they name.  # [num_slots, size], None: there are none"""
    if features is None:
        return actions
    return [
        replace(action, features=packed(features, action.feature_slots), feature_slots=None)
        if isinstance(action, CommitPublished) and action.feature_slots is not None
        else action
        for action in actions
    ]


class TargetCore:
    """The scheduler and the engine as one core for the model thread."""

    def __init__(
        self, scheduler: Scheduler, engine: Engine, metrics: TargetMetrics, cores: CoreSharing | None = None
    ) -> None:
        """cores: the scheduler's own choice of the cores of each step."""
        self.scheduler = scheduler
        self._cores = cores
        self.engine = engine
        self._metrics = metrics
        self._last_end: float | None = None
        self._bubble_since: float | None = None  # end of the last step, where another is to follow
        self._waits_since: float | None = None  # for hints
        self._load = (0, 0, 0.0)  # exported: sessions that run and that wait, share of KV blocks in use
        self._num_preemptions = 0  # counted so far
        self._idle_check = IdleCheck(scheduler.allocator, metrics.num_integrity_failures)

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = with_features(self.scheduler.handle(event, now), self.engine.features)
        if not isinstance(event, HintsArrived):
            self._observe_load()
        return actions

    def run_next(self, now: float) -> tuple[list[Action], float | None]:
        decision = self.scheduler.next_step(now)
        if decision is None:
            self.engine.idle()
            self._idle_check.look(now)
            self._last_end = self._bubble_since = self._waits_since = None
            return [], None
        if isinstance(decision, WaitForHints):
            self._last_end = None  # a wait on purpose is not overhead
            if self._waits_since is None:
                self._waits_since = time.perf_counter()
            return [], decision.until
        began = time.perf_counter()
        if self._last_end is not None:
            self._metrics.step_gap_ms.observe((began - self._last_end) * 1e3)
        if self._bubble_since is not None:
            self._metrics.bubble_s.inc(began - self._bubble_since)
        if self._waits_since is not None:
            self._metrics.hint_wait_s.inc(began - self._waits_since)
            self._waits_since = None
        if self._cores is not None:
            self.engine.use_threads(beside_draft=not self._cores.uses_all_cores)
            self._metrics.num_steps_on_all_cores.inc(self._cores.uses_all_cores)
        result = run_step(self.engine, decision)
        self._last_end = self._bubble_since = time.perf_counter()
        self._metrics.step_ms.observe(result.step_ms)
        self._metrics.step_sessions.observe(len(decision.items))
        actions = self.scheduler.finish_step(decision, result, time.monotonic())
        self._observe_load()
        return with_features(actions, self.engine.features), 0.0

    def _observe_load(self) -> None:
        load = self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.kv_usage
        if load != self._load:  # seldom from one step to the next
            self._load = load
            self._metrics.num_requests_running.set(load[0])
            self._metrics.num_requests_waiting.set(load[1])
            self._metrics.kv_cache_usage_perc.set(load[2])
        self._metrics.show_speedup(self.scheduler.speedup)
        if (num_preemptions := self.scheduler.num_preemptions) != self._num_preemptions:
            self._metrics.num_preemptions.inc(num_preemptions - self._num_preemptions)
            self._num_preemptions = num_preemptions
