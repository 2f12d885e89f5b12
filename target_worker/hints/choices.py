"""Choices between sources of hints, and what a step may count on. Pure, and given no hints.

Under rejection sampling a choice of what or how much is verified must not depend on a value that was drawn from a draft
and is not judged yet, nor on what follows from it: a path is short because its last token is a drawn stop token, or one
that the grammar forbids. Otherwise tokens come more often or more seldom than the target says them (invariant I4). So
the functions here get probabilities that are known before a value is drawn: the record of earlier steps, for as many
hints as a step could verify, whether or not they are there. A hint that is missing when the step begins is not fed.

In greedy and coupled mode nothing is drawn, and the draft's confidence in the hints at hand may decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from target_worker.hints.local_source import HintKind, LocalProposal, expected_tokens

CERTAIN_MATCH = 8
"""Match length in tokens from which no draft worker is waited for, and a local source may replace its hints."""


def takes_the_place(local: LocalProposal, promised: Sequence[float], *, are_drawn: bool) -> bool:
    """Whether a local path stands instead of a draft worker's.

    promised: acceptance probability of each hint that the draft promises, given those before it; empty without hints.
    are_drawn: whether they were drawn (rejection sampling).
    """
    return not promised or (_may_replace(local, are_drawn=are_drawn) and local.expected > expected_tokens(promised))


def _may_replace(local: LocalProposal, *, are_drawn: bool) -> bool:
    """A short match promises more than it keeps; a head is asked only where it promises more. What a memory worker
    sends is there or not by how long the step waited, and that follows from how far the draft came: so it does not
    replace what was drawn."""
    if local.source is None or (are_drawn and local.source.kind is HintKind.MEMORY):
        return False
    return local.proposal.match_len >= CERTAIN_MATCH or local.source.kind is HintKind.HEAD


def drawn_chances(known: Sequence[float], record: Sequence[float]) -> list[float]:
    """Returns what a path promises that begins with hints of known acceptance probability, followed by drawn
    ones.

    record: acceptance rate of the draft's hints by position, given that those before were accepted, for as many as a
    step may feed. The result is the same for one drawn hint and for many.
    """
    return [*known, *record[len(known) :]]
