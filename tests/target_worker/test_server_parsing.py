"""A message from a peer or a user becomes an event, nothing, or an InvalidRequest that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.hint_tree import HintTree
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS, AcceptanceRule, DecodingMode, SpeculationSettings
from protos.outrider.v1 import common_pb2, hints_pb2, target_pb2
from target_worker.messages import HintsArrived
from target_worker.server import HintChannel, parse_generate, parse_hints

VOCAB_SIZE = 50
UINT32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 60)


def nodes(**columns: Any) -> hints_pb2.HintNodes:
    return hints_pb2.HintNodes(channel=4, base_len=3, **columns)


def channel() -> HintChannel:
    return HintChannel("a", attachment=1)


class TestHints:
    """I7: a bad message fails its session, never a loop."""

    @settings(max_examples=500, deadline=None, derandomize=True)
    @given(
        attachment=UINT32,
        base_len=UINT32,
        first_node_id=SMALL | UINT32,
        num_nodes=st.integers(0, 5),
        data=st.data(),
    )
    def test_columns_of_any_length_never_raise_and_never_give_nonsense(
        self, attachment: int, base_len: int, first_node_id: int, num_nodes: int, data: st.DataObject
    ) -> None:
        lengths = st.sampled_from([num_nodes, num_nodes, num_nodes, 0, num_nodes + 1])

        def column(values: st.SearchStrategy[int], of: st.SearchStrategy[int] = lengths) -> list[int]:
            length = data.draw(of)
            return data.draw(st.lists(values, min_size=length, max_size=length))

        message = hints_pb2.HintNodes(
            channel=4,
            base_len=base_len,
            first_node_id=first_node_id,
            node_ids=column(SMALL | UINT32),
            parent_ids=column(SMALL | UINT32),
            token_ids=column(st.integers(0, VOCAB_SIZE)),
            support_sizes=column(st.integers(0, 3) | UINT32),
            support_token_ids=column(st.integers(0, VOCAB_SIZE + 1), st.integers(0, 8)),
            support_weights=column(
                st.sampled_from([0, 1, 32768, 65535, 65536, 2**32 - 1]), st.integers(0, 8)
            ),
        )
        event = parse_hints(message, HintChannel("a", attachment), VOCAB_SIZE, 1.0)
        if event is None:
            return
        assert isinstance(event, HintsArrived)
        assert len(event.hints) == sum(token_id < VOCAB_SIZE for token_id in message.token_ids)
        for hint in event.hints:
            assert 0 <= hint.token_id < VOCAB_SIZE
            if hint.distribution is not None:
                assert hint.distribution.is_valid(VOCAB_SIZE)
                assert hint.token_id in hint.distribution.token_ids
        HintTree().add([1, 2, 3], event.attachment, event.base_len, event.hints)

    def test_columns_that_fit_become_hints_with_their_own_distributions(self) -> None:
        event = parse_hints(
            nodes(
                node_ids=[1, 2, 3],
                parent_ids=[0, 1, 1],
                token_ids=[7, 8, 9],
                support_sizes=[2, 0, 1],
                support_token_ids=[7, 5, 9],
                support_weights=[60000, 5536, 65536],
            ),
            channel(),
            VOCAB_SIZE,
            1.0,
        )
        assert event is not None
        first, second, third = event.hints
        assert first.distribution is not None
        assert (first.distribution.token_ids, first.distribution.weights) == ((7, 5), (60000, 5536))
        assert second.distribution is None
        assert third.distribution is not None
        assert third.distribution.token_ids == (9,)

    @pytest.mark.parametrize(
        ("token_ids", "weights"),
        [
            ([7, 5], [60000, 5537]),
            ([7, 5], [60000, 0]),
            ([7, 7], [32768, 32768]),
            ([6, 5], [32768, 32768]),
            ([7, 50], [32768, 32768]),
        ],
        ids=[
            "weights add up to too much",
            "weight of nothing",
            "token twice",
            "hint not in it",
            "outside the vocabulary",
        ],
    )
    def test_a_distribution_that_is_none_costs_the_hint_its_distribution_only(
        self, token_ids: list[int], weights: list[int]
    ) -> None:
        """I5: taken as certain it cannot bias the output."""
        event = parse_hints(
            nodes(
                node_ids=[1],
                parent_ids=[0],
                token_ids=[7],
                support_sizes=[2],
                support_token_ids=token_ids,
                support_weights=weights,
            ),
            channel(),
            VOCAB_SIZE,
            1.0,
        )
        assert event is not None
        assert event.hints[0].distribution is None

    def test_a_token_outside_the_vocabulary_loses_its_own_node_only(self) -> None:
        message = nodes(node_ids=[1], parent_ids=[0], token_ids=[VOCAB_SIZE])
        event = parse_hints(message, channel(), VOCAB_SIZE, 1.0)
        assert event is not None
        assert event.hints == []

    def test_without_ids_nodes_are_counted_from_the_first(self) -> None:
        event = parse_hints(
            nodes(first_node_id=5, parent_ids=[0, 5], token_ids=[1, 2]), channel(), VOCAB_SIZE, 1.0
        )
        assert event is not None
        assert [(hint.node_id, hint.parent_id) for hint in event.hints] == [(5, 0), (6, 5)]

    def test_what_a_message_leaves_out_follows_from_the_one_before(self) -> None:
        stream = channel()
        first = nodes(first_node_id=5, parent_ids=[0, 5], token_ids=[1, 2])
        second = hints_pb2.HintNodes(channel=4, parent_ids=[6], token_ids=[3])
        events = [parse_hints(message, stream, VOCAB_SIZE, 1.0) for message in (first, second)]
        assert events[1] is not None
        assert (events[1].base_len, events[1].hints[0].node_id) == (3, 7)


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
            ({"sampling": {"temperature": 2.5}}, "temperature"),
            ({"sampling": {"temperature": math.nan}}, "temperature"),
            ({"sampling": {"top_p": 0.0}}, "top_p"),
            ({"sampling": {"min_p": -1.0}}, "min_p"),
            ({"sampling": {"max_tokens": 0}}, "max_tokens"),
            ({"sampling": {"stop_token_ids": list(range(65))}}, "stop_token_ids"),
            (
                {
                    "speculation": common_pb2.SpeculationParams(
                        num_speculative_tokens=MAX_SPECULATIVE_TOKENS + 1
                    )
                },
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
        sampling = {
            k: values.pop(k) for k in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
        }
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
