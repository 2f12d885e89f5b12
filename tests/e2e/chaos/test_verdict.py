"""The judge of the chaos suite: it must see each kind of damage, and call it by its name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.chaos.verdict import Answer, Choice, Kind, Right, judge

TOKENS = tuple(range(100, 140))
RIGHT = Right(TOKENS, "the whole text", "length", None)


def answer(
    token_ids: list[int],
    text: str = "the whole text",
    finish_reason: str | None = "length",
    **fields: Any,
) -> Answer:
    return Answer(0.0, [Choice(token_ids, text, finish_reason)], **fields)


def test_the_right_text_is_right() -> None:
    assert judge(answer(list(TOKENS)), [RIGHT]).kind is Kind.RIGHT


@pytest.mark.parametrize(
    ("token_ids", "kind", "num_tokens"),
    [
        pytest.param([*TOKENS[:30]], Kind.LOST, 10, id="the end is missing"),
        pytest.param([*TOKENS[:10], *TOKENS[13:]], Kind.LOST, 3, id="a piece in the middle is missing"),
        pytest.param([*TOKENS[:10], *TOKENS[6:]], Kind.REPEATED, 4, id="a replay that began too early"),
        pytest.param([*TOKENS[:20], 7, *TOKENS[21:]], Kind.WRONG, 1, id="one other token"),
        pytest.param([*TOKENS, 7, 7], Kind.WRONG, 2, id="more than there should be"),
        pytest.param([*TOKENS, *TOKENS[-4:]], Kind.REPEATED, 4, id="the end twice"),
    ],
)
def test_damage_has_a_name_and_a_size(token_ids: list[int], kind: Kind, num_tokens: int) -> None:
    verdict = judge(answer(token_ids), [RIGHT])
    assert (verdict.kind, verdict.num_tokens) == (kind, num_tokens)


def test_a_stream_that_breaks_off_has_lost_the_rest() -> None:
    broken = answer([*TOKENS[:30]], text="the whole", finish_reason=None, error="connection reset")
    verdict = judge(broken, [RIGHT])
    assert (verdict.kind, verdict.num_tokens) == (Kind.LOST, 10)
    assert "connection reset" in verdict.detail


def test_an_error_before_the_first_token_is_a_refusal() -> None:
    assert judge(answer([], text="", finish_reason=None, error="503"), [RIGHT]).kind is Kind.REFUSED


def test_who_leaves_in_the_middle_has_seen_a_right_beginning() -> None:
    assert judge(answer([*TOKENS[:5]], text="the", has_left=True), [RIGHT]).kind is Kind.RIGHT
    assert judge(answer([*TOKENS[:5], 7], text="the", has_left=True), [RIGHT]).kind is Kind.WRONG


def test_right_tokens_with_another_text_are_wrong() -> None:
    assert judge(answer(list(TOKENS), text="the hole text"), [RIGHT]).kind is Kind.WRONG
    assert judge(answer(list(TOKENS), text="the whole te"), [RIGHT]).kind is Kind.LOST


def test_the_reason_for_the_end_counts() -> None:
    assert judge(answer(list(TOKENS), finish_reason="stop"), [RIGHT]).kind is Kind.WRONG


def test_the_worst_of_several_texts_counts() -> None:
    good, short = Choice([*TOKENS], "the whole text", "length"), Choice([*TOKENS[:30]], "the", "length")
    verdict = judge(Answer(0.0, [good, short]), [RIGHT, RIGHT])
    assert (verdict.kind, verdict.num_tokens) == (Kind.LOST, 10)
    assert verdict.detail.startswith("text 1 of 2")
    other = Choice([7], "the", "length")
    assert judge(Answer(0.0, [other, short]), [RIGHT, RIGHT]).kind is Kind.WRONG


def test_a_text_that_ended_before_the_connection_broke_is_whole() -> None:
    good, rest = Choice([*TOKENS], "the whole text", "length"), Choice([*TOKENS[:30]], "the whole")
    verdict = judge(Answer(0.0, [good, rest], error="connection reset"), [RIGHT, RIGHT])
    assert (verdict.kind, verdict.num_tokens) == (Kind.LOST, 10)
