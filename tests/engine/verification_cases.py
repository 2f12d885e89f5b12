"""Random steps for verification: sequences of every mode with every parameter, and hints that are often accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.sampling.logit_context import LogitContext
from outrider.engine.sampling.logit_edits import edits_of
from outrider.engine.sampling.sampling import coupled_keys, draft_distributions, keyed_scores, sample_draft
from outrider.engine.sampling.verification import Verdict, VerificationRequest, verify
from outrider.grammar import GrammarState
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.sampling_params import AcceptanceRule, DecodingMode, SamplingParams


class RandomMasks:
    """Stands in for a grammar: what may follow is drawn from the tokens before."""

    def __init__(self, vocab_size: int, share: float) -> None:
        self._vocab_size, self._share = vocab_size, share

    def masks(self, continuations: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
        rows = [np.random.default_rng([7, *each]).random(self._vocab_size) for each in continuations]
        return np.array(rows) < self._share


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence's part of a step."""

    logits: torch.Tensor  # float32 [num_rows, vocab_size]
    hints: list[Hint]
    params: SamplingParams
    seed: int
    text: LogitContext
    rule: AcceptanceRule

    def request(self, first_row: int = 0) -> VerificationRequest:
        edits = edits_of(self.params, self.text, self.logits.shape[-1])
        return VerificationRequest(first_row, self.text, self.hints, self.params, self.seed, self.rule, edits)


def verify_together(cases: Sequence[Case]) -> list[Verdict]:
    """The verdicts of one step."""
    requests, first_row = [], 0
    for case in cases:
        requests.append(case.request(first_row))
        first_row += len(case.logits)
    return verify(torch.cat([case.logits for case in cases]), requests)[0]


def verify_one(
    logits: torch.Tensor,
    hints: Sequence[Hint],
    params: SamplingParams,
    seed: int,
    text: LogitContext,
    rule: AcceptanceRule = AcceptanceRule.BLOCK,
) -> Verdict:
    """The verdict of a step of one sequence."""
    request = VerificationRequest(0, text, hints, params, seed, rule, edits_of(params, text, logits.shape[-1]))
    return verify(logits, [request])[0][0]


def coupled_choice(probs: torch.Tensor, seed: int, first_position: int) -> list[int]:
    """Row i's token for position `first_position + i` under the seed's noise.  # [num_rows, vocab_size]"""
    positions = range(first_position, first_position + len(probs))
    choices: list[int] = keyed_scores(probs, coupled_keys(seed, positions)).argmax(dim=-1).tolist()
    return choices


def random_case(luck: random.Random, vocab_size: int, **fixed: Any) -> Case:
    """A sequence with a few random parameters; `fixed` are parameters that it has in any case."""
    num_rows = luck.randint(1, 7)
    generator = torch.Generator().manual_seed(luck.getrandbits(32))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * luck.choice([0.3, 2.0, 6.0])
    if luck.random() < 0.3:  # equals, as bfloat16 has them
        logits = logits.bfloat16().float()
    params = replace(random_params(luck, vocab_size), **fixed)
    committed = [luck.randrange(vocab_size) for _ in range(luck.randint(1, 12))]
    num_prompt = luck.randint(1, len(committed))
    hints = _random_hints(luck, logits, params, num_rows - luck.randint(0, 1), generator)
    guesses = [hint.token_id for hint in hints]
    grammar = RandomMasks(vocab_size, luck.choice([0.05, 0.5, 0.9])) if luck.random() < 0.2 else None
    text = LogitContext(
        committed,
        num_prompt,
        [guesses[:row] for row in range(num_rows)],
        frozenset(luck.sample(range(vocab_size), 2)),
        cast("GrammarState | None", grammar),
    )
    return Case(logits, hints, params, luck.getrandbits(64), text, luck.choice(list(AcceptanceRule)))


