"""Optional features of a run, drawn from its seed: each with a small probability, and several at once."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Final


class Feature(StrEnum):
    ONE_WAY = "cuts go one way"
    NARROW = "few messages of a stream may lie unread"
    CHOICES = "n > 1"
    LOGPROBS = "log probabilities are asked for"
    GRAMMAR = "outputs follow a grammar"
    SLOW_GRAMMAR = "a grammar takes long to compile"
    KEYS = "tenants have keys and limits"
    RUSH = "many requests of several tenants at once"
    SHARES = "likewise, and each is owed its share of the slots"
    JOURNAL_LOSS = "Redis is emptied, and the journal is small"
    DRAWN_SEEDS = "the coordinator draws seeds (--seed-requests)"
    REUSED_ID = "a request id is used again, with another body or the same"
    LIAR = "a client says that its request has begun, which has not"
    WEIGHTS = "targets of two weights, and some change theirs"
    STALLED_READER = "a client stops reading, for a while or for good"
    POISON = "a prompt brings down the targets that generate for it"
    SKEWED_CLOCKS = "hosts' clocks on the wall differ"
    LONG_STOP = "a coordinator is stopped for longer than it lets its workers be silent"
    FULL_JOURNAL = "a tenant with a key has more streams than its share of the journal holds"
    BATCH = "some requests run in the background, as lines of batches do"
    BATCH_OF_MANY = "likewise, with more sequences than a replica has room for, beside others that it has room for"


_CHANCES: Final[dict[Feature, float]] = {
    Feature.ONE_WAY: 0.15,
    Feature.NARROW: 0.15,
    Feature.CHOICES: 0.12,
    Feature.LOGPROBS: 0.10,
    Feature.GRAMMAR: 0.08,
    Feature.SLOW_GRAMMAR: 0.03,
    Feature.KEYS: 0.12,
    Feature.RUSH: 0.03,
    Feature.SHARES: 0.03,
    Feature.JOURNAL_LOSS: 0.10,
    Feature.DRAWN_SEEDS: 0.10,
    Feature.REUSED_ID: 0.08,
    Feature.LIAR: 0.05,
    Feature.WEIGHTS: 0.08,
    Feature.STALLED_READER: 0.06,
    Feature.POISON: 0.06,
    Feature.SKEWED_CLOCKS: 0.15,
    Feature.LONG_STOP: 0.06,
    Feature.FULL_JOURNAL: 0.03,
    Feature.BATCH: 0.08,
    Feature.BATCH_OF_MANY: 0.04,
}

ENABLED: Final = frozenset(Feature)


def draw_features(seed: int, enabled: frozenset[Feature]) -> frozenset[Feature]:
    """One draw for each there is, so that enabling one changes no other."""
    chance = random.Random(f"{seed}/features")
    drawn = [feature for feature in Feature if chance.random() < _CHANCES[feature]]
    return frozenset(drawn) & enabled
