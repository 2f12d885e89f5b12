"""Log probabilities in the formats of OpenAI and vLLM. Pure.

Two formats: completions have parallel lists and a dictionary per token, chats a list of objects. JSON has no -inf; it
is written as -9999.0. A token that is not whole characters is written as OpenAI does, `bytes:\\xe4`; in chats its bytes
stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from protos.outrider.v1 import common_pb2

LEAST_LOGPROB: Final = -9999.0


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TokenNames:
    """Names of tokens in an answer."""

    tokenizer: TokenBytes
    as_token_ids: bool = False  # "token_id:123" instead of text

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        content = self.tokenizer.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def bytes(self, token_id: int) -> list[int]:
        return list(self.tokenizer.token_bytes(token_id))


def to_json(logprob: float) -> float:
    """A log probability as a number that JSON has."""
    return logprob if LEAST_LOGPROB < logprob < math.inf else LEAST_LOGPROB


def mean_logprob(logprobs: Sequence[common_pb2.TokenLogprobs]) -> float:
    """Mean log probability per token; -inf for no tokens, so that an empty output is never the likeliest."""
    if not logprobs:
        return float("-inf")
    return sum(to_json(each.logprob) for each in logprobs) / len(logprobs)


def for_completion(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[common_pb2.TokenLogprobs | None],
    text_offsets: Sequence[int],
    num_top: int,
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; each argument has one entry per token, None for a prompt's first one.

    `text_offsets` are in characters of the choice's text. As in vLLM, `top_logprobs` has the token itself beside the
    `num_top` likeliest.
    """
    tops: list[dict[str, float] | None] = []
    for token_id, each in zip(token_ids, logprobs, strict=True):
        if each is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for other_id, logprob in (*_top(each, num_top), (token_id, each.logprob)):
            top.setdefault(names.name(other_id), to_json(logprob))
        tops.append(top)
    return {
        "tokens": [names.name(token_id) for token_id in token_ids],
        "token_logprobs": [None if each is None else to_json(each.logprob) for each in logprobs],
        "top_logprobs": tops,
        "text_offset": list(text_offsets),
    }


def for_chat(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[common_pb2.TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a chat's choice; the arguments have one entry per token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.name(token_id), "logprob": to_json(logprob), "bytes": names.bytes(token_id)}

    return {
        "content": [
            {
                **entry(token_id, each.logprob),
                "top_logprobs": [entry(other_id, logprob) for other_id, logprob in _top(each, num_top)],
            }
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ]
    }


def for_prompt(
    names: TokenNames,
    prompt_token_ids: Sequence[int],
    logprobs: Sequence[common_pb2.TokenLogprobs],
    num_top: int,
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then the entries of each token and the likeliest ones by id.

    `logprobs` are of prompt tokens 1 and after.
    """
    shown: list[dict[str, Any] | None] = [None]
    for token_id, each in zip(prompt_token_ids[1:], logprobs, strict=True):
        ranked = [(token_id, each.logprob, each.rank)]
        ranked += [
            (other_id, logprob, rank)
            for rank, (other_id, logprob) in enumerate(_top(each, num_top), 1)
            if other_id != token_id
        ]
        shown.append(
            {
                str(other_id): {
                    "logprob": to_json(logprob), "rank": rank, "decoded_token": names.text(other_id),
                }
                for other_id, logprob, rank in ranked
            }
        )  # fmt: skip
    return shown


def offsets(pieces: Iterable[str], start: int) -> tuple[list[int], int]:
    """Offsets of each token's text, in characters, and of the next one's. A token that completes no character begins
    where the character does."""
    found = []
    for piece in pieces:
        found.append(start)
        start += len(piece)
    return found, start


def _top(logprobs: common_pb2.TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))[:num_top]
