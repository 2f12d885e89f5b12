"""A request's sequences side by side: `n` of them, or the `n` likeliest of `best_of`.

Each sequence is a session of its own. All prefer one target, picked once, so that it computes the prompt's prefill once
for all; those for which it has no room go elsewhere. If one fails, the request fails; leaving cancels all.

An output queue decouples the sequences from the client and joins the outputs that wait. A slow client slows the reading
from the target and nothing else: neither the deadline nor a slot waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from coordinator.intake.generation_request import GenerationSpec
from coordinator.observability.statistics import RequestTimes, SpeculationCounts, outcome_of, times_to_json
from coordinator.output.client_pace import PaceWatch
from coordinator.output.logprobs import mean_logprob
from coordinator.output.output_queue import ChoiceOutput, OutputQueue, check_gathered, size_of, size_of_scores
from coordinator.output.sequence_output import OutputItem, SequenceFinished
from coordinator.output.text_output import VisibleOutput
from coordinator.placement.fair_queue import Siblings
from coordinator.placement.routing import prefix_key
from coordinator.recovery.resumption import Resumption
from coordinator.request.environment import Environment
from coordinator.request.sequence_runner import SequenceRunner
from outrider.errors import DeadlineExceeded, OutriderError, SlowReader
from outrider.objective import Objective

__all__ = ["ChoiceOutput", "RequestFinished", "run_choices"]


_AFTER_DEADLINE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """End of a request that completed: the ends of all generated sequences, including those that best_of dropped."""

    candidates: tuple[SequenceFinished, ...]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all generated sequences."""
        return sum(finished.num_output_tokens for finished in self.candidates)

    @property
    def num_generated_tokens(self) -> int:
        """Output tokens and, as vLLM counts them in usage and metrics, tokens that ended a sequence and are not
        shown."""
        return self.num_output_tokens + sum(isinstance(each.stop_reason, int) for each in self.candidates)

    @property
    def times(self) -> RequestTimes:
        return RequestTimes.merged([each.times for each in self.candidates])

    @property
    def counts(self) -> SpeculationCounts:
        return SpeculationCounts.merged([each.counts for each in self.candidates])

    @property
    def times_json(self) -> dict[str, float | None]:
        """The times as answers show them."""
        return times_to_json([(each.times, each.num_output_tokens) for each in self.candidates])

    def outcome(self, objective: Objective) -> dict[str, bool]:
        """Whether the request met each part of its objective, by its kind; empty without one."""
        return outcome_of(objective, [(each.times, each.num_output_tokens) for each in self.candidates])


async def run_choices(
    environment: Environment, spec: GenerationSpec, arrival_s: float, resumption: Resumption | None = None
) -> AsyncGenerator[ChoiceOutput | RequestFinished]:
    """Yields the outputs of all sequences as they come, then one RequestFinished. Raises as SequenceRunner.run.

    On a resumed stream, output that the client already has comes as repeats. With best_of nothing is yielded before all
    candidates have ended.
    """
    num_scores = spec.sampling.num_prompt_logprobs
    if num_scores is not None:
        check_gathered(spec.num_candidates * size_of_scores(len(spec.prompt_token_ids), num_scores))
    ranked = environment.placement.router.rank_targets(
        environment.snapshot(),
        environment.now_s(),
        model=spec.model_key,
        num_tokens=spec.num_tokens_max,
        excluded=(),
        prefix=prefix_key(spec.prompt_token_ids, spec.cache_salt),
        accepts=spec.run.accepts,
    )
    is_resumed = resumption is not None
    resumption = resumption or Resumption.of_nothing(spec.num_candidates)
    siblings = Siblings()
    sessions = [
        SequenceRunner(
            environment,
            spec,
            arrival_s,
            index=index,
            preferred=ranked[0] if ranked else None,
            point=resumption.points[index],
            known_token_ids=resumption.known(index),
            has_begun=resumption.has_begun(index),
            siblings=siblings,
        )
        for index in range(spec.num_candidates)
    ]
    finished: dict[int, SequenceFinished] = {}
    held: list[ChoiceOutput] = []
    num_held_bytes = 0
    is_ranking = spec.num_candidates > spec.num_choices
    try:
        async with aclosing(_interleaved(environment, sessions, arrival_s + spec.deadline_s)) as outputs:
            async for output in outputs:
                if isinstance(output.item, SequenceFinished):
                    finished[output.index] = output.item
                if is_ranking:
                    held.append(output)
                    num_held_bytes += size_of(output.item)
                    check_gathered(num_held_bytes)
                else:
                    yield output
    except OutriderError as error:
        _count_missed(environment, spec, error)
        raise
    for output in _likeliest(held, spec.num_choices):
        yield output
    candidates = tuple(finished[index] for index in range(spec.num_candidates))
    summary = RequestFinished(candidates)
    environment.metrics.observe_end(
        spec.model,
        candidates[0].finish_reason,
        len(spec.prompt_token_ids),
        summary.num_generated_tokens,
        summary.times,
        candidates[0].num_cached_tokens or 0,
    )
    if not is_resumed:  # its first token came elsewhere
        environment.metrics.observe_objective(spec.model, summary.outcome(spec.objective))
    yield summary


