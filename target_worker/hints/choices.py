"""Choices between sources of hints, and what a step may count on. Pure, and given no hints.

Under rejection sampling a choice of what or how much is verified must not depend on a value that was drawn from a draft
and is not judged yet, nor on what follows from it: a path is short because its last token is a drawn stop token, or one
that the grammar forbids. Otherwise tokens come more often or more seldom than the target says them (invariant I4). So
the functions here get probabilities that are known before a value is drawn: the record of earlier steps, of whether
hints were there and accepted, for as many as a step could verify. A hint that is missing when the step begins is not
fed.

In greedy and coupled mode nothing is drawn, and the draft's confidence in the hints at hand may decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.concurrency.decayed_mean import DecayedMean
from outrider.hints.acceptance import DECAY, AcceptanceHistory, BlockAcceptance
from target_worker.hints.local_source import HintKind, LocalProposal, expected_tokens

CERTAIN_MATCH = 8
"""Match length in tokens from which no draft worker is waited for, and a local source may replace its hints."""


def may_compete(kind: HintKind) -> bool:
    """Whether a local source competes with drawn hints for their place. What a memory worker sends is there or not by
    how long the step waited, and that follows from how far the draft came: so it neither replaces what was drawn nor
    keeps another source from it."""
    return kind is not HintKind.MEMORY


def promises_more(local: LocalProposal, promised: Sequence[float]) -> bool:
    """Whether a local path stands instead of a draft worker's.

    promised: acceptance probability of each hint that the draft promises, given those before it.
    """
    return local.expected > expected_tokens(promised)


def may_replace(local: LocalProposal) -> bool:
    """Whether a local path may stand there at all. A short match promises more than it keeps; a head is asked only
    where it promises more."""
    return local.proposal.match_len >= CERTAIN_MATCH or (
        local.source is not None and local.source.kind is HintKind.HEAD
    )


def new_presence() -> BlockAcceptance:
    """A record of how often there was a drawn hint at a position of a path, given those before it; at first nearly
    always."""
    return BlockAcceptance(AcceptanceHistory(DecayedMean(DECAY, 3.8, 4.0)))


def observe_presence(presence: BlockAcceptance, num_matched: int, num_verified: int, *, was_all: bool) -> None:
    """Takes a judged path of a draft's hints. Only positions that were reached count: the others' hints are not judged,
    and may be verified later. was_all: whether the draft had no hint behind the verified ones."""
    num_there = min(num_matched + 1, num_verified)
    is_missed = was_all and num_matched == num_verified
    presence.observe(num_there, num_there + is_missed)


def drawn_chances(known: Sequence[float], record: Sequence[float]) -> list[float]:
    """Returns what a path promises that begins with hints of known acceptance probability, followed by drawn
    ones.

    record: acceptance rate of the draft's hints by position, given that those before were accepted, for as many as a
    step may feed. The result is the same for one drawn hint and for many.
    """
    return [*known, *record[len(known) :]]
