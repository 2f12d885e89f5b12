"""Runs the scheduler's steps on the model."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from outrider.engine.idle_check import IdleCheck
from outrider.engine.logit_processing import is_idle
from outrider.engine.logprobs import token_logprobs
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.sampling import greedy_choices
from outrider.engine.verification import Verdict, verify, verify_choices
from outrider.grammar import GrammarViolation
from outrider.sampling_params import DecodingMode
from outrider.telemetry import TargetMetrics
from outrider.token_logprobs import TokenLogprobs
from target_worker.messages import Action, Event, HintsArrived, Step, StepItem, StepResult, WaitForHints
from target_worker.scheduler import Scheduler

logger = logging.getLogger(__name__)


@torch.inference_mode()
def run_step(engine: Engine, step: Step) -> StepResult:
    """One forward pass over the batch, then verification session by session."""
    started = time.perf_counter()
    chunks = [SequenceChunk(item.kv, item.token_ids, item.num_logits) for item in step.items]
    logits = engine.forward(chunks)
    # Most sessions want no more than the maximum of each row: those of the whole batch are found at once.
    is_simple = [_is_simple(item) for item in step.items]
    best = greedy_choices(logits) if any(is_simple) else []
    verdicts: list[Verdict | None] = []
    prompt_logprobs: list[list[TokenLogprobs]] = []
    end = 0
    for item, simple in zip(step.items, is_simple, strict=True):
        start, end = end, end + item.num_logits
        first_decided = end - item.num_decided
        prompt_logprobs.append(_score_prompt(item, logits[start:end]) if item.prompt_targets else [])
        if simple:
            verdicts.append(verify_choices(best[first_decided:end], item.hints))
        else:
            verdicts.append(_decide(item, logits[first_decided:end]))
    return StepResult(verdicts, (time.perf_counter() - started) * 1e3, prompt_logprobs)


def _is_simple(item: StepItem) -> bool:
    """Whether the item's tokens are the maxima of the model's own logits, and nothing else is asked."""
    params = item.sampling
    return (
        item.num_decided > 0
        and params.decoding_mode is DecodingMode.GREEDY
        and params.num_logprobs is None
        and is_idle(params, item.text)
    )


def _decide(item: StepItem, logits: torch.Tensor) -> Verdict | None:
    """What becomes of the item's hints.  # logits: [num_decided, vocab_size]"""
    if not item.num_decided:
        return None
    try:
        return verify(logits, item.hints, item.sampling, item.seed, item.text, item.acceptance_rule)
    except GrammarViolation:
        logger.info("session %s: a limit of the grammar's parser; some hints are dropped", item.session_id)
    # Where that is depends on the hints before it only, so that it biases nothing; these are still verified.
    num_rows = max(_num_rows_within_limits(item), 1)
    try:
        before = replace(item.text, continuations=item.text.continuations[:num_rows])
        hints = item.hints[:num_rows]
        return verify(logits[:num_rows], hints, item.sampling, item.seed, before, item.acceptance_rule)
    except GrammarViolation:
        return Verdict([], 0, 0)


def _num_rows_within_limits(item: StepItem) -> int:
    for row, continuation in enumerate(item.text.continuations):
        try:
            if item.text.grammar is not None:
                item.text.grammar.masks([continuation])
        except GrammarViolation:
            return row
    return item.num_decided


def _score_prompt(item: StepItem, logits: torch.Tensor) -> list[TokenLogprobs]:
    """Log probabilities of the prompt tokens that the item's first rows speak of; always the model's own."""
    num_rows = len(item.prompt_targets)
    return token_logprobs(logits[:num_rows], item.prompt_targets, item.sampling.num_prompt_logprobs or 0)


class TargetCore:
    """The scheduler and the engine as one core for the model thread."""

    def __init__(self, scheduler: Scheduler, engine: Engine, metrics: TargetMetrics) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self._metrics = metrics
        self._last_end: float | None = None
        self._bubble_since: float | None = None  # end of the last step, where another is to follow
        self._waits_since: float | None = None  # for hints
        self._num_preemptions = 0  # counted so far
        self._idle_check = IdleCheck(scheduler.allocator, metrics.num_integrity_failures)

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = self.scheduler.handle(event, now)
        if not isinstance(event, HintsArrived):
            self._observe_load()
        return actions

    def run_next(self, now: float) -> tuple[list[Action], float | None]:
        decision = self.scheduler.next_step(now)
        if decision is None:
            self.engine.rest()
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
        result = run_step(self.engine, decision)
        self._last_end = self._bubble_since = time.perf_counter()
        self._metrics.step_ms.observe(result.step_ms)
        self._metrics.step_sessions.observe(len(decision.items))
        actions = self.scheduler.finish_step(decision, result, time.monotonic())
        self._observe_load()
        return actions, 0.0

    def _observe_load(self) -> None:
        self._metrics.num_requests_running.set(self.scheduler.num_running)
        self._metrics.num_requests_waiting.set(self.scheduler.num_waiting)
        self._metrics.kv_cache_usage_perc.set(self.scheduler.kv_usage)
        self._metrics.show_speedup(self.scheduler.speedup)
        if (num_preemptions := self.scheduler.num_preemptions) != self._num_preemptions:
            self._metrics.num_preemptions.inc(num_preemptions - self._num_preemptions)
            self._num_preemptions = num_preemptions
