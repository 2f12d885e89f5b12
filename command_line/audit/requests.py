"""Bodies of audit requests (plain, speculated, replayed from a prefix) and parsing of answers. Pure.

A recorded body is changed only where its answers could not be compared otherwise; every change is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from command_line.client import CHAT, COMPLETIONS, ApiError
from outrider.audit import Divergence, HintCounts, Run, TokenWeights
from outrider.errors import InvalidRequest

DEFAULT_SEED: Final = 20_250_101
NUM_TOP_LOGPROBS: Final = 20  # the server's maximum: speculation's token may be an unlikely one
_EXCERPT_CHARS: Final = 32

# Values that change nothing are not reported.
_DROPPED: Final[Mapping[str, tuple[Any, ...]]] = {
    "stream": (False,), "stream_options": (), "n": (1,), "best_of": (1,), "request_id": (),
}  # fmt: skip
# Fields of chats and of prompt inspection; not part of a bare prefix.
_NOT_OF_A_PREFIX: Final = frozenset({
    "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "max_completion_tokens", "top_logprobs", "echo", "prompt_logprobs", "suffix", "min_tokens", "response_format",
    "structured_outputs", "add_generation_prompt", "continue_final_message", "add_special_tokens", "functions",
    "function_call", "modalities", "audio", "prediction", "reasoning_effort", "web_search_options",
})  # fmt: skip


class ReplayWay(StrEnum):
    """How plain decoding is brought to the position of a divergence again."""

    PREFIX = "prefix"  # prompt and common output as the prompt, one token asked for
    PARTIAL = "partial"  # the original request, ended behind the position: some parameter counts its output
    WHOLE = "whole"  # the original request: its plain answer ended there


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """A request that is repeated in several ways."""

    name: str  # its source
    path: str
    body: dict[str, Any]  # without the fields that differ between the runs
    changes: tuple[str, ...]  # made to the recorded body

    @property
    def excerpt(self) -> str:
        """The end of the prompt on one line, if it is text."""
        said = self.body["messages"][-1:] if self.path == CHAT else [self.body["prompt"]]
        content = said[0].get("content") if said and isinstance(said[0], dict) else (said or [""])[0]
        text = " ".join(content.split()) if isinstance(content, str) else ""
        return text if len(text) <= _EXCERPT_CHARS else "…" + text[1 - _EXCERPT_CHARS :]


@dataclass(frozen=True, slots=True)
class Overrides:
    """Parameters from the command line. `fixed` replaces fields of a body; the seed only fills a gap."""

    fixed: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None


def read_bodies(lines: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """(name, body) per non-empty line of JSON. Raises InvalidRequest naming the line."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(None, f"line {number} is not valid JSON: {error}") from error
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise InvalidRequest(None, f"line {number} is not a request: it needs either prompt or messages")
        if "messages" in body and not isinstance(body["messages"], list):
            raise InvalidRequest(None, f"line {number}: messages must be a list")
        found.append((f"line {number}", body))
    return found


def audit_request(name: str, recorded: Mapping[str, Any], overrides: Overrides) -> AuditRequest:
    """The request in a form that can be audited, and the changes this took."""
    body, changes = dict(recorded), []
    for parameter, neutral in _DROPPED.items():
        value = body.pop(parameter, None)
        if value is not None and value not in neutral:
            changes.append(f"{parameter} dropped")
    path = CHAT if "messages" in body else COMPLETIONS
    for parameter, value in overrides.fixed.items():
        if parameter == "max_tokens" and body.get("max_completion_tokens") is not None:
            del body["max_completion_tokens"]
        if body.get(parameter) != value:
            changes.append(f"{parameter} set to {value}")
        body[parameter] = value
    temperature = body.get("temperature")  # the server's default is 1
    if (temperature is None or temperature) and body.get("seed") is None:
        body["seed"] = DEFAULT_SEED if overrides.seed is None else overrides.seed
        changes.append(f"seed set to {body['seed']} (sampled outputs without one differ by design)")
    if isinstance(body.get("speculation"), dict) and body["speculation"].get("enabled") is False:
        changes.append("speculation enabled")
    return AuditRequest(name, path, body, tuple(changes))


def run_body(request: AuditRequest, *, enabled: bool) -> dict[str, Any]:
    """The request's body with or without speculation; with it, its own speculation settings are kept.

    Speculation is forced even where the server finds that it does not pay, so that there is something to audit.
    """
    recorded = request.body.get("speculation") or {}
    speculation = {**recorded, "enabled": True, "always": True} if enabled else {"enabled": False}
    return {**request.body, "speculation": speculation, "return_token_ids": True}


def replay_way(request: AuditRequest, plain: Run, divergence: Divergence) -> ReplayWay:
    """A bare prefix is the cheapest way, and valid unless a parameter treats output differently from the prompt."""
    if divergence.plain_token_id is None:
        return ReplayWay.WHOLE
    return ReplayWay.PREFIX if can_replay_prefix(request, plain) else ReplayWay.PARTIAL


