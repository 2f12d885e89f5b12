"""A session's parameters in vLLM's words, each of them honoured or refused by name. Pure; imports no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from outrider.engines.vllm.sessions import SessionArgs
from outrider.errors import InvalidRequest
from outrider.grammar.source import checked_text
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from target_worker.messages import StartSession

LEAST_TEMPERATURE: Final = 0.01
"""vLLM replaces a lower one, but for 0, by this."""
LLGUIDANCE: Final = "guidance"
"""The backend of vLLM's that a worker has unless it is told otherwise."""
_REMEDY: Final = "a target worker without --structured-outputs-config serves it"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Abilities of a running engine, as its flags made it."""

    has_speculation: bool = True  # vLLM verifies draft tokens, and then has neither min_p nor logit_bias
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20  # -1: any number
    grammar_backend: str = LLGUIDANCE
    is_json_compact: bool = False  # of another backend: no whitespace but after commas and colons


def vllm_parameters(event: StartSession, facts: EngineFacts) -> dict[str, Any]:
    """The keywords of vLLM's SamplingParams, `bad_words` as token ids. Raises InvalidRequest."""
    sampling = event.sampling
    _check(sampling, facts)
    num_committed = len(event.token_ids) - event.num_prompt_tokens
    speculation = event.speculation
    session = SessionArgs(
        event.session_id, num_committed, speculation.num_speculative_tokens, is_always=speculation.is_always
    )
    return {
        "temperature": sampling.temperature if sampling.top_p else 0.0,  # vLLM has no top_p of 0
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": _seed(event, num_committed),
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": dict(sampling.logit_bias) or None,
        "bad_words": [list(word) for word in sampling.bad_words],
        "allowed_token_ids": sorted(sampling.allowed_token_ids) or None,
        "logprobs": sampling.num_logprobs,
        "prompt_logprobs": sampling.num_prompt_logprobs,
        "structured_outputs": _grammar(sampling.grammar, facts),
        "extra_args": session.to_args(),
    }


def _seed(event: StartSession, num_committed: int) -> int | None:
    """vLLM's generator begins anew with a replay, and must not draw the numbers of the first tokens again."""
    seed = event.sampling.seed
    if seed is None or not num_committed:
        return seed
    return int.from_bytes(blake2b(f"{seed} {num_committed}".encode(), digest_size=8).digest(), "little")


def _check(sampling: SamplingParams, facts: EngineFacts) -> None:
    if sampling.typical_p != 1.0:
        raise InvalidRequest("typical_p", "vLLM, which serves this model, has no typical_p")
    if sampling.top_p and 0.0 < sampling.temperature < LEAST_TEMPERATURE:
        raise InvalidRequest(
            "temperature",
            f"temperature is {sampling.temperature:g}; permitted by vLLM, which serves this model: 0, and "
            f"{LEAST_TEMPERATURE:g} and more",
        )
    if facts.has_speculation and (sampling.min_p or sampling.logit_bias):
        name = "min_p" if sampling.min_p else "logit_bias"
        raise InvalidRequest(
            name,
            f"vLLM, which serves this model, has no {name} beside speculation; leave it out, or have a target worker "
            "started with --num-speculative-tokens 0",
        )
    mode = "processed_logprobs" if sampling.are_logprobs_processed else "raw_logprobs"
    if sampling.num_logprobs is not None and facts.logprobs_mode != mode:
        raise InvalidRequest(
            "logprobs_mode",
            f"vLLM, which serves this model, was started for {facts.logprobs_mode}; a target worker with "
            f"--logprobs-mode {mode} behind the -- serves these",
        )
    for name, number in (("logprobs", sampling.num_logprobs), ("prompt_logprobs", sampling.num_prompt_logprobs)):
        if number is not None and 0 <= facts.max_logprobs < number:
            raise InvalidRequest(name, f"{name} is {number}; permitted by vLLM's --max-logprobs: {facts.max_logprobs}")


def _grammar(grammar: GrammarSpec | None, facts: EngineFacts) -> dict[str, Any] | None:
    """The keywords of vLLM's StructuredOutputsParams. With llguidance it is the grammar that our own engine
    would compile, within the same bounds. Takes up to a tenth of a second."""
    if grammar is None:
        return None
    is_llguidance = facts.grammar_backend == LLGUIDANCE
    text = checked_text(grammar, tells_whitespace=is_llguidance)
    if grammar.kind is GrammarKind.REGEX:
        return {"regex": text}
    if is_llguidance:
        return {"json": text} if grammar.kind is GrammarKind.JSON_SCHEMA else {"grammar": _recognizable(text)}
    other = f"this model's vLLM compiles grammars by {facts.grammar_backend}"
    if grammar.kind is GrammarKind.LARK:
        raise InvalidRequest("grammar", f"{other}, which has another Lark than llguidance; {_REMEDY}")
    if grammar.any_whitespace == facts.is_json_compact:
        permits = "any whitespace" if grammar.any_whitespace else "whitespace only after commas and colons"
        raise InvalidRequest("grammar", f"{other}, which was not started for JSON with {permits}; {_REMEDY}")
    return {"json": text}


def _recognizable(lark: str) -> str:
    """By this directive vLLM tells llguidance's Lark from other grammars."""
    return lark if lark.lstrip().startswith("%llguidance") else f"%llguidance {{}}\n{lark}"
