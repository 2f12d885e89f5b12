"""Expected answers to a request: one, or one of several where seeds are drawn or weights differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from tests.simulation.models import text_of
from tests.simulation.scenario import Request
from tests.target_worker.fakes import END


def letters(token_ids: Iterable[int]) -> str:
    """The text of the tokens, one letter for each."""
    return "".join("abcde"[token_id] for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class Answer:
    """The expected answer for one of a request's choices."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str

    @classmethod
    def to(cls, request: Request, index: int, seed: int, weights: int) -> Self:
        whole = text_of(
            request.prompt,
            len(request.prompt) + request.max_tokens,
            seed=(seed + index) % (1 << 64) if seed else 0,
            weights=weights,
            has_grammar=bool(request.grammar),
        )
        output = whole[len(request.prompt) :]
        finish_reason = "length"
        if not request.ignore_eos and END in output:
            output, finish_reason = output[: output.index(END)], "stop"
        text = letters(output)
        found = text.find(request.stop) if request.stop else -1
        if found >= 0:
            return cls(output[: found + len(request.stop)], text[:found], "stop")
        return cls(output, text, finish_reason)


@lru_cache(maxsize=1024)
def answers_to(request: Request, index: int, seed: int, all_weights: Sequence[int]) -> tuple[Answer, ...]:
    """By each of the weights that there may be."""
    return tuple(Answer.to(request, index, seed, weights) for weights in all_weights)
