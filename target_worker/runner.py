"""Runs the scheduler's steps on the model."""

from __future__ import annotations

import time

import torch

from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.verification import Verdict, verify
from outrider.telemetry import TargetMetrics
from target_worker.messages import Action, Event, HintsArrived, Step, StepItem, StepResult, WaitForHints
from target_worker.scheduler import Scheduler


def run_step(engine: Engine, step: Step) -> StepResult:
    """One forward pass over the batch, then verification session by session."""
    started = time.perf_counter()
    chunks = [SequenceChunk(item.kv, item.token_ids, item.num_logits) for item in step.items]
    logits = engine.forward(chunks)
    verdicts: list[Verdict | None] = []
    row = 0
    for item in step.items:
        verdicts.append(_verify_item(item, logits[row : row + item.num_logits]) if item.num_logits else None)
        row += item.num_logits
    return StepResult(verdicts, step_ms=(time.perf_counter() - started) * 1e3)


@torch.inference_mode()
def _verify_item(item: StepItem, logits: torch.Tensor) -> Verdict:
    return verify(logits, item.hints, item.sampling, item.seed, item.position)


class TargetCore:
    """The scheduler and the engine as one core for the model thread."""

    def __init__(self, scheduler: Scheduler, engine: Engine, metrics: TargetMetrics) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self._metrics = metrics
        self._last_end: float | None = None

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = self.scheduler.handle(event, now)
        if not isinstance(event, HintsArrived):
            self._observe_load()
        return actions

    def run_next(self, now: float) -> tuple[list[Action], float | None]:
        decision = self.scheduler.next_step(now)
        if decision is None:
            self._last_end = None
            return [], None
        if isinstance(decision, WaitForHints):
            self._last_end = None  # a wait on purpose is not overhead
            return [], decision.until
        if self._last_end is not None:
            self._metrics.step_gap_ms.observe((time.perf_counter() - self._last_end) * 1e3)
        result = run_step(self.engine, decision)
        self._last_end = time.perf_counter()
        self._metrics.step_ms.observe(result.step_ms)
        actions = self.scheduler.finish_step(decision, result, time.monotonic())
        self._observe_load()
        return actions, 0.0

    def _observe_load(self) -> None:
        self._metrics.num_requests_running.set(self.scheduler.num_running)
        self._metrics.num_requests_waiting.set(self.scheduler.num_waiting)
        self._metrics.kv_cache_usage_perc.set(self.scheduler.kv_usage)
