"""Outputs that wait are joined; nothing else changes."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.output.output_queue import (
    CHUNK_BYTES_MAX,
    QUEUE_BYTES_MAX,
    ChoiceOutput,
    OutputQueue,
    joined,
    size_of,
)
from coordinator.output.text_output import PromptOutput, VisibleOutput
from outrider.errors import WorkerLost
from protos.outrider.v1 import common_pb2, target_pb2

PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN


def step(*token_ids: int, index: int = 0) -> ChoiceOutput:
    """A step whose text spells its tokens."""
    pieces = tuple(f"<{token_id}>" for token_id in token_ids)
    logprobs = tuple(common_pb2.TokenLogprobs(logprob=-token_id, rank=1) for token_id in token_ids)
    output = VisibleOutput("".join(pieces), token_ids, (PLAIN,) * len(token_ids), pieces, logprobs)
    return ChoiceOutput(index, output)


def scored(
    num_tokens: int, num_alternatives: int, logprobs: Iterable[common_pb2.TokenLogprobs] | None = None
) -> VisibleOutput:
    """A step with log probabilities, of which there are none without alternatives."""
    if logprobs is None:
        ids = range(10**5, 10**5 + num_alternatives)
        each = common_pb2.TokenLogprobs(logprob=-1, rank=9, top_token_ids=ids, top_logprobs=[-0.5] * len(ids))
        logprobs = [each] * num_tokens if num_alternatives else []
    pieces = tuple(f" word {at}" for at in range(num_tokens))
    token_ids = tuple(range(10**5, 10**5 + num_tokens))
    return VisibleOutput("".join(pieces), token_ids, (PLAIN,) * num_tokens, pieces, tuple(logprobs))


def new_queue(**options: int) -> OutputQueue:
    return OutputQueue(time.monotonic, **options)


async def test_the_first_news_go_at_once() -> None:
    queue = new_queue()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    await queue.put(step(1))
    await asyncio.sleep(0)
    assert taking.done()
    assert await taking == [step(1)]


async def test_steps_that_wait_go_out_as_one() -> None:
    queue = new_queue()
    await queue.put(step(1))
    assert await queue.take() == [step(1)]
    for token_id in (2, 3, 4):
        await queue.put(step(token_id, 10 + token_id))
    assert await queue.take() == [step(2, 12, 3, 13, 4, 14)]


async def test_steps_that_come_while_the_loop_is_busy_go_out_with_the_one_before() -> None:
    queue = new_queue()
    await queue.put(step(1))
    await queue.take()

    async def produce() -> None:
        for token_id in (2, 3, 4):
            await queue.put(step(token_id))
            await asyncio.sleep(0)

    _, taken = await asyncio.gather(produce(), queue.take())
    assert taken == [step(2, 3, 4)]


async def test_a_full_queue_makes_its_producer_wait() -> None:
    queue = new_queue(bytes_max=2 * size_of(step(1).item))
    for token_id in (1, 2):
        await queue.put(step(token_id))
    third = asyncio.create_task(queue.put(step(3)))
    await asyncio.sleep(0)
    assert not third.done()
    assert await queue.take() == [step(1, 2)]
    await third
    assert await queue.take() == [step(3)]


@pytest.mark.parametrize(("num_tokens", "num_alternatives"), [(1, 0), (1, 20), (8, 20), (100, 20)])
async def test_what_waits_is_bounded_in_bytes_whatever_a_step_carries(num_tokens: int, num_alternatives: int) -> None:
    queue = new_queue()
    scores = scored(num_tokens, num_alternatives)

    async def produce(index: int) -> None:
        while True:
            await queue.put(ChoiceOutput(index, scores))

    producers = [asyncio.create_task(produce(index)) for index in range(64)]
    num_turns = 0
    while num_turns < 64 * QUEUE_BYTES_MAX // size_of(scores) and queue._has_room.is_set():
        await asyncio.sleep(0)
        num_turns += 1
    for _ in range(10):
        await asyncio.sleep(0)
    assert QUEUE_BYTES_MAX <= queue._num_bytes < QUEUE_BYTES_MAX + size_of(scores)
    taken = await queue.take()
    assert sum(size_of(item.item) for item in taken) <= max(CHUNK_BYTES_MAX, size_of(scores))
    for producer in producers:
        producer.cancel()
    await asyncio.wait(producers)


@pytest.mark.parametrize(("num_tokens", "num_alternatives"), [(1, 0), (4, 0), (1, 5), (1, 20), (8, 20)])
def test_news_take_no_more_memory_than_they_are_counted_for(num_tokens: int, num_alternatives: int) -> None:
    raw = target_pb2.StepOutput(logprobs=scored(num_tokens, num_alternatives).logprobs).SerializeToString()
    num = (16 << 20) // size_of(scored(num_tokens, num_alternatives))
    gc.collect()
    before = psutil.Process().memory_info().rss
    kept = [scored(num_tokens, num_alternatives, target_pb2.StepOutput.FromString(raw).logprobs) for _ in range(num)]
    grown = psutil.Process().memory_info().rss - before
    assert grown < sum(map(size_of, kept)) + (2 << 20)


async def test_the_age_of_the_oldest_is_told_until_the_reader_is_done_with_it() -> None:
    now_s = 5.0
    queue = OutputQueue(lambda: now_s)
    ages = [queue.oldest_s]
    await queue.put(step(1))
    now_s = 6.0
    await queue.put(step(2))
    ages.append(queue.oldest_s)
    await queue.take()
    await queue.put(step(3))
    ages.append(queue.oldest_s)  # its reader is still busy with the first two
    now_s = 7.0
    await queue.take()
    ages.append(queue.oldest_s)
    with suppress(TimeoutError):
        await asyncio.wait_for(queue.take(), 0.01)
    ages.append(queue.oldest_s)  # it has read all and waits for more
    assert ages == [None, 5.0, 5.0, 6.0, None]


async def test_an_error_comes_after_all_that_was_said_before_it() -> None:
    queue = new_queue()
    error = WorkerLost("gone")
    for item in (step(1), step(2)):
        await queue.put(item)
    queue.end(error)
    queue.end(WorkerLost("another"))
    assert await queue.take() == [step(1, 2)]
    for _ in range(2):
        with pytest.raises(WorkerLost) as caught:
            await queue.take()
        assert caught.value is error


async def test_what_is_dropped_is_never_read_and_holds_nobody_up() -> None:
    queue = new_queue(bytes_max=1)
    await queue.put(step(1))
    second = asyncio.create_task(queue.put(step(2)))
    await asyncio.sleep(0)
    queue.drop(WorkerLost("gone"))
    await second
    assert queue._num_bytes == 0
    assert queue.oldest_s is None
    with pytest.raises(WorkerLost):
        await queue.take()


def test_only_steps_are_joined() -> None:
    prompt = ChoiceOutput(0, PromptOutput("p", ()))
    assert joined([prompt, step(1), step(2)]) == [prompt, step(1, 2)]
    assert joined([step(1), prompt, step(2)]) == [step(1), prompt, step(2)]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 9), max_size=3))))
def test_joined_steps_say_what_the_single_ones_did(said: list[tuple[int, list[int]]]) -> None:
    items = [step(*token_ids, index=index) for index, token_ids in said]
    for index in range(3):
        own = [item.item for item in joined(items) if item.index == index]
        assert len(own) <= 1
        token_ids = [token_id for each, found in said if each == index for token_id in found]
        if own:
            assert own == [step(*token_ids).item]