def _count_missed(environment: Environment, spec: GenerationSpec, error: OutriderError) -> None:
    """Counts the objective of a request that failed as missed, unless its client was too slow to read."""
    if not isinstance(error, SlowReader):
        environment.metrics.observe_objective(spec.model, spec.objective.outcome(None, math.inf))


async def _interleaved(
    environment: Environment, sessions: Sequence[SequenceRunner], deadline_s: float
) -> AsyncGenerator[ChoiceOutput]:
    """Yields the outputs of all sessions until these end, the deadline is over, the replica stops, or the reader lets
    output wait for too long; then all sessions are cancelled, even if nobody reads.

    `deadline_s` is on the environment's clock.
    """
    loop = asyncio.get_running_loop()
    waiting = OutputQueue(loop.time)
    tasks = [asyncio.create_task(_pump(index, session, waiting)) for index, session in enumerate(sessions)]

    def end(error: OutriderError) -> None:
        if not all(task.done() for task in tasks):
            waiting.end(error)
            for task in tasks:
                task.cancel()

    def end_stalled() -> None:
        environment.metrics.slow_readers.labels("request").inc()
        waiting.drop(SlowReader(environment.settings.client_stall_max_s))
        for task in tasks:
            task.cancel()

    # A little after the sessions' own deadline errors, which say more but come only to a reader.
    time_left_s = deadline_s - environment.now_s() + _AFTER_DEADLINE_S
    late = DeadlineExceeded("not finished within the request's deadline")
    deadline = loop.call_later(max(time_left_s, 0.0), end, late)
    watch = PaceWatch(lambda: waiting.oldest_s, environment.settings.client_stall_max_s, end_stalled)
    try:
        watch.start()
        num_running = len(sessions)
        with environment.open_requests.entered(end):
            while num_running:
                for output in await waiting.take():
                    num_running -= isinstance(output.item, SequenceFinished)
                    yield output
    finally:
        watch.stop()
        deadline.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(index: int, session: SequenceRunner, waiting: OutputQueue) -> None:
    try:
        await session.run(lambda item: waiting.put(ChoiceOutput(index, item)))
    except Exception as error:  # raised again by the reader
        waiting.end(error)


def _likeliest(held: Iterable[ChoiceOutput], num_choices: int) -> list[ChoiceOutput]:
    """Outputs of the candidates with the highest mean log probability per token, numbered by rank."""
    by_index: dict[int, list[OutputItem]] = {}
    for output in held:
        by_index.setdefault(output.index, []).append(output.item)

    def likelihood(index: int) -> float:
        items = [item for item in by_index[index] if isinstance(item, VisibleOutput)]
        return mean_logprob([each for item in items for each in item.logprobs])

    ranked = sorted(by_index, key=lambda index: (-likelihood(index), index))[:num_choices]
    return [ChoiceOutput(rank, item) for rank, index in enumerate(ranked) for item in by_index[index]]
