"""A message from a peer or a user becomes an event, nothing, or an InvalidRequest that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS, AcceptanceRule, DecodingMode, SpeculationSettings
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.serving.generate_messages import parse_generate

VOCAB_SIZE = 50
UINT32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 60)


def request(**changes: Any) -> target_pb2.GenerateRequest:
    sampling = {"temperature": 0.5, "top_p": 1.0, "max_tokens": 4} | changes.pop("sampling", {})
    values: dict[str, Any] = {"session_id": "a", "token_ids": [1, 2, 3]} | changes
    return target_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling), **values)


class TestGenerate:
    @pytest.mark.parametrize(
        ("changes", "parameter"),
        [
            ({"session_id": ""}, "session_id"),
            ({"session_id": "x" * 65}, "session_id"),
            ({"token_ids": []}, "token_ids"),
            ({"cache_salt": "x" * 129}, "cache_salt"),
            ({"owner": "x" * 65}, "owner"),
            ({"sampling": {"temperature": 2.5}}, "temperature"),
            ({"sampling": {"temperature": math.nan}}, "temperature"),
            ({"sampling": {"top_p": -0.1}}, "top_p"),
            ({"sampling": {"min_p": -1.0}}, "min_p"),
            ({"sampling": {"max_tokens": 0}}, "max_tokens"),
            ({"sampling": {"stop_token_ids": list(range(65))}}, "stop_token_ids"),
            (
                {"speculation": common_pb2.SpeculationParams(num_speculative_tokens=MAX_SPECULATIVE_TOKENS + 1)},
                "num_speculative_tokens",
            ),
        ],
    )
    def test_what_is_out_of_bounds_is_refused_by_field(self, changes: dict[str, Any], parameter: str) -> None:
        with pytest.raises(InvalidRequest, match=parameter) as caught:
            parse_generate(request(**changes))
        assert caught.value.parameter == parameter

    def test_defaults(self) -> None:
        event = parse_generate(request())
        assert event.num_prompt_tokens == 3
        assert event.speculation == SpeculationSettings(enabled=True, num_speculative_tokens=0)
        assert event.sampling.decoding_mode is DecodingMode.REJECTION

    def test_a_session_has_the_salt_that_its_coordinator_sent(self) -> None:
        assert parse_generate(request(cache_salt="search")).cache_salt == "search"

    def test_a_clients_seed_is_the_sessions_and_others_get_their_own(self) -> None:
        assert parse_generate(request(sampling={"seed": 0})).seed == 0
        assert len({parse_generate(request()).seed for _ in range(5)}) == 5

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(
        session_id=st.text(max_size=70),
        token_ids=st.lists(UINT32, max_size=4),
        num_prompt_tokens=UINT32,
        temperature=st.floats(width=32),
        top_p=st.floats(width=32),
        top_k=UINT32,
        min_p=st.floats(width=32),
        seed=st.none() | st.integers(0, 2**64 - 1),
        max_tokens=UINT32,
        num_speculative_tokens=UINT32,
    )
    def test_any_message_is_an_event_or_a_refusal_that_names_its_field(self, **values: Any) -> None:
        sampling = {k: values.pop(k) for k in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")}
        speculation = common_pb2.SpeculationParams(
            enabled=True, num_speculative_tokens=values.pop("num_speculative_tokens")
        )
        try:
            event = parse_generate(request(sampling=sampling, speculation=speculation, **values))
        except InvalidRequest as error:
            parameter, message = error.parameter, error.message
            event = None
        if event is None:
            assert parameter in {*sampling, "session_id", "token_ids", "num_speculative_tokens"}
            assert parameter in message
        else:
            assert event.token_ids == values["token_ids"]
            assert event.speculation.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS


class TestSpeculation:
    def test_it_is_taken_as_it_is_said(self) -> None:
        for enabled in (True, False):
            message = common_pb2.SpeculationParams(
                enabled=enabled,
                num_speculative_tokens=MAX_SPECULATIVE_TOKENS,
                acceptance_rule=common_pb2.ACCEPTANCE_RULE_TOKEN,
                num_draft_probs=4,
                draft_probs_bits=6,
                plain=not enabled,
            )
            assert SpeculationSettings.from_proto(message) == SpeculationSettings(
                enabled, MAX_SPECULATIVE_TOKENS, AcceptanceRule.TOKEN, 4, 6, is_plain=not enabled
            )

    @pytest.mark.parametrize(
        ("field", "value"),
        [("num_draft_probs", 65), ("draft_probs_bits", 3), ("draft_probs_bits", 17), ("acceptance_rule", 9)],
    )
    def test_what_is_out_of_bounds_is_refused_by_field(self, field: str, value: int) -> None:
        message = common_pb2.SpeculationParams(**{field: value})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as caught:
            SpeculationSettings.from_proto(message)
        assert caught.value.parameter == field
