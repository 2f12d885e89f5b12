"""The pure core of batches: states, lines of requests and results, and the check of a file."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.batches.batch import Batch, BatchState, LineCounts, is_over, sources_of
from coordinator.batches.batch_lines import (
    LINES_MAX,
    LineIndex,
    LineResult,
    join_part,
    lines_of_part,
    never_ran,
    part_line,
    read_line,
    result_line,
)
from coordinator.batches.batch_runner import TRIES_MAX, pause_before_retry_s
from coordinator.batches.validation import ERRORS_MAX, FileCheck
from outrider.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Poisonous,
    Unavailable,
    WorkerLost,
)
from tests.coordinator.batches.desks import ENDPOINT, EchoLines, a_batch, line, lines


def checked(content: bytes, piece_bytes: int = 1 << 20) -> tuple[FileCheck, LineIndex]:
    check = FileCheck(ENDPOINT, partial(EchoLines().check_body, a_batch()))
    for start in range(0, len(content), piece_bytes):
        feed(check, content[start : start + piece_bytes])
    return check, check.end()


def feed(check: FileCheck, piece: bytes) -> None:
    check.feed(piece)
    while check.check_some(lambda: True):
        pass


class TestStates:
    def test_a_batch_never_leaves_its_last_state(self) -> None:
        for state in (BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED):
            assert is_over(state)
            assert not [after for after in BatchState if state in sources_of(after)]

    def test_a_batch_can_be_cancelled_until_its_lines_have_ended(self) -> None:
        assert set(sources_of(BatchState.CANCELLING)) == {BatchState.VALIDATING, BatchState.IN_PROGRESS}

    def test_a_record_comes_back_as_it_was(self) -> None:
        batch = a_batch(tenant="search", metadata={"a": "b"})
        assert Batch.from_fields(batch.to_fields()) == batch

    @pytest.mark.parametrize("change", [{"about": "{}"}, {"state": "odd"}, {"num_failed": "1"}, {"about": "["}])
    def test_a_damaged_record_is_refused(self, change: dict[str, str]) -> None:
        batch = a_batch()
        with pytest.raises(ValueError):  # noqa: PT011
            Batch.from_fields(batch.to_fields() | change)


class TestLines:
    @pytest.mark.parametrize(
        ("raw", "parameter"),
        [
            (b"nothing", None),
            (b"[]", None),
            (b"\xff", None),
            (line("a", custom_id=""), "custom_id"),
            (line("a", custom_id=7), "custom_id"),
            (line("a", custom_id="a" * 513), "custom_id"),
            (line("a", method="GET"), "method"),
            (line("a", url=None), "url"),
            (line("a", body=[]), "body"),
            (line("a", extra=1), "extra"),
        ],
    )
    def test_a_wrong_line_is_refused_by_its_field(self, raw: bytes, parameter: str | None) -> None:
        with pytest.raises(InvalidRequest) as refused:
            read_line(raw)
        assert refused.value.parameter == parameter

    def test_results_have_the_form_of_openai(self) -> None:
        good = json.loads(result_line("batch_1", 3, "a", LineResult(200, "r", {"x": "ü"})))
        assert good == {
            "id": "batch_req_1_3", "custom_id": "a", "error": None,
            "response": {"status_code": 200, "request_id": "r", "body": {"x": "ü"}},
        }  # fmt: skip
        bad = json.loads(result_line("batch_1", 3, "a", never_ran("batch_expired", "late")))
        assert (bad["response"], bad["error"]) == (None, {"code": "batch_expired", "message": "late"})

    @pytest.mark.parametrize(
        "usage",
        [
            {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4},
             "completion_tokens_details": {"reasoning_tokens": 2}},
            {"input_tokens": 5, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4},
             "output_tokens_details": {"reasoning_tokens": 2}},
        ],
        ids=["chat", "responses"],
    )  # fmt: skip
    def test_an_answer_tells_its_tokens(self, usage: dict[str, Any]) -> None:
        counts = LineResult(200, "r", {"usage": usage}).counts()
        assert counts == LineCounts(
            num_completed=1, num_input_tokens=5, num_cached_tokens=4, num_output_tokens=3, num_reasoning_tokens=2
        )
        assert counts + LineCounts(num_failed=1, num_input_tokens=1) == LineCounts(
            num_completed=1, num_failed=1,
            num_input_tokens=6, num_cached_tokens=4, num_output_tokens=3, num_reasoning_tokens=2,
        )  # fmt: skip

    def test_a_failed_line_has_no_tokens(self) -> None:
        assert never_ran("batch_expired", "late").counts() == LineCounts(num_failed=1)
        assert LineResult(400, "r", {"error": {}}).counts() == LineCounts(num_failed=1)

    def test_a_part_keeps_outputs_and_errors_apart(self) -> None:
        part = join_part([part_line(b"1", is_error=False), part_line(b"2", is_error=True)])
        assert (lines_of_part(part, errors=False), lines_of_part(part, errors=True)) == (b"1\n", b"2\n")

    def test_a_damaged_index_is_refused(self) -> None:
        index = LineIndex([0, 5], [4, 9])
        assert list(LineIndex.from_bytes(index.to_bytes()).ends) == [4, 9]
        with pytest.raises(ValueError, match="damaged"):
            LineIndex.from_bytes(index.to_bytes()[:-1])


class TestCheck:
    @given(piece_bytes=st.integers(1, 200), has_last_newline=st.booleans(), windows=st.booleans())
    def test_lines_are_found_however_the_file_comes(
        self, piece_bytes: int, has_last_newline: bool, windows: bool
    ) -> None:
        content = (b"\r\n" if windows else b"\n").join([line("a"), b"", line("ü"), b"  ", line("c")])
        content += b"\n" if has_last_newline else b""
        check, index = checked(content, piece_bytes)
        assert not check.errors
        ids = [read_line(content[begin:end]).custom_id for begin, end in zip(index.starts, index.ends, strict=True)]
        assert ids == ["a", "ü", "c"]

    @pytest.mark.parametrize(
        ("second", "parameter", "part"),
        [
            (line("r0"), "custom_id", "earlier line"),
            (line("b", url="/v1/chat/completions"), "url", "one url"),
            (line("b", body={}), "prompt", "required"),
            (b"{", None, "not valid JSON"),
        ],
    )
    def test_one_wrong_line_is_named_by_its_number(self, second: bytes, parameter: str | None, part: str) -> None:
        check, _ = checked(lines(1) + b"\n" + second)
        (error,) = check.errors
        assert (error["line"], error["param"]) == (3, parameter)
        assert part in error["message"]

    def test_an_empty_file_is_refused(self) -> None:
        assert [each["code"] for each in checked(b"\n \n")[0].errors] == ["empty_file"]

    def test_the_check_ends_after_many_errors(self) -> None:
        check, _ = checked(b"{\n" * (ERRORS_MAX + 50))
        assert len(check.errors) == ERRORS_MAX
        assert check.is_over

    def test_a_line_without_end_is_refused_before_it_is_all_there(self) -> None:
        check = FileCheck(ENDPOINT, partial(EchoLines().check_body, a_batch()))
        for _ in range(9):
            feed(check, b"x" * (1 << 20))
        assert [each["code"] for each in check.errors] == ["line_too_long"]
        assert check.is_over

    def test_too_many_lines_are_refused(self) -> None:
        check = FileCheck(ENDPOINT, lambda url, body: None)
        feed(check, lines(LINES_MAX + 1))
        assert [each["code"] for each in check.errors] == ["too_many_lines"]


@pytest.mark.parametrize(
    ("error", "num_failures", "is_tried_again"),
    [
        (Overloaded("full"), 99, True),
        (Unavailable("no target"), 99, True),
        (WorkerLost("lost"), 1, True),
        (WorkerLost("lost"), TRIES_MAX, False),
        (Poisonous("it kills"), 0, False),
        (DeadlineExceeded("late"), 0, False),
        (InvalidRequest(None, "wrong"), 0, False),
    ],
)
def test_a_line_waits_for_room_but_costs_few_workers(error: Any, num_failures: int, is_tried_again: bool) -> None:
    assert (pause_before_retry_s(error, num_failures) is not None) is is_tried_again
