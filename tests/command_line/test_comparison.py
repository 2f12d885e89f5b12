"""Figures of the demo, and the client's reading of a stream."""

from __future__ import annotations

import pytest
from rich.console import Console

from command_line.chat import STYLES, legend
from command_line.client import Answer, ApiError, Piece, absorb, error_text
from command_line.start.comparison import compare, measure


def answer(text: str, e2e_s: float, num_drafted: int = 0, num_accepted: int = 0, num_steps: int = 0) -> Answer:
    statistics = {
        "num_draft_tokens": num_drafted,
        "num_accepted_draft_tokens": num_accepted,
        "num_spec_steps": num_steps,
    }
    return Answer(text=text, num_tokens=11, ttft_s=1.0, e2e_s=e2e_s, metrics={"speculative_decoding": statistics})


def test_speed_up_is_tokens_over_time_on_against_off() -> None:
    compared = compare({"p": [answer("x", 6.0)]}, {"p": [answer("x", 2.0, 10, 8, 4)]})
    assert compared.off.tokens_per_s == pytest.approx(11 / 6)
    assert compared.off.tpot_ms == pytest.approx(500)
    assert compared.speedup == pytest.approx(3)
    assert compared.on.draft_acceptance_rate == pytest.approx(0.8)
    assert compared.on.mean_acceptance_length == pytest.approx(3)
    assert compared.off.draft_acceptance_rate is None


def test_one_different_answer_is_enough_to_differ() -> None:
    same, other = answer("x", 1.0), answer("y", 1.0)
    assert compare({"p": [same]}, {"p": [same, same]}).identical
    assert not compare({"p": [same]}, {"p": [same, other]}).identical
    assert not compare({"p": [same], "q": [same]}, {"p": [same], "q": [other]}).identical


def test_steps_without_hints_do_not_dilute_the_acceptance() -> None:
    measured = measure([answer("x", 1.0), answer("x", 1.0, 4, 2, 1)])
    assert measured.mean_acceptance_length == pytest.approx(3)


def test_every_origin_has_a_colour_and_a_meaning() -> None:
    explained = legend(Console(force_terminal=True, color_system="standard", no_color=False))
    assert explained is not None
    assert all(f"{origin} (" in explained.plain for origin in STYLES)


@pytest.mark.parametrize("place", ["choice", "event"])
def test_detail_gives_each_token_its_origin(place: str) -> None:
    detail = {"token_ids": [1, 2], "origins": ["accepted", "bonus"], "pieces": ["a", "b"]}
    event = {"choices": [{"text": "ab", **({"outrider": detail} if place == "choice" else {})}]}
    read = Answer()
    pieces = absorb(read, event | ({"outrider": detail} if place == "event" else {}), 0.25)
    assert pieces == [Piece("a", "accepted"), Piece("b", "bonus")]
    assert (read.text, read.token_ids, read.ttft_s) == ("ab", [1, 2], 0.25)


def test_text_without_detail_is_shown_plainly() -> None:
    chunk = {"choices": [{"delta": {"content": "hi"}}]}
    assert absorb(Answer(), chunk, 0.1) == [Piece("hi", "plain")]


def test_an_error_inside_the_stream_is_raised() -> None:
    with pytest.raises(ApiError, match="target worker lost"):
        absorb(Answer(), {"error": {"message": "target worker lost"}}, 0.1)


def test_an_error_that_is_no_json_is_shown_as_it_is() -> None:
    assert error_text(b"<html>bad gateway</html>") == "<html>bad gateway</html>"