def hinted_case(luck: random.Random, vocab_size: int, params: SamplingParams, num_fed: int) -> Case:
    """A sequence of 200 tokens, with so many hints fed and, where there are any, one more."""
    num_rows = num_fed + 1
    generator = torch.Generator().manual_seed(luck.getrandbits(32))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    drafted = torch.softmax(logits + 0.5 * torch.randn(logits.shape, generator=generator), dim=-1)
    hints = []
    for row, distribution in enumerate(draft_distributions(drafted, 6, 8) if num_fed else []):
        if params.decoding_mode is DecodingMode.REJECTION:
            token_id = sample_draft(distribution, luck.getrandbits(60), row)
            hints.append(Hint(row + 1, row, token_id, distribution))
        else:
            hints.append(Hint(row + 1, row, int(drafted[row].argmax())))
    guesses = [hint.token_id for hint in hints]
    committed = [luck.randrange(vocab_size) for _ in range(200)]
    text = LogitContext(committed, 100, [guesses[:row] for row in range(num_rows)], frozenset({1}))
    return Case(logits, hints, params, luck.getrandbits(64), text, AcceptanceRule.BLOCK)


def random_params(luck: random.Random, vocab_size: int) -> SamplingParams:
    """Each parameter is mostly idle, so that sequences of a step differ in what they ask for."""

    def sometimes(value: Any, idle: Any, chance: float = 0.25) -> Any:
        return value if luck.random() < chance else idle

    def some_ids(count: int) -> list[int]:
        return [luck.randrange(vocab_size) for _ in range(count)]

    temperature = luck.choice([0.0, 0.0, 1e-30, 0.4, 0.8, 1.0, 1.0, 1.7])
    return SamplingParams(
        temperature=temperature,
        seed=sometimes(luck.getrandbits(64), None, 0.4),
        top_k=sometimes(luck.choice([1, 2, 5, vocab_size, vocab_size + 9]), 0),
        top_p=sometimes(luck.choice([1e-6, 0.3, 0.9, 0.999]), 1.0),
        min_p=sometimes(luck.choice([0.01, 0.2, 1.0]), 0.0),
        typical_p=sometimes(luck.choice([1e-6, 0.5, 0.95]), 1.0),
        repetition_penalty=sometimes(luck.choice([1e-40, 0.7, 1.3, 10.0]), 1.0),
        presence_penalty=sometimes(luck.choice([-2.0, 0.3, 1.1]), 0.0),
        frequency_penalty=sometimes(luck.choice([-0.7, 0.3, 2.0]), 0.0),
        logit_bias=sometimes(tuple((t, luck.uniform(-9, 9)) for t in sorted({*some_ids(4)})), ()),
        bad_words=sometimes(tuple(tuple(some_ids(luck.randint(1, 2))) for _ in range(min(vocab_size // 2, 200))), ()),
        allowed_token_ids=sometimes(frozenset(some_ids(luck.choice([1, 3, vocab_size]))), frozenset(), 0.15),
        min_tokens=sometimes(luck.randint(1, 16), 0),
        num_logprobs=sometimes(luck.choice([0, 1, 5, 20]), None, 0.4),
        are_logprobs_processed=luck.random() < 0.5,
    )


def _random_hints(
    luck: random.Random,
    logits: torch.Tensor,
    params: SamplingParams,
    count: int,
    generator: torch.Generator,
) -> list[Hint]:
    """Guesses for the first `count` rows, of a draft that knows the target's logits more or less."""
    noise = torch.randn(logits.shape, generator=generator) * luck.choice([0.0, 0.1, 1.0])
    drafted = torch.softmax((logits + noise) / max(params.temperature, 0.1), dim=-1)
    sent = draft_distributions(drafted, luck.choice([1, 3, 6, 64]), luck.choice([4, 8, 16]))
    hints = []
    for row in range(count):
        distribution: DraftDistribution | None = sent[row]
        token_id = sample_draft(sent[row], luck.getrandbits(60), row)
        if params.decoding_mode is not DecodingMode.REJECTION or luck.random() < 0.2:
            distribution, token_id = None, int(drafted[row].argmax())
        hints.append(Hint(row + 1, row, token_id, distribution))
    return hints
