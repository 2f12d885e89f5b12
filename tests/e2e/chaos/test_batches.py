"""Mistakes in the results of a batch that the chaos suite finds."""

from __future__ import annotations

from typing import Any

from tests.e2e.chaos.batches import CROWD, NO_ROOM, crowd, judged, line, refused_for_room
from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.verdict import Answer, Incident, Kind, Verdict, judge

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


def test_every_sequence_of_a_line_of_many_is_judged() -> None:
    case = crowd([Case("long", "a prompt", 60), *CASES.values()])
    assert (case.name, case.max_tokens, line("0 a", case)["body"]["n"]) == ("a", 3, CROWD)
    whole = result("0 a")
    (choice,) = whole["response"]["body"]["choices"]
    whole["response"]["body"]["choices"] = [choice | {"index": index} for index in range(CROWD)]
    assert not judged({"0 a": case}, [whole], [], is_right)
    whole["response"]["body"]["choices"][7]["text"] = "xyz"
    assert judged({"0 a": case}, [whole], [], is_right) == ["line 0 a: wrong: token 0"]
    whole["response"]["body"]["choices"].pop()
    assert judged({"0 a": case}, [whole], [], is_right) == [f"line 0 a: wrong: {CROWD - 1} choices of {CROWD}"]


def test_a_request_that_is_refused_for_room_is_found() -> None:
    answer = Answer(0.0, incidents=[Incident(1.0, True, "this replica has 3 streams"), Incident(2.0, False, NO_ROOM)])
    assert not refused_for_room(answer)
    answer.incidents.append(Incident(3.0, True, f"429: this replica {NO_ROOM} of 64 sequences"))
    assert len(refused_for_room(answer)) == 1
    answer.error = f"429: this replica {NO_ROOM} of 64 sequences"
    assert len(refused_for_room(answer)) == 2
