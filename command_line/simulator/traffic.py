"""Requests drawn from a fleet file, each with the target's tokens and the draft's candidates. Pure.

A request's number and the fleet's seed determine all of it, so that two fleets under the same traffic get the same
requests. Tokens are random bytes: only their agreement matters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from command_line.simulator.fleet import Fleet, RequestKind
from command_line.tune.agreement import NUM_RANKED
from outrider.hints.confidence import confidence_level

VOCAB_SIZE: Final = 1 << 8
"""Vocabulary size. Python caches numbers below 257, so millions of tokens take no extra memory."""
BESIDE: Final = (0.55, 0.24, 0.13, 0.08)
"""Probability that the draft's second, third ... candidate is the right one, if one of them is."""
SURE: Final = (0.97, 0.2)
"""Confidence of a knowing draft in its first candidate, if right and if wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One request's future, by output position."""

    token_ids: list[int]  # the target's tokens
    ranks: list[int]  # their rank among the draft's candidates, 0 for the first; beyond all of them: none
    levels: list[int]  # the draft's confidence in its first candidate (`outrider.hints.confidence`)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    number: int
    prompt: list[int]
    text: Text

    @property
    def num_output_tokens(self) -> int:
        return len(self.text.token_ids)


def draw(fleet: Fleet, number: int) -> Request:
    """Draws the `number`-th request."""
    chance = random.Random(f"{fleet.seed}/{number}")
    kind = chance.choices(fleet.kinds, [kind.share for kind in fleet.kinds])[0]
    prefix = random.Random(f"{fleet.seed}/prefix/{fleet.kinds.index(kind)}")
    prompt = _tokens(prefix, kind.shared_prefix)
    prompt += _tokens(chance, chance.randint(*kind.prompt_tokens) - kind.shared_prefix)
    length = chance.randint(*kind.output_tokens)
    ranks = _recorded(fleet, chance, length) if fleet.texts else _ranks(kind, chance, length)
    usual = confidence_level(kind.acceptance)
    levels = [confidence_level(SURE[rank > 0]) if chance.random() < kind.certainty else usual for rank in ranks]
    return Request(number, prompt, Text(_tokens(chance, length), ranks, levels))


def _tokens(chance: random.Random, count: int) -> list[int]:
    return list(chance.randbytes(count))


def _ranks(kind: RequestKind, chance: random.Random, length: int) -> list[int]:
    """Ranks as a Markov chain of right and wrong first candidates; the share of right ones is the kind's acceptance."""
    after_wrong = kind.acceptance * (1.0 - kind.streaks)
    after_right = after_wrong + kind.streaks
    is_right, ranks = chance.random() < kind.acceptance, []
    for _ in range(length):
        if is_right:
            ranks.append(0)
        elif chance.random() < kind.alternatives:
            ranks.append(chance.choices(range(1, len(BESIDE) + 1), BESIDE)[0])
        else:
            ranks.append(len(BESIDE) + 1)
        is_right = chance.random() < (after_right if is_right else after_wrong)
    return ranks


def _recorded(fleet: Fleet, chance: random.Random, length: int) -> list[int]:
    """Ranks from one of the recorded sequences, repeated if it is too short."""
    text = chance.choice(fleet.texts)
    repeated = text * -(-length // len(text))
    return [rank if rank < NUM_RANKED else len(BESIDE) + 1 for rank in repeated[:length]]
