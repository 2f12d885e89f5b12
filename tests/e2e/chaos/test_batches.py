"""Mistakes in the results of a batch that the chaos suite finds."""

from __future__ import annotations

from typing import Any

from tests.e2e.chaos.batches import judged, line
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.verdict import Answer, Kind, Verdict, judge

CASES = {name: Case(name, "a prompt", 3) for name in ("a", "b")}


def is_right(case: Case, answer: Answer) -> Verdict:
    return judge(answer, answer.as_right()) if answer.choices[0].text == "abc" else Verdict(Kind.WRONG, 1, "token 0")


def result(name: str, text: str = "abc") -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": [1, 2, 3], "finish_reason": "length", "stop_reason": None}
    return {"custom_id": name, "response": {"status_code": 200, "body": {"choices": [choice]}}, "error": None}


def failed(name: str, code: str) -> dict[str, Any]:
    return {"custom_id": name, "response": None, "error": {"code": code, "message": "Why."}}


def test_lines_that_ended_once_and_right_are_right() -> None:
    assert not judged(CASES, [result("b"), result("a")], [], is_right)


def test_a_line_that_is_missing_or_there_twice_is_found() -> None:
    assert judged(CASES, [result("a"), result("a")], [], is_right) == [
        "line a ended 2 times",
        "line b ended 0 times",
    ]
    assert judged(CASES, [result("a"), result("b")], [failed("b", "request_lost")], is_right) == [
        "line b ended 2 times"
    ]
    assert judged(CASES, [result("a"), result("b"), result("c")], [], is_right) == ["line c was not asked for"]


def test_a_wrong_text_is_found() -> None:
    assert judged(CASES, [result("a"), result("b", "xyz")], [], is_right) == ["line b: wrong: token 0"]


def test_a_line_is_judged_as_of_the_time_at_which_it_was_asked_for() -> None:
    asked: list[float] = []

    def note(case: Case, answer: Answer) -> Verdict:
        asked.append(answer.asked_s)
        return is_right(case, answer)

    assert not judged(CASES, [result("a"), result("b")], [], note, began_s=7.0)
    assert asked == [7.0, 7.0], "other weights, which are gone by now, were right then"


def test_a_line_may_fail_for_lost_processes_only() -> None:
    assert not judged(CASES, [result("a")], [failed("b", "poisonous_request")], is_right)
    found = judged(CASES, [result("a")], [failed("b", "internal_error")], is_right)
    assert found == ["line b failed: internal_error: Why."]


def test_a_line_asks_for_what_a_client_would_but_no_stream() -> None:
    body = line("a", CASES["a"])["body"]
    assert "stream" not in body
    assert body == {name: value for name, value in CASES["a"].body().items() if name != "stream"}
