"""Generates for several prompts of one request: each is an ordinary request, and all are one stream of items."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.request.choices import ChoiceOutput, RequestFinished
from coordinator.service.generation_service import GenerationService
from outrider.concurrency.background import until_ended
from outrider.errors import DeadlineExceeded, Overloaded

PROMPTS_AT_ONCE: Final = 16
"""Most prompts of one request that generate or wait for a slot; the others wait behind them."""
_ITEMS_MAX: Final = 64  # unread, of all prompts


def num_sequences(inputs: Sequence[GenerationInput]) -> int:
    """The most sequences that the prompts of one request have at once."""
    first = inputs[0]
    return min(len(inputs), PROMPTS_AT_ONCE) * (first.best_of or first.n)


async def generate_each(
    service: GenerationService, specs: Sequence[GenerationSpec], arrival_s: float
) -> AsyncGenerator[ChoiceOutput | RequestFinished]:
    """Yields the output of all prompts as it comes, its choices numbered prompt by prompt, then one RequestFinished.

    Raises as GenerationService.generate as soon as one prompt fails, and cancels the others. The first prompt is
    refused if everything is full; the others then wait.
    """
    prompts = _Prompts(service, specs, arrival_s)
    tasks = [asyncio.create_task(prompts.run(number)) for number in range(len(specs))]
    try:
        finished: dict[int, RequestFinished] = {}
        while len(finished) < len(specs):
            item = await prompts.items.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, ChoiceOutput):
                yield item
            else:
                number, end = item
                finished[number] = end
        yield RequestFinished(tuple(each for number in range(len(specs)) for each in finished[number].candidates))
    finally:
        for task in tasks:
            task.cancel()
        await until_ended(*tasks)


class _Prompts:
    """The prompts of one request; `items` has their output, their ends by number, and the first error."""

    def __init__(self, service: GenerationService, specs: Sequence[GenerationSpec], arrival_s: float) -> None:
        self.items: asyncio.Queue[ChoiceOutput | tuple[int, RequestFinished] | Exception] = asyncio.Queue(_ITEMS_MAX)
        self._service = service
        self._specs = specs
        self._arrival_s = arrival_s
        self._gate = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def run(self, number: int) -> None:
        """Generates for one prompt as soon as it may."""
        try:
            async with self._gate:
                while not await self._is_served(number):
                    pass
        except Exception as error:  # raised again by the reader
            await self.items.put(error)

    async def _is_served(self, number: int) -> bool:
        """Generates for one prompt, or waits if everything is full. Raises Overloaded for the first prompt."""
        spec = self._specs[number]
        try:
            async with aclosing(self._service.generate(spec, self._arrival_s)) as items:
                async for item in items:
                    if isinstance(item, RequestFinished):
                        await self.items.put((number, item))
                    else:
                        await self.items.put(ChoiceOutput(number * spec.num_choices + item.index, item.item))
            return True
        except Overloaded as error:
            if number == 0:
                raise
            time_left_s = self._arrival_s + spec.deadline_s - self._service.environment.now_s()
            if time_left_s <= 0:
                raise DeadlineExceeded("not finished within the request's deadline") from error
            await asyncio.sleep(min(error.retry_after_s, time_left_s))
            return False
