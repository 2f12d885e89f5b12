"""A slice of closed-loop load on a pair of workers, with or without the draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.shared.worker_pair import Generation, WorkerPair
from outrider.sampling_params import SamplingParams

RAMP_S = 1.0  # of every slice, until all streams run


@dataclass(frozen=True, slots=True)
class Slice:
    """Requests with their prompts. What counts arrived from `begin` to `end`, seconds: not while the streams began."""

    recorded: list[tuple[list[int], Generation]]
    begin: float
    end: float

    @property
    def whole(self) -> list[Generation]:
        """Requests of more than one token that ended within it."""
        return [each for _, each in self.recorded if self.begin <= each.ended_at < self.end and len(each.token_ids) > 1]

    @property
    def tokens_per_s(self) -> float:
        arrivals = (arrival for _, each in self.recorded for arrival in each.arrivals)
        return sum(count for at, count in arrivals if self.begin <= at < self.end) / (self.end - self.begin)

    @property
    def tpot_ms(self) -> list[float]:
        return [1e3 / each.decode_tokens_per_s for each in self.whole]

    @property
    def mean_acceptance_length(self) -> float | None:
        stats = [each.finished.stats for each in self.whole]
        num_steps = sum(each.num_steps for each in stats)
        return 1 + sum(each.num_accepted_draft_tokens for each in stats) / num_steps if num_steps else None


async def run_slice(
    pair: WorkerPair,
    prompts: Iterator[list[int]],
    params: SamplingParams,
    *,
    num_streams: int,
    seconds: float,
    use_draft: bool,
) -> Slice:
    """Runs a closed loop: every stream sends its next prompt when the last one is answered."""
    recorded: list[tuple[list[int], Generation]] = []

    async def stream() -> None:
        while True:
            prompt, generation = next(prompts), Generation()
            recorded.append((prompt, generation))
            await pair.generate(prompt, params, use_draft=use_draft, result=generation)

    begin = time.perf_counter() + RAMP_S
    streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
    await asyncio.sleep(RAMP_S + seconds)
    end = time.perf_counter()
    for task in streams:
        task.cancel()
    for result in await asyncio.gather(*streams, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError(f"a stream broke: {result!r}")
    return Slice(recorded, begin, end)
