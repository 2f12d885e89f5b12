"""A request's texts side by side: `n` of them, or the likeliest `n` of `best_of`.

Each text is a session of its own. All prefer one target, picked once, so that it can share the prompt's prefill among
them; those for which it has no room go elsewhere. If one fails the request fails, and leaving cancels all.

What the sessions say and what the client reads go at their own pace, with a queue in between that joins what waits. A
client that reads slower slows the reading from the target, and no more: neither the deadline nor a slot waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from coordinator.client_pace import PaceWatch
from coordinator.environment import Environment
from coordinator.fair_queue import Siblings
from coordinator.generation_request import GenerationSpec
from coordinator.logprobs import mean_logprob
from coordinator.news_queue import ChoiceNews, NewsQueue, check_gathered, size_of, size_of_scores
from coordinator.request_session import Finished, News, RequestSession
from coordinator.resumption import Resumption
from coordinator.routing import prefix_key
from coordinator.statistics import RequestTimes
from coordinator.text_output import VisibleOutput
from outrider.errors import DeadlineExceeded, SlowReader

__all__ = ["ChoiceNews", "RequestFinished", "run_choices"]


_AFTER_DEADLINE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The end of a request that went well: how each text generated ended, those included that best_of dropped."""

    candidates: tuple[Finished, ...]

    @property
    def num_output_tokens(self) -> int:
        """Of all texts generated."""
        return sum(finished.num_output_tokens for finished in self.candidates)


async def run_choices(
    environment: Environment, spec: GenerationSpec, arrival_s: float, resumption: Resumption | None = None
) -> AsyncGenerator[ChoiceNews | RequestFinished]:
    """Yields news of all texts as they come, then one RequestFinished. Raises what RequestSession.run raises.

    Where a stream is resumed, news that the client has already come as repeats. With best_of
    nothing is yielded before all candidates have ended.
    """
    num_scores = spec.sampling.num_prompt_logprobs
    if num_scores is not None:
        check_gathered(spec.num_candidates * size_of_scores(len(spec.prompt_token_ids), num_scores))
    ranked = environment.router.rank_targets(
        environment.snapshot(),
        environment.now_s(),
        model=spec.model,
        num_tokens=spec.num_tokens_max,
        excluded=(),
        prefix=prefix_key(spec.prompt_token_ids, spec.cache_salt),
        accepts=spec.run.accepts,
    )
    resumption = resumption or Resumption.of_nothing(spec.num_candidates)
    siblings = Siblings()
    sessions = [
        RequestSession(
            *(environment, spec, arrival_s),
            index=index,
            preferred=ranked[0] if ranked else None,
            point=resumption.points[index],
            known_token_ids=resumption.known(index),
            has_begun=resumption.has_begun(index),
            siblings=siblings,
        )
        for index in range(spec.num_candidates)
    ]
    finished: dict[int, Finished] = {}
    held: list[ChoiceNews] = []
    num_held_bytes = 0
    is_ranking = spec.num_candidates > spec.num_choices
    async with aclosing(_interleaved(environment, sessions, arrival_s + spec.deadline_s)) as items:
        async for item in items:
            if isinstance(item.news, Finished):
                finished[item.index] = item.news
            if is_ranking:
                held.append(item)
                num_held_bytes += size_of(item.news)
                check_gathered(num_held_bytes)
            else:
                yield item
    for item in _likeliest(held, spec.num_choices):
        yield item
    candidates = tuple(finished[index] for index in range(spec.num_candidates))
    summary = RequestFinished(candidates)
    environment.metrics.observe_end(
        spec.model,
        candidates[0].finish_reason,
        len(spec.prompt_token_ids),
        summary.num_output_tokens,
        RequestTimes.merged([each.times for each in candidates]),
    )
    yield summary


async def _interleaved(
    environment: Environment, sessions: Sequence[RequestSession], deadline_s: float
) -> AsyncGenerator[ChoiceNews]:
    """News of all sessions, which run until they end, the deadline is over, or the reader lets news wait for too long:
    whether or not anybody reads, all sessions are cancelled then.

    `deadline_s` is on the environment's clock.
    """
    loop = asyncio.get_running_loop()
    waiting = NewsQueue(loop.time)
    tasks = [asyncio.create_task(_pump(index, session, waiting)) for index, session in enumerate(sessions)]

    def end_late() -> None:
        if not all(task.done() for task in tasks):
            waiting.end(DeadlineExceeded("not finished within the request's deadline"))
            for task in tasks:
                task.cancel()

    def end_stalled() -> None:
        environment.metrics.slow_readers.labels("request").inc()
        waiting.drop(SlowReader(environment.settings.client_stall_max_s))
        for task in tasks:
            task.cancel()

    # A little later than the sessions' own end, which says more, and which nobody hears where nobody reads.
    time_left_s = deadline_s - environment.now_s() + _AFTER_DEADLINE_S
    deadline = loop.call_later(max(time_left_s, 0.0), end_late)
    watch = PaceWatch(lambda: waiting.oldest_s, environment.settings.client_stall_max_s, end_stalled)
    try:
        watch.start()
        num_running = len(sessions)
        while num_running:
            for item in await waiting.take():
                num_running -= isinstance(item.news, Finished)
                yield item
    finally:
        watch.stop()
        deadline.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(index: int, session: RequestSession, waiting: NewsQueue) -> None:
    try:
        async with aclosing(session.run()) as items:
            async for news in items:
                await waiting.put(ChoiceNews(index, news))
    except Exception as error:  # raised again by the reader
        waiting.end(error)


def _likeliest(held: Iterable[ChoiceNews], num_choices: int) -> list[ChoiceNews]:
    """News of the candidates with the highest mean log probability per token, numbered by rank."""
    by_index: dict[int, list[News]] = {}
    for item in held:
        by_index.setdefault(item.index, []).append(item.news)

    def likelihood(index: int) -> float:
        outputs = [news for news in by_index[index] if isinstance(news, VisibleOutput)]
        return mean_logprob([each for output in outputs for each in output.logprobs])

    ranked = sorted(by_index, key=lambda index: (-likelihood(index), index))[:num_choices]
    return [ChoiceNews(rank, news) for rank, index in enumerate(ranked) for news in by_index[index]]
