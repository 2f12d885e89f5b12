"""A configuration of vLLM with which hints cannot work is refused in one line that says what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engines.vllm import cpu_sampler
from outrider.engines.vllm.checks import PROPOSER, check_configuration, check_version, settings_in
from outrider.engines.vllm.no_drafts import NoDrafts
from outrider.engines.vllm.requests import announcement, hint_limit, is_hintable
from outrider.errors import ConfigurationError
from outrider.sampling_params import SamplingParams


def config(**changes: Any) -> SimpleNamespace:
    made = SimpleNamespace(
        additional_config={"outrider": {"draft_workers": ["a:1"]}},
        speculative_config=SimpleNamespace(method="custom_class", model=PROPOSER),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        model_config=SimpleNamespace(is_encoder_decoder=False, is_diffusion=False),
        use_v2_model_runner=False,
        max_concurrent_batches=1,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_documented_configuration_passes() -> None:
    check_configuration(config())
    assert settings_in(config()) == {"draft_workers": ["a:1"]}
    check_version("0.32.1", {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_config": None}, "--speculative-config"),
        ({"speculative_config": SimpleNamespace(method="ngram", model=None)}, "--speculative-config"),
        ({"speculative_config": SimpleNamespace(method="custom_class", model="a.B")}, "--speculative-config"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "--no-async-scheduling"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"max_concurrent_batches": 2}, "--pipeline-parallel-size 1"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True, is_diffusion=False)}, "one token after the other"),
    ],
)
def test_another_is_refused_by_the_flag_to_change(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as refused:
        check_configuration(config(**changes))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("additional", [{}, None, {"outrider": 3}, {"other": {}}])
def test_without_settings_it_says_where_they_go(additional: Any) -> None:
    with pytest.raises(ConfigurationError, match="--additional-config"):
        settings_in(config(additional_config=additional))


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev"])
def test_a_release_that_was_not_tried_is_refused_unless_it_is_permitted(version: str) -> None:
    with pytest.raises(ConfigurationError, match=version):
        check_version(version, {})
    check_version(version, {"is_any_version": True})


def test_the_proposer_proposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sampler, "mend_sampler", lambda: None)  # there is no vLLM here
    proposer = NoDrafts(None)
    proposer.load_model("model")
    assert proposer.propose([[1, 2], []], None, None, slot_mappings=None) == [[], []]


def request(**changes: Any) -> SimpleNamespace:
    """A request with the attributes of vLLM's that are read."""
    params = SimpleNamespace(
        temperature=0.8, presence_penalty=0.5, frequency_penalty=0.0, repetition_penalty=1.1, min_tokens=2,
        ignore_eos=False, stop_token_ids=[5, 4], allowed_token_ids=None, extra_args=None,
    )  # fmt: skip
    made = SimpleNamespace(
        sampling_params=params, prompt_token_ids=[1, 2, 3], prompt_embeds=None, mm_features=[], resumable=False,
        num_tokens=3, num_prompt_tokens=3, max_tokens=9, cache_salt=None, lora_request=None,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(params if hasattr(params, name) else made, name, value)
    return made


def test_a_request_is_drafted_for_greedily_with_its_own_penalties() -> None:
    message = announcement(request(), "s", "t")
    sampling = SamplingParams.from_proto(message.sampling)
    assert sampling.temperature == 0.0
    assert (sampling.presence_penalty, sampling.max_tokens, sampling.min_tokens) == (0.5, 9, 2)
    assert sampling.repetition_penalty == pytest.approx(1.1)
    assert sampling.stop_token_ids == {4, 5}
    assert (message.session_id, message.hint_token, message.num_prompt_tokens) == ("s", "t", 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 50.0},
        {"repetition_penalty": 0.0},
        {"stop_token_ids": list(range(500))},
        {"min_tokens": 100},
        {"allowed_token_ids": list(range(100_000))},
        {"max_tokens": 0},
        {"cache_salt": "x" * 1000},
        {"lora_request": SimpleNamespace(lora_name="ü" * 200)},
    ],
)
def test_parameters_beyond_our_bounds_are_left_out(changes: dict[str, Any]) -> None:
    message = announcement(request(**changes), "s", "t")
    SamplingParams.from_proto(message.sampling)
    assert len(message.cache_salt) <= 128


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling_params": None},
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"mm_features": [object()]},
        {"resumable": True},
        {"num_tokens": 1 << 20},
    ],
)
def test_what_is_no_plain_text_has_no_hints(changes: dict[str, Any]) -> None:
    assert is_hintable(request())
    assert not is_hintable(request(**changes))


@pytest.mark.parametrize(
    ("value", "limit"),
    [(0, 0), (3, 3), (2.9, 2), (-5, 0), ("x", None), ([1], None), (float("nan"), None), (1e300, None)],
)
def test_a_request_may_say_how_many_hints_it_takes(value: Any, limit: int | None) -> None:
    assert hint_limit(request(extra_args={"outrider_hints": value})) == limit
    assert hint_limit(request()) is None
