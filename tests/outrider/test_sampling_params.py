"""Every parameter is honoured or refused by name, never dropped or clamped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    DecodingMode,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
    SpeculationSettings,
)
from protos.outrider.v1 import common_pb2


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.001, 2.001, math.nan, math.inf, -math.inf, 1e-46]),
        ("top_p", [-1.0, 1e-46, 1.0001, math.nan, math.inf]),
        ("top_k", [-1, -(10**400)]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("max_tokens", [0, -3]),
        ("seed", [-1, 2**64, 10**400]),
        ("stop_token_ids", [frozenset(range(MAX_STOP_TOKEN_IDS + 1))]),
        ("typical_p", [0.0, 1.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0.0, -1.0, 10.1, math.nan]),
        ("logit_bias", [((1, 100.5),), ((1, math.nan),), tuple((i, 0.0) for i in range(MAX_LOGIT_BIAS + 1))]),
        ("bad_words", [((),), ((1,) * (MAX_BAD_WORD_TOKENS + 1),), ((1,),) * (MAX_BAD_WORDS + 1)]),
        ("allowed_token_ids", [frozenset(range(MAX_ALLOWED_TOKEN_IDS + 1))]),
        ("min_tokens", [-1, 17]),
        ("num_logprobs", [-1, 21]),
        ("num_prompt_logprobs", [-1, 21]),
    ],
)
def test_out_of_range_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.parameter == field
        assert "permitted" in caught.value.message


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1e-6},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"stop_token_ids": frozenset(range(MAX_STOP_TOKEN_IDS))},
        {"typical_p": 1.0, "presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 10.0},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(MAX_LOGIT_BIAS))},
        {"bad_words": ((1,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS},
        {"allowed_token_ids": frozenset(range(MAX_ALLOWED_TOKEN_IDS))},
        {"min_tokens": 16, "max_tokens": 16, "num_logprobs": 0, "num_prompt_logprobs": 20},
    ],
)
def test_bounds_themselves_are_permitted(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_decoding_mode_follows_from_temperature_and_seed() -> None:
    assert SamplingParams(temperature=0.0).decoding_mode is DecodingMode.GREEDY
    assert SamplingParams(temperature=0.0, seed=3).decoding_mode is DecodingMode.GREEDY
    assert SamplingParams(temperature=0.5).decoding_mode is DecodingMode.REJECTION
    assert SamplingParams(temperature=0.5, seed=0).decoding_mode is DecodingMode.COUPLED


def test_a_top_p_of_0_is_greedy_decoding() -> None:
    """OpenAI's range includes it. The likeliest token alone is left, so that neither chance nor a seed decides."""
    assert SamplingParams(top_p=0.0).decoding_mode is DecodingMode.GREEDY
    assert SamplingParams(temperature=2.0, top_p=0.0, seed=3).decoding_mode is DecodingMode.GREEDY
    assert SamplingParams(top_p=1e-6).decoding_mode is DecodingMode.REJECTION


UINT32 = st.integers(0, 2**32 - 1)


@settings(max_examples=100, derandomize=True)
@given(
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0, 1, width=32),
    top_k=st.integers(0, 2**32 - 1),
    min_p=st.floats(0, 1, width=32),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 2**31),
    stop_token_ids=st.frozensets(UINT32, max_size=MAX_STOP_TOKEN_IDS),
    ignore_eos=st.booleans(),
    typical_p=st.floats(0.001953125, 1, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    repetition_penalty=st.floats(0.001953125, 10, width=32),
    logit_bias=st.dictionaries(UINT32, st.floats(-100, 100, width=32), max_size=5).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    bad_words=st.lists(st.lists(UINT32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.frozensets(UINT32, max_size=5),
    min_tokens=st.integers(0, 1),
    num_logprobs=st.none() | st.integers(0, 20),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
    are_logprobs_processed=st.booleans(),
    grammar=st.none() | st.builds(GrammarSpec, st.sampled_from(GrammarKind), st.text(max_size=5), st.booleans()),
)
def test_nothing_is_lost_on_the_wire(**values: Any) -> None:
    params = SamplingParams(**values)
    message = common_pb2.SamplingParams.FromString(params.to_proto().SerializeToString())
    assert SamplingParams.from_proto(message) == params
    assert values.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


def test_an_empty_message_is_refused_instead_of_meaning_something() -> None:
    """Protobuf's zeros: max_tokens 0 is out of range."""
    with pytest.raises(InvalidRequest):
        SamplingParams.from_proto(common_pb2.SamplingParams())


def test_a_zero_that_an_earlier_release_left_out_is_still_a_zero() -> None:
    """Its coordinators send no temperature for greedy decoding, and nothing for speculation that is off."""
    message = SamplingParams(temperature=0).to_proto()
    message.ClearField("temperature")
    assert SamplingParams.from_proto(message) == SamplingParams(temperature=0)
    assert not SpeculationSettings.from_proto(common_pb2.SpeculationParams()).enabled


def test_an_unknown_mode_of_log_probabilities_is_refused() -> None:
    message = SamplingParams().to_proto()
    message.logprobs_mode = 77  # type: ignore[assignment]
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_proto(message)
    assert caught.value.parameter == "logprobs_mode"
