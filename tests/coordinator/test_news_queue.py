"""News that wait are joined; nothing else changes."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from coordinator.news_queue import ChoiceNews, NewsQueue, joined
from coordinator.text_output import PromptOutput, VisibleOutput
from outrider.errors import WorkerLost
from protos.outrider.v1 import common_pb2

PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN


def step(*token_ids: int, index: int = 0) -> ChoiceNews:
    """A step whose text spells its tokens."""
    pieces = tuple(f"<{token_id}>" for token_id in token_ids)
    logprobs = tuple(common_pb2.TokenLogprobs(logprob=-token_id, rank=1) for token_id in token_ids)
    output = VisibleOutput("".join(pieces), token_ids, (PLAIN,) * len(token_ids), pieces, logprobs)
    return ChoiceNews(index, output)


async def test_the_first_news_go_at_once() -> None:
    queue = NewsQueue(8)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    await queue.put(step(1))
    await asyncio.sleep(0)
    assert taking.done()
    assert await taking == [step(1)]


async def test_steps_that_wait_go_out_as_one() -> None:
    queue = NewsQueue(8)
    await queue.put(step(1))
    assert await queue.take() == [step(1)]
    for token_id in (2, 3, 4):
        await queue.put(step(token_id, 10 + token_id))
    assert await queue.take() == [step(2, 12, 3, 13, 4, 14)]


async def test_steps_that_come_while_the_loop_is_busy_go_out_with_the_one_before() -> None:
    queue = NewsQueue(8)
    await queue.put(step(1))
    await queue.take()

    async def produce() -> None:
        for token_id in (2, 3, 4):
            await queue.put(step(token_id))
            await asyncio.sleep(0)

    _, taken = await asyncio.gather(produce(), queue.take())
    assert taken == [step(2, 3, 4)]


async def test_a_full_queue_makes_its_producer_wait() -> None:
    queue = NewsQueue(2)
    for token_id in (1, 2):
        await queue.put(step(token_id))
    third = asyncio.create_task(queue.put(step(3)))
    await asyncio.sleep(0)
    assert not third.done()
    assert await queue.take() == [step(1, 2)]
    await third
    assert await queue.take() == [step(3)]


async def test_an_error_comes_after_all_that_was_said_before_it() -> None:
    queue = NewsQueue(8)
    error = WorkerLost("gone")
    for item in (step(1), step(2), error):
        await queue.put(item)
    assert await queue.take() == [step(1, 2)]
    for _ in range(2):
        caught: list[Exception] = []
        try:
            await queue.take()
        except WorkerLost as raised:
            caught.append(raised)
        assert caught == [error]


def test_only_steps_are_joined() -> None:
    prompt = ChoiceNews(0, PromptOutput("p", ()))
    assert joined([prompt, step(1), step(2)]) == [prompt, step(1, 2)]
    assert joined([step(1), prompt, step(2)]) == [step(1), prompt, step(2)]


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 9), max_size=3))))
def test_joined_steps_say_what_the_single_ones_did(said: list[tuple[int, list[int]]]) -> None:
    items = [step(*token_ids, index=index) for index, token_ids in said]
    for index in range(3):
        own = [item.news for item in joined(items) if item.index == index]
        assert len(own) <= 1
        token_ids = [token_id for each, found in said if each == index for token_id in found]
        if own:
            assert own == [step(*token_ids).news]
