"""The comparison with vLLM: what counts as a difference, what is documented, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.compare.__main__ import PAGE, all_kinds, page_text, read, save
from tests.clients.compare.asking import answer_of
from tests.clients.compare.comparing import Answer, differences, event_order, joined
from tests.clients.compare.documented import Entry, counts, load, matches, outdated, page, undocumented


def keys(ours: Any, theirs: Any, **options: Any) -> list[str]:
    return [each.key for each in differences("a", Answer(200, body=ours), Answer(200, body=theirs), **options)]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"id": "x", "created": 1}, {"id": "y", "created": 2}, []),
        ({"id": 3}, {"id": "y"}, ["a: body.id: number instead of string"]),
        (
            {"error": {"message": "x", "code": 1}},
            {"error": {"message": "y", "code": 2}},
            ["a: body.error.code: differs"],
        ),
        ({}, {"b": 1}, ["a: body.b: missing"]),
        ({}, {"b": None}, ["a: body.b: missing null"]),
        ({"b": 1}, {}, ["a: body.b: extra"]),
        ({"b": None}, {"b": 1}, ["a: body.b: null instead of number"]),
        ({"b": True}, {"b": 1}, ["a: body.b: boolean instead of number"]),
        ({"b": [{"c": 1}, {"c": 2}]}, {"b": [{"c": 3}, {"c": 4}]}, ["a: body.b[].c: differs"]),
        ({"b": [1]}, {"b": [1, 2]}, ["a: body.b[]: length"]),
        ({"b": 0.10001}, {"b": 0.1}, []),
    ],
)
def test_values_differ_by_presence_type_and_value(ours: Any, theirs: Any, expected: list[str]) -> None:
    assert keys(ours, theirs) == expected


def test_generated_texts_are_compared_only_where_both_must_generate_the_same() -> None:
    ours: Any = {"choices": [{"text": "x", "finish_reason": "stop", "logprobs": {"top_logprobs": [{"x": 0.0}]}}]}
    theirs: Any = {"choices": [{"text": "y", "finish_reason": None, "logprobs": {"top_logprobs": [{"y": 0.0}]}}]}
    assert len(keys(ours, theirs)) == 4
    assert not keys(ours, theirs, compares_text=False)


def test_answers_of_another_status_have_one_difference() -> None:
    found = differences("a", Answer(400, body={"x": 1}), Answer(200, {"allow": "GET"}, body={"y": 1}))
    assert [each.key for each in found] == ["a: status: 400 instead of 200"]


def test_headers_are_compared() -> None:
    found = differences("a", Answer(200, {"allow": "GET", "x": "1"}), Answer(200, {"allow": "POST", "y": "1"}))
    assert [each.key for each in found] == ["a: header allow: differs", "a: header x: extra", "a: header y: missing"]


def event(text: str | None, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}]}


def test_events_may_carry_any_number_of_tokens() -> None:
    ours = Answer(200, events=(event("ab"), event("", "stop"), "[DONE]"))
    theirs = Answer(200, events=(event("a"), event("b"), event("", "stop"), "[DONE]"))
    assert not differences("a", ours, theirs)


def test_streams_differ_by_order_and_by_what_they_say_together() -> None:
    usage = {"choices": [], "usage": {"total_tokens": 3}}
    ours = Answer(200, events=(event("a"), event("", "stop"), "[DONE]"))
    theirs = Answer(200, events=(event("b", "stop"), usage, "[DONE]"))
    assert [each.key for each in differences("a", ours, theirs)] == [
        "a: events.choices[0].text: differs",
        "a: events.usage: differs",
        "a: events: order",
    ]


def test_the_order_of_one_choice_leaves_out_the_others() -> None:
    events = [event("a"), event("b", index=1), event("a"), event("", "stop", index=1), "[DONE]"]
    assert event_order(events, 0) == ["text", "[DONE]"]
    assert event_order(events, 1) == ["text", "finish", "[DONE]"]
    assert joined(events) == {
        "choices[0].text": "aa",
        "choices[1].text": "b",
        "choices[1].finish_reason": "stop",
    }


def test_answers_are_read_as_json_events_or_text() -> None:
    stream = answer_of(200, {"content-type": "text/event-stream"}, b'id: 1\ndata: {"a": 1}\n\ndata: [DONE]\n\n')
    assert stream.events == ({"a": 1}, "[DONE]")
    assert answer_of(200, {}, b'{"a": 1}').body == {"a": 1}
    assert answer_of(404, {}, b"Not here\nat all").body == "Not here"


def test_saved_answers_are_read_back(tmp_path: Path) -> None:
    answers = {"a": Answer(200, {"allow": "GET"}, events=({"b": 1}, "[DONE]")), "c": Answer(400, body=[None])}
    save(answers, tmp_path / "saved")
    assert read(tmp_path / "saved") == answers


ENTRIES = [Entry("openai", "One", "Because.", ("a: *",)), Entry("not yet", "Two", "Later.", ("b*[]: length", "c: d"))]


def test_differences_without_an_entry_and_entries_without_a_difference_are_found() -> None:
    found = ["a: body: differs", "b: body[]: length", "c: e"]
    assert undocumented(found, ENTRIES) == ["c: e"]
    assert outdated(found, ENTRIES) == ["c: d"]
    numbers = counts(found, ENTRIES)
    assert (numbers["openai"], numbers["not yet"], numbers["refused"]) == (1, 1, 0)


def test_only_the_asterisk_is_special_in_a_pattern() -> None:
    assert matches("a*: x[]", "a: b: x[]")
    assert not matches("a*: x[]", "a: b: x")


def test_an_unknown_group_is_refused_with_the_groups() -> None:
    with pytest.raises(ValueError, match=r"the group 'x'; the groups are openai"):
        load('[[difference]]\ngroup = "x"\ntitle = "T"\nreason = "R."\nkeys = []\n')


def test_the_page_has_the_reasons_by_group() -> None:
    text = page(ENTRIES, num_kinds=3, version="1.2")
    assert "vLLM 1.2" in text
    assert text.index("- **One.** Because.") < text.index("## Not yet") < text.index("- **Two.** Later.")
    assert "## Refused" not in text


def test_no_two_requests_have_one_name() -> None:
    names = [kind.name for kind in all_kinds()]
    assert len(names) == len(set(names))
    assert len(names) > 280


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(), "run `python -m tests.clients.compare --write`"
