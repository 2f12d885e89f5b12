"""A message from a peer or a user becomes an event, nothing, or an InvalidRequest that names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.hint_tree import HintTree
from outrider.sampling_params import MAX_SPECULATIVE_TOKENS, DecodingMode
from protos.outrider.v1 import common_pb2, hints_pb2, target_pb2
from target_worker.messages import HintsArrived, SpeculationSettings
from target_worker.server import MAX_SESSION_ID, parse_generate, parse_hints, parse_speculation

VOCAB_SIZE = 50
UINT32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 60)


def nodes(**columns: Any) -> hints_pb2.HintNodes:
    return hints_pb2.HintNodes(session_id="a", attachment=1, base_len=3, **columns)


class TestHints:
    """I7: a bad message fails its session, never a loop."""

    @settings(max_examples=500, deadline=None, derandomize=True)
    @given(
        session_id=st.text(max_size=5),
        attachment=UINT32,
        base_len=UINT32,
        num_nodes=st.integers(0, 5),
        data=st.data(),
    )
    def test_columns_of_any_length_never_raise_and_never_give_nonsense(
        self, session_id: str, attachment: int, base_len: int, num_nodes: int, data: st.DataObject
    ) -> None:
        lengths = st.sampled_from([num_nodes, num_nodes, num_nodes, 0, num_nodes + 1])

        def column(values: st.SearchStrategy[int], of: st.SearchStrategy[int] = lengths) -> list[int]:
            length = data.draw(of)
            return data.draw(st.lists(values, min_size=length, max_size=length))

        message = hints_pb2.HintNodes(
            session_id=session_id,
            attachment=attachment,
            base_len=base_len,
            node_ids=column(SMALL | UINT32),
            parent_ids=column(SMALL | UINT32),
            token_ids=column(st.integers(0, VOCAB_SIZE)),
            support_sizes=column(st.integers(0, 3) | UINT32),
            support_token_ids=column(st.integers(0, VOCAB_SIZE + 1), st.integers(0, 8)),
            support_weights=column(
                st.sampled_from([0, 1, 32768, 65535, 65536, 2**32 - 1]), st.integers(0, 8)
            ),
        )
        event = parse_hints(message, VOCAB_SIZE, 1.0)
        if event is None:
            return
        assert isinstance(event, HintsArrived)
        assert len(event.hints) == len(message.node_ids)
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
            ([7, 5], [60000, 5535]),
            ([7, 7], [32768, 32768]),
            ([6, 5], [32768, 32768]),
            ([7, 50], [32768, 32768]),
        ],
        ids=["weights do not add up", "token twice", "hint not in it", "outside the vocabulary"],
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
            VOCAB_SIZE,
            1.0,
        )
        assert event is not None
        assert event.hints[0].distribution is None

    def test_a_token_outside_the_vocabulary_loses_its_own_node_only(self) -> None:
        message = nodes(node_ids=[1], parent_ids=[0], token_ids=[VOCAB_SIZE])
        event = parse_hints(message, VOCAB_SIZE, 1.0)
        assert event is not None
        assert event.hints == []

    @pytest.mark.parametrize("session_id", ["", "x" * (MAX_SESSION_ID + 1), "x" * 100_000])
    def test_a_session_id_beyond_its_bound_is_nonsense(self, session_id: str) -> None:
        """hints.proto: at most 64 characters; hints of unknown sessions are kept for a while."""
        message = nodes(node_ids=[1], parent_ids=[0], token_ids=[1])
        message.session_id = session_id
        assert parse_hints(message, VOCAB_SIZE, 1.0) is None


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


def test_speculation_is_taken_as_it_is_said() -> None:
    for enabled in (True, False):
        message = common_pb2.SpeculationParams(enabled=enabled, num_speculative_tokens=MAX_SPECULATIVE_TOKENS)
        assert parse_speculation(message) == SpeculationSettings(enabled, MAX_SPECULATIVE_TOKENS)