def can_show_the_end(request: AuditRequest, plain: Run) -> bool:
    """Whether a replay that goes on shows the token that ended the plain run."""
    return plain.finish_reason == "stop" and not request.body.get("stop") and can_replay_prefix(request, plain)


def can_replay_prefix(request: AuditRequest, plain: Run) -> bool:
    """Whether the next token stays the same when prompt and output together become the prompt.

    Not if a parameter counts output tokens or depends on where the output begins. Seeded noise is a function of the
    position in the whole sequence, and repetition_penalty and bad_words use all of it, so these are safe.
    """
    body = request.body
    response_format = body.get("response_format")
    is_grammar = isinstance(response_format, dict) and response_format.get("type") != "text"
    follows = ("presence_penalty", "frequency_penalty", "min_tokens", "structured_outputs", "tools")
    return bool(plain.prompt_token_ids) and not is_grammar and not any(body.get(name) for name in follows)


def replay_body(
    request: AuditRequest, plain: Run, position: int, way: ReplayWay, *, mode: str, goes_on: bool = False
) -> tuple[str, dict[str, Any]]:
    """(path, body) of a plain run to output position `position`, with log probabilities of `mode`: raw or processed.

    `goes_on`: end tokens are generated like others, which is the only way to see their log probabilities.
    """
    body = run_body(request, enabled=False)
    path = request.path
    if way is ReplayWay.PREFIX:
        path = COMPLETIONS
        body = {name: value for name, value in body.items() if name not in _NOT_OF_A_PREFIX}
        body |= {"prompt": [*plain.prompt_token_ids, *plain.token_ids[:position]], "max_tokens": 1}
    elif way is ReplayWay.PARTIAL:
        for name in ("echo", "prompt_logprobs", "max_completion_tokens"):
            body.pop(name, None)
        body["max_tokens"] = position + 1
        if body.get("min_tokens"):  # may not exceed max_tokens; every position up to ours applies it as before
            body["min_tokens"] = min(body["min_tokens"], position + 1)
    if goes_on:
        body["ignore_eos"] = True
        body.pop("stop_token_ids", None)
    if way is not ReplayWay.WHOLE:
        body |= {"logprobs_mode": mode, "return_tokens_as_token_ids": True}
        is_chat = path == CHAT
        body |= {"logprobs": True, "top_logprobs": NUM_TOP_LOGPROBS} if is_chat else {"logprobs": NUM_TOP_LOGPROBS}
    return path, body


def read_run(answer: Any) -> Run:
    """The only choice of an answer. Raises ApiError if it is not in Outrider's form."""
    try:
        choice = answer["choices"][0]
        token_ids = tuple(int(token_id) for token_id in choice["token_ids"])
        message = choice.get("message")
        prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or ()
        metrics = answer.get("metrics") or {}
        counts = metrics.get("speculative_decoding") or {}
        return Run(
            token_ids=token_ids,
            finish_reason=choice.get("finish_reason"),
            content=str(choice.get("text", "")) if message is None else _content(message),
            prompt_token_ids=tuple(int(token_id) for token_id in prompt),
            decoding_mode=str(metrics.get("decoding_mode") or ""),
            exactness=str(metrics.get("exactness") or ""),
            hints=HintCounts(
                num_draft_tokens=counts.get("num_draft_tokens") or 0,
                num_accepted_draft_tokens=counts.get("num_accepted_draft_tokens") or 0,
                num_spec_steps=counts.get("num_spec_steps") or 0,
            ),
            num_forced_tokens=counts.get("num_forced_tokens") or 0,
            weights=_weights(choice.get("logprobs")),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ApiError(
            f"the answer cannot be audited, {type(error).__name__}: {error}; is this an Outrider server that serves "
            "return_token_ids?"
        ) from error


def _content(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]  # their ids are random
    content = str(message.get("reasoning") or "") + str(message.get("content") or "")
    return content + json.dumps(calls, sort_keys=True) if calls else content


def _weights(logprobs: Mapping[str, Any] | None) -> tuple[TokenWeights, ...]:
    """Identity of the weights from a chat or a completion; empty if tokens are not written as ids."""
    if not logprobs:
        return ()
    rows: list[tuple[str, float | None, list[tuple[str, float]]]]
    if "content" in logprobs:
        rows = [
            (row["token"], row["logprob"], [(top["token"], top["logprob"]) for top in row["top_logprobs"]])
            for row in logprobs["content"]
        ]
    else:
        columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        rows = [(name, own, list((top or {}).items())) for name, own, top in zip(*columns, strict=True)]
    if not all(name.startswith("token_id:") for name, _, _ in rows):
        return ()
    return tuple(
        TokenWeights(_token_id(name), {_token_id(name): own, **{_token_id(other): at for other, at in tops}})
        for name, own, tops in rows
        if own is not None  # the first token of an echoed prompt
    )


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
