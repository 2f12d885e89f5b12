"""Target models as functions of the sequence: of one set of weights or another, with or without a grammar.

The grammar is that no letter comes twice in a row. What it takes to compile one is virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from outrider.engine.sampling.randomness import mix
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.verification import Verdict
from outrider.grammar import GrammarViolation
from outrider.sampling_params import GrammarKind, GrammarSpec
from target_worker.messages import StepItem
from tests.simulation.clock import SimulatedLoop
from tests.target_worker.fakes import END, VOCAB_SIZE, FakeModel, _token, decided, digest_after, said_in, seed_of

NO_LETTER_TWICE = GrammarSpec(GrammarKind.REGEX, "no letter twice")
SLOW_TO_COMPILE = GrammarSpec(GrammarKind.REGEX, "no letter twice, slowly")
COMPILE_S = 7.0
READ_TOKEN_S = 0.002
"""A grammar's work for a token that is committed: for a step's no more than a loop may be held up."""


def _begin(seed: int, weights: int) -> int:
    value = mix(seed) if seed else 1
    return mix(value ^ (weights << 32)) if weights else value


def _next(digest: int, before: int | None) -> int:
    """`before`: the letter that may not come again."""
    token_id = _token(digest)
    return (token_id + 1) % END if token_id == before != END else token_id


@lru_cache(maxsize=4096)
def text_of(
    prompt: tuple[int, ...], max_len: int, *, seed: int = 0, weights: int = 0, has_grammar: bool = False
) -> tuple[int, ...]:
    """The prompt and its output by plain decoding, `max_len` tokens in all; an end of sequence does not end it."""
    text = list(prompt)
    digest = _begin(seed, weights)
    for token_id in text:
        digest = mix(digest ^ (token_id + 1))
    while len(text) < max_len:
        before = text[-1] if has_grammar and len(text) > len(prompt) else None
        text.append(_next(digest, before))
        digest = mix(digest ^ (text[-1] + 1))
    return tuple(text)


def logprob_of(token_id: int) -> float:
    """The log probability that the model reports for each token that it generates."""
    return -0.5 - token_id


class TargetModel(FakeModel):
    """Reads the prefix back from its cache, so that wrong KV gives wrong text."""

    def __init__(self, num_slots: int, weights: int) -> None:
        super().__init__(num_slots)
        self._weights = weights

    def decide(self, item: StepItem) -> Verdict:
        assert item.num_fed_on_path <= len(item.hints) <= item.num_fed_on_path + 1
        position = len(item.context.token_ids)
        text = [self.cache[slot] for slot in item.kv.slots(0, position)]
        has_grammar = item.context.grammar is not None
        begin = digest_after(_begin(seed_of(item.sampling, item.seed), self._weights), tuple(text))
        choices = []
        for said in said_in(item, self.cache):
            before = text[-1] if has_grammar and position > item.context.num_prompt_tokens else None
            if said:
                before = said[-1] if has_grammar else None
            choices.append(_next(digest_after(begin, tuple(said)), before))
        verdict = decided(item, choices)
        if item.sampling.num_logprobs is None:
            return verdict
        return replace(verdict, logprobs=[TokenLogprobs(logprob_of(token_id), 1) for token_id in verdict.token_ids])


class Grammar:
    """`GrammarState` for either of the grammars above."""

    is_complete = False
    refusal: str | None = None
    affords_hints = True

    def __init__(self, before: int | None = None, num_committed: int = 0) -> None:
        self._before = before
        self.num_committed = num_committed

    def is_complete_after(self, token_ids: Sequence[int]) -> bool:
        return False

    def fork(self) -> Grammar:
        return Grammar(self._before, self.num_committed)

    def advance(self, token_ids: Sequence[int]) -> None:
        cast(SimulatedLoop, asyncio.get_running_loop()).work(READ_TOKEN_S * len(token_ids))
        if self.num_valid(token_ids) < len(token_ids):
            raise GrammarViolation("a letter came twice")
        if token_ids:
            self._before = token_ids[-1]
            self.num_committed += len(token_ids)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        before = self._before
        for index, token_id in enumerate(token_ids):
            if token_id == before != END or not 0 <= token_id < VOCAB_SIZE:
                return index
            before = token_id
        return len(token_ids)

    def forced_after(self, token_ids: Sequence[int], limit: int) -> list[int]:
        return []

    def masks(self, continuations: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
        rows = np.ones((len(continuations), VOCAB_SIZE), dtype=np.bool_)
        for row, continuation in zip(rows, continuations, strict=True):
            before = continuation[-1] if continuation else self._before
            if before is not None and before != END:
                row[before] = False
        return rows


class GrammarCompiler:
    """`outrider.grammar.GrammarCompiler` for them, in simulated time."""

    def __init__(self, *, is_coordinator: bool = False) -> None:
        self._is_coordinator = is_coordinator

    async def check_async(self, spec: GrammarSpec, owner: str = "") -> None:
        await self.compile_async(spec)

    async def compile_async(self, spec: GrammarSpec, owner: str = "") -> Grammar:
        await asyncio.sleep(COMPILE_S if spec == SLOW_TO_COMPILE and not self._is_coordinator else 0.05)
        return Grammar()
