"""Tests of the fuzzer's inputs: the same for the same seed, of every kind, and unchanged when read back from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from coordinator.api.http.openapi import openapi_document
from protos.outrider.v1 import generation_pb2
from tests.e2e.fuzz.__main__ import saved
from tests.e2e.fuzz.experiment import MAKERS, Plan, mixed
from tests.e2e.fuzz.grpc_inputs import framed, varint
from tests.e2e.fuzz.http_inputs import own_deadline, request
from tests.e2e.fuzz.inputs import HttpInput, StreamInput, drawn, from_json, to_json
from tests.e2e.fuzz.stream_inputs import MUTATIONS, comeback, cut_streams, is_rest

RUN = "0123456789ab-ba9876543210"


@pytest.mark.parametrize("name", MAKERS)
def test_inputs_are_the_same_for_a_seed_and_read_back_as_they_were(name: str) -> None:
    def made(seed: int) -> list[dict[str, Any]]:
        return [to_json(each) for each in mixed(Plan(30, seed, only=(name,)), openapi_document())]

    first = made(5)
    assert len(first) == 30
    assert first == made(5)
    if name != "reconnects":
        assert first != made(6)
    assert [to_json(from_json(json.loads(json.dumps(each)))) for each in first] == first


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"transport": "post"},
        {"transport": "http", "kind": "a", "what": "b"},
        {"transport": "http", "kind": "a", "what": "b", "raw": {"base64": "eA=="}, "colour": "red"},
    ],
)
def test_what_is_no_input_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"transport|unknown fields|missing"):
        from_json(content)


def test_a_saved_failure_can_be_sent_again(tmp_path: Path) -> None:
    each = HttpInput(kind="a", what="b", raw=b"\0\xff", allows=("504",), ends=True)
    (tmp_path / "a.json").write_text(json.dumps({"fault": "x", "input": to_json(each)}))
    assert saved(tmp_path / "a.json") == each
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match="no input"):
        saved(tmp_path / "b.json")


def test_as_many_examples_are_drawn_as_were_asked_for() -> None:
    assert len(drawn(st.sampled_from([1, 2, 3]), 100, seed=1)) == 100


def test_a_request_is_framed_as_http_and_grpc_have_it() -> None:
    raw = request("POST", "/x", b"abc", (("A", "b"),))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert body == b"abc"
    assert {b"Content-Length: 3", b"A: b", b"Authorization: Bearer {KEY}"} <= set(head.split(b"\r\n"))
    assert request("POST", "/x", b"abc", (("Content-Length", "9"),)).count(b"Content-Length") == 1
    assert framed(b"ab") == b"\0\0\0\0\2ab"
    crowd = b"\x22" + varint(400) + b"\x0a\x00" * 200
    assert len(generation_pb2.GenerationRequest.FromString(crowd).chat.messages) == 200


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"deadline_ms":5}', ("504",)),
        ('{"deadline_ms":99999}', ()),
        ('{"deadline_ms":' + "9" * 400 + "}", ()),
        ("{}", ()),
    ],
)
def test_only_who_gives_itself_no_time_may_be_told_that_it_is_over(text: str, allowed: tuple[str, ...]) -> None:
    assert own_deadline(text) == allowed


class TestComebacks:
    def back(self, mutation: str, chance: int = 1, place: str = "5") -> Any:
        each = StreamInput(kind="k", what="w", body='{"prompt":"a"}', cut_after=1, mutation=mutation, chance=chance)
        return comeback(each, "id", f"{RUN}:{place}", "other:1")

    def test_every_mutation_can_be_made_and_comes_up(self) -> None:
        assert {each.mutation for each in cut_streams(len(MUTATIONS), 1)} == set(MUTATIONS)
        for mutation in MUTATIONS:
            assert self.back(mutation).raw.endswith((b"}", b"\r\n\r\n"))
        with pytest.raises(ValueError, match="no mutation"):
            self.back("sideways")

    def test_what_was_not_changed_has_to_be_answered(self) -> None:
        good = [mutation for mutation in MUTATIONS if self.back(mutation).is_good]
        assert good == ["as it was", "journal", "journal from the beginning"]
        assert self.back("journal from the beginning").from_token == 0
        assert self.back("earlier").from_token in range(5)

    def test_another_request_or_tenant_has_no_part_in_it(self) -> None:
        foreign = {mutation for mutation in MUTATIONS if not self.back(mutation).is_own}
        assert foreign == {"another body", "another seed", "another tenant", "another tenant's journal"}
        assert b"{OTHER_KEY}" in self.back("another tenant").raw

    def test_a_rest_is_an_end_of_the_output_from_where_it_was_asked(self) -> None:
        right = [7, 8, 9]
        assert is_rest([8, 9], right, 1)
        assert not is_rest([9], right, 1)
        assert is_rest([9], right, None)
        assert is_rest([], right, None)
        assert not is_rest([8], right, None)
