"""Requests as they are drawn from a fleet file, each with what the target will say and what the draft will guess. Pure.

A request's number and the fleet's seed decide all of it, so that two fleets under the same traffic get the very same
requests. Tokens are random bytes: what matters is whether they agree.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from outrider.cli.tune.agreement import NUM_RANKED
from outrider.confidence import confidence_level
from outrider.simulate.fleet import Fleet, RequestKind

VOCAB_SIZE: Final = 1 << 8
"""So few, because Python keeps numbers below 257 once for all: millions of tokens take no memory of their own."""
BESIDE: Final = (0.55, 0.24, 0.13, 0.08)
"""How likely the draft's second, third ... guess is to be the right one, where one of them is."""
SURE: Final = (0.97, 0.2)
"""What a draft that knows gives its first guess, right and wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One request's future, by position in the output."""

    token_ids: list[int]  # what the target says
    ranks: list[int]  # which of the draft's guesses that is, 0 for the first; beyond all of them: none
    levels: list[int]  # how sure the draft is of its first guess (`outrider.confidence`)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    number: int
    prompt: list[int]
    text: Text

    @property
    def num_output_tokens(self) -> int:
        return len(self.text.token_ids)


def draw(fleet: Fleet, number: int) -> Request:
    """The `number`-th request."""
    chance = random.Random(f"{fleet.seed}/{number}")
    kind = chance.choices(fleet.kinds, [kind.share for kind in fleet.kinds])[0]
    prefix = random.Random(f"{fleet.seed}/prefix/{fleet.kinds.index(kind)}")
    prompt = _tokens(prefix, kind.shared_prefix)
    prompt += _tokens(chance, chance.randint(*kind.prompt_tokens) - kind.shared_prefix)
    length = chance.randint(*kind.output_tokens)
    ranks = _recorded(fleet, chance, length) if fleet.texts else _ranks(kind, chance, length)
    usual = confidence_level(kind.acceptance)
    levels = [
        confidence_level(SURE[rank > 0]) if chance.random() < kind.certainty else usual for rank in ranks
    ]
    return Request(number, prompt, Text(_tokens(chance, length), ranks, levels))


def _tokens(chance: random.Random, count: int) -> list[int]:
    return list(chance.randbytes(count))


def _ranks(kind: RequestKind, chance: random.Random, length: int) -> list[int]:
    """A Markov chain of right and wrong first guesses, the right share of which is the kind's acceptance."""
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
    """From one of the recorded texts, from its beginning, and again where it is too short."""
    text = chance.choice(fleet.texts)
    repeated = text * -(-length // len(text))
    return [rank if rank < NUM_RANKED else len(BESIDE) + 1 for rank in repeated[:length]]
