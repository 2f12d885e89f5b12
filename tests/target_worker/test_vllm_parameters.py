"""A session's parameters reach vLLM in its own words, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.engines.announcements import SWITCH
from outrider.engines.vllm.sessions import SessionArgs
from outrider.errors import ConfigurationError, InvalidRequest
from outrider.grammar.source import WHITESPACE
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams, SpeculationSettings
from target_worker.messages import StartSession
from target_worker.vllm.options import VllmOptions, setting_given, split_words
from target_worker.vllm.parameters import EngineFacts, vllm_parameters

PLAIN = EngineFacts(has_speculation=False)


def session(num_committed: int = 0, speculation: SpeculationSettings | None = None, **sampling: Any) -> StartSession:
    settings = speculation or SpeculationSettings()
    return StartSession("s x", [1, 2, 3, *range(4, 4 + num_committed)], 3, SamplingParams(**sampling), settings, seed=0)


def told(facts: EngineFacts = EngineFacts(), num_committed: int = 0, **sampling: Any) -> dict[str, Any]:  # noqa: B008
    return vllm_parameters(session(num_committed, **sampling), facts)


def grammar(kind: GrammarKind, text: str, *, any_whitespace: bool = False) -> GrammarSpec:
    return GrammarSpec(kind, text, any_whitespace)


def test_every_parameter_is_passed_on() -> None:
    made = told(
        PLAIN,
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.2, logit_bias=((7, 1.5),), bad_words=((1, 2), (3,)), allowed_token_ids=frozenset({9, 8}),
        min_tokens=2, seed=11, max_tokens=30, stop_token_ids=frozenset({5, 4}), ignore_eos=True, num_logprobs=3,
        num_prompt_logprobs=0,
    )  # fmt: skip
    args = made.pop("extra_args")
    assert made == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.2, "seed": 11, "max_tokens": 30, "min_tokens": 2,
        "stop_token_ids": [4, 5], "ignore_eos": True, "logit_bias": {7: 1.5}, "bad_words": [[1, 2], [3]],
        "allowed_token_ids": [8, 9], "logprobs": 3, "prompt_logprobs": 0, "structured_outputs": None,
    }  # fmt: skip
    assert args == SessionArgs("s x").to_args()


def test_a_top_p_of_0_is_told_as_a_temperature_of_0() -> None:
    """vLLM refuses it."""
    for temperature in (1.0, 1e-9):
        made = told(temperature=temperature, top_p=0.0)
        assert (made["temperature"], made["top_p"]) == (0.0, 1.0)


def test_the_scheduler_is_told_the_session_its_output_so_far_and_its_limit() -> None:
    limited = session(2, SpeculationSettings(num_speculative_tokens=3))
    args = vllm_parameters(limited, EngineFacts())["extra_args"]
    assert args[SWITCH] == 3

    class Params:
        extra_args = args

    assert SessionArgs.of(Params) == SessionArgs("s x", 2)
    Params.extra_args = None
    assert SessionArgs.of(Params) is None
    assert SessionArgs.of(None) is None


def test_a_replay_draws_other_random_numbers_than_the_first_tokens_did() -> None:
    assert told(temperature=1.0, seed=11)["seed"] == 11
    later = [told(num_committed=number, temperature=1.0, seed=11)["seed"] for number in (1, 2)]
    assert len({11, *later}) == 3
    assert later[0] == told(num_committed=1, temperature=1.0, seed=11)["seed"], "the same for the same place"
    assert told(num_committed=1, temperature=1.0)["seed"] is None


@pytest.mark.parametrize(
    ("name", "facts", "sampling"),
    [
        ("typical_p", PLAIN, {"typical_p": 0.5}),
        ("temperature", PLAIN, {"temperature": 0.005}),
        ("min_p", EngineFacts(), {"min_p": 0.1}),
        ("logit_bias", EngineFacts(), {"logit_bias": ((1, 1.0),)}),
        ("logprobs_mode", EngineFacts(), {"num_logprobs": 1, "are_logprobs_processed": True}),
        ("logprobs_mode", EngineFacts(logprobs_mode="processed_logprobs"), {"num_logprobs": 1}),
        ("logprobs", EngineFacts(max_logprobs=5), {"num_logprobs": 6}),
        ("prompt_logprobs", EngineFacts(max_logprobs=5), {"num_prompt_logprobs": 6}),
    ],
)
def test_what_vllm_lacks_is_refused_by_name(name: str, facts: EngineFacts, sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="vLLM") as refusal:
        told(facts, **sampling)
    assert refusal.value.parameter == name


def test_without_speculation_there_is_more() -> None:
    assert told(PLAIN, min_p=0.1)["min_p"] == 0.1
    assert told(EngineFacts(max_logprobs=-1), num_logprobs=20)["logprobs"] == 20


def test_grammars_are_llguidances_with_our_whitespace_and_bounds() -> None:
    schema = told(grammar=grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'))["structured_outputs"]
    assert json.loads(schema["json"]) == {
        "type": "object",
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    }
    free = told(grammar=grammar(GrammarKind.JSON_SCHEMA, "{}", any_whitespace=True))["structured_outputs"]
    assert json.loads(free["json"])["x-guidance"]["whitespace_pattern"] == WHITESPACE
    assert told(grammar=grammar(GrammarKind.REGEX, "a+"))["structured_outputs"] == {"regex": "a+"}
    lark = told(grammar=grammar(GrammarKind.LARK, 'start: "a"'))["structured_outputs"]["grammar"]
    assert lark == '%llguidance {}\nstart: "a"', "vLLM knows by the directive that it is Lark"
    with pytest.raises(InvalidRequest, match="permitted"):
        told(grammar=grammar(GrammarKind.REGEX, r"\w" * 5000))


def test_another_compiler_of_grammars_refuses_what_it_would_take_otherwise() -> None:
    facts = EngineFacts(grammar_backend="xgrammar", is_json_compact=True)
    schema = grammar(GrammarKind.JSON_SCHEMA, "{}")
    assert told(facts, grammar=schema)["structured_outputs"] == {"json": "{}"}
    for refused in (
        grammar(GrammarKind.LARK, 'start: "a"'),
        grammar(GrammarKind.JSON_SCHEMA, "{}", any_whitespace=True),
    ):
        with pytest.raises(InvalidRequest, match="xgrammar"):
            told(facts, grammar=refused)


def test_words_behind_the_dashes_are_vllms() -> None:
    assert split_words(["--model", "m", "--", "--dtype", "float32", "--", "x"]) == (
        ["--model", "m"],
        ("--dtype", "float32", "--", "x"),
    )
    assert split_words(["--model", "m"]) == (["--model", "m"], ())
    assert setting_given(["--structured_outputs_config.backend=xgrammar"], "--structured-outputs-config")
    assert not setting_given(["--dtype", "float32"], "--structured-outputs-config")


@pytest.mark.parametrize("flag", ["--scheduler-cls=x", "--served_model_name", "--async-scheduling"])
def test_flags_that_the_worker_sets_itself_are_refused(flag: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be passed to vLLM"):
        VllmOptions(model="m", vllm_flags=(flag, "x"))


def test_vllm_drafts_itself_only_without_draft_workers() -> None:
    flags = ("--speculative-config", "{}")
    with pytest.raises(ConfigurationError, match="--num-speculative-tokens 0"):
        VllmOptions(model="m", vllm_flags=flags)
    assert not VllmOptions(model="m", num_speculative_tokens=0, vllm_flags=flags).takes_hints
