"""A configuration of SGLang with which hints cannot work is refused in one line that says what to change."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engines.hints_variable import VARIABLE
from outrider.engines.sglang.checks import (
    NUM_DRAFT_TOKENS,
    check_configuration,
    check_version,
    hint_settings,
    set_defaults,
    settings_in,
)
from outrider.engines.sglang.requests import announcement, is_sampled, stop_token_ids
from outrider.errors import ConfigurationError
from outrider.sampling_params import SamplingParams


def server_args(**changes: Any) -> SimpleNamespace:
    """SGLang's defaults."""
    made = SimpleNamespace(
        pp_size=1, enable_dp_attention=False, disaggregation_mode="null", enable_two_batch_overlap=False,
        enable_pdmux=False, device=None, speculative_num_draft_tokens=None, speculative_num_steps=None,
        speculative_eagle_topk=None, speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0,
        speculative_use_rejection_sampling=False, speculative_adaptive=False, speculative_draft_model_path=None,
        speculative_ngram_external_corpus_path=None, enable_mixed_chunk=True, max_running_requests=None,
        disable_overlap_schedule=False,
    )  # fmt: skip
    for name, value in changes.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


def test_the_documented_configuration_passes() -> None:
    made = server_args()
    check_configuration(made)
    set_defaults(made)
    assert (made.speculative_num_draft_tokens, made.speculative_num_steps) == (NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS - 1)
    assert (made.speculative_eagle_topk, made.enable_mixed_chunk, made.disable_overlap_schedule) == (1, False, False)
    check_configuration(made)


def test_what_is_given_stays() -> None:
    made = server_args(speculative_num_draft_tokens=5, max_running_requests=3, device="cpu")
    check_configuration(made)
    set_defaults(made)
    assert (made.speculative_num_draft_tokens, made.speculative_num_steps, made.max_running_requests) == (5, 4, 3)
    assert made.disable_overlap_schedule, "SGLang has no overlap with speculation on CPUs"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"device": "npu"}, "--device npu"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 0.5"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc 0.5"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_model_path": "x"}, VARIABLE),
        ({"speculative_ngram_external_corpus_path": "x"}, "--speculative-ngram-external-corpus-path"),
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens 1"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps 3"),
        ({"speculative_num_draft_tokens": 4, "speculative_num_steps": 4}, "--speculative-num-draft-tokens 4"),
    ],
)
def test_what_does_not_go_with_hints_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_configuration(server_args(**changes))
    assert named in refused.value.message
    assert "\n" not in refused.value.message


def test_another_release_is_refused_unless_any_is_permitted() -> None:
    check_version("0.5.23", {})
    with pytest.raises(ConfigurationError, match=r"0\.5\.24.*is_any_version.*OUTRIDER_HINTS"):
        check_version("0.5.24", {})
    check_version("0.5.24", {"is_any_version": True})


def test_settings_are_json_or_the_path_of_a_file(tmp_path: Path) -> None:
    given = {"draft_workers": ["a:1"], "is_any_version": True}
    file = tmp_path / "hints.json"
    file.write_text(json.dumps(given))
    assert settings_in({VARIABLE: json.dumps(given)}) == settings_in({VARIABLE: str(file)}) == given
    assert hint_settings(given).draft_workers == ("a:1",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "needs the environment variable OUTRIDER_HINTS"),
        ("", "needs the environment variable OUTRIDER_HINTS"),
        ("/no/such/file", "cannot be read"),
        ("{", "OUTRIDER_HINTS is not JSON"),
    ],
)
def test_settings_that_cannot_be_read_are_named(text: str | None, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        settings_in({} if text is None else {VARIABLE: text})


def test_a_file_without_an_object_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hints.json"
    file.write_text("[1]")
    with pytest.raises(ConfigurationError, match="an object is required"):
        settings_in({VARIABLE: str(file)})


@pytest.mark.parametrize("given", [{}, {"draft_workers": []}, {"draft_workers": ["a:1"], "unknown": 1}])
def test_wrong_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        hint_settings(given)


def request(**changes: Any) -> SimpleNamespace:
    params = SimpleNamespace(
        max_new_tokens=9, min_new_tokens=2, stop_token_ids={4, 5}, ignore_eos=False, temperature=1.0, top_k=1,
        presence_penalty=0.5, frequency_penalty=0.0, repetition_penalty=1.1,
    )  # fmt: skip
    made = SimpleNamespace(
        origin_input_ids_unpadded=array("q", [1, 2, 3]), eos_token_ids={7}, tokenizer=None, cache_salt=None,
        extra_key=None, sampling_params=params,
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


def test_prefixes_of_other_tenants_and_adapters_are_kept_apart() -> None:
    salts = [
        announcement(request(cache_salt=salt, extra_key=key), "s", "t").cache_salt
        for salt, key in [(None, None), ("a", None), (None, "a"), ("a", "a"), ("x" * 1000, None)]
    ]
    assert len(set(salts)) == len(salts)
    assert max(map(len, salts)) <= 128


def test_tokens_that_end_a_request_are_those_that_sglang_looks_at() -> None:
    tokenizer = SimpleNamespace(eos_token_id=8, additional_stop_token_ids={9})
    assert stop_token_ids(request()) == {4, 5, 7}
    assert stop_token_ids(request(tokenizer=tokenizer)) == {4, 5, 7, 8, 9}
    assert stop_token_ids(request(stop_token_ids=None, eos_token_ids=None)) == frozenset()
    assert stop_token_ids(request(ignore_eos=True)) == frozenset()


@pytest.mark.parametrize(("temperature", "top_k", "expected"), [(1.0, 1, False), (0.7, -1, True), (0.7, 1 << 30, True)])
def test_greedy_requests_are_told_from_sampled_ones(temperature: float, top_k: int, *, expected: bool) -> None:
    assert is_sampled(request(temperature=temperature, top_k=top_k)) == expected
