"""Predicted decoding speed by batch and block length: measured step times replayed over counted agreement. Pure.

Four modes are compared. *Plain*: one token per step and session. *Synchronous*: the draft generates γ hints while the
target waits, then the target verifies them while the draft waits. *Ahead*: Outrider's mode (design §6). The draft
continues while the target verifies. What it drafted beyond an accepted block stays live. A rejection costs a restart,
unless the recovered token was among the alternatives that the draft had time to continue. *Bound*: as if hints were
free and always present.

All sessions of a batch are assumed equal and in step. Each is replayed over the measured ranks (`agreement`), so runs
of agreement are real. Times are milliseconds, rates tokens per millisecond and session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from command_line.tune.agreement import NUM_RANKED, Ranks, committed_lengths, num_agreeing
from command_line.tune.times import Overheads, StepTimes

NODES_PER_DRAFT_STEP: Final = 8
"""Nodes that a draft worker computes in one step, over all sessions."""
NODES_PER_HINT: Final = 2
"""Nodes of a step per hint on a session's primary path. The draft expands likely nodes first, and is unsure of its
first candidate often enough that an alternative comes before the next hint. Measured with the demo pair and eight
sessions: 50 %."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Measurements of a pair of models."""

    target: StepTimes
    draft: StepTimes
    texts: tuple[Ranks, ...]
    overheads: Overheads = field(default_factory=Overheads)
    passes: tuple[float, ...] = ()
    """Mean forward passes of the draft until it has guessed 1, 2, ... tokens in a row; empty: one for each."""
    rows_per_pass: int = NODES_PER_HINT  # of one sequence
    num_chained: int = 0
    """Passes that follow in the same draft step, each with one more node of every sequence's primary path: a chain."""

    def draft_step_ms(self, num_sessions: int) -> float:
        """Time of a draft step. It always has as many nodes as allowed: alternatives fill what primary paths leave
        free."""
        overhead_ms = self.overheads.draft_ms(min(num_sessions, NODES_PER_DRAFT_STEP))
        chain_ms = self.num_chained * self.draft.at(min(num_sessions, NODES_PER_DRAFT_STEP))
        return self.draft.at(NODES_PER_DRAFT_STEP) + chain_ms + overhead_ms

    def target_step_ms(self, batch: int, num_hints: float, *, has_hints: bool) -> float:
        """Time of a whole target step over `batch` sessions with `num_hints` hints each."""
        forward_ms = self.target.at(batch * (1.0 + num_hints), batch)
        return forward_ms + self.overheads.target_ms(batch, has_hints=has_hints)


@dataclass(frozen=True, slots=True)
class HintPace:
    """Arrival times of hints from a draft worker that serves `num_sessions` sessions."""

    first_ms: float  # from an unforeseen commit to the first hint after it
    gap_ms: float  # from one pass to the next, and from one hint to the next where a pass guesses one
    num_branches: int  # candidates at each position that the draft continues, 2 to 4
    link_ms: float  # one way
    passes: tuple[float, ...] = ()  # see `Pair`
    num_at_once: int = 1  # hints of one draft step, where `passes` does not say

    @classmethod
    def of(cls, pair: Pair, num_sessions: int) -> HintPace:
        """The pace for a number of sessions. A commit arrives in the middle of a draft step on average. Restarts come
        first, in as many steps as they need."""
        step_ms, link_ms = pair.draft_step_ms(num_sessions), pair.overheads.link_ms
        nodes_each = NODES_PER_DRAFT_STEP / num_sessions
        first_ms = 2.0 * link_ms + 0.5 * step_ms + step_ms / min(1.0, nodes_each)
        gap_ms = step_ms / min(1.0, nodes_each / pair.rows_per_pass)
        num_branches = min(max(int(nodes_each), NODES_PER_HINT), NUM_RANKED)
        return cls(first_ms, gap_ms, num_branches, link_ms, pair.passes, 1 + pair.num_chained)

    def delay_ms(self, index: int) -> float:
        """Time from an unforeseen commit to the hint `index` positions behind the first one."""
        return self.first_ms + self._passes_before(index) * self.gap_ms

    def _passes_before(self, index: int) -> float:
        """Passes between the one that guesses the first hint and the one that guesses this one."""
        known = self.passes
        if not known:
            return index // self.num_at_once
        if index < len(known):
            return known[index] - known[0]
        slope = (known[-1] - known[0]) / (len(known) - 1) if len(known) > 1 else 1.0
        return known[-1] - known[0] + (index + 1 - len(known)) * slope


@dataclass(slots=True)
class _Tree:
    """Hints of one session for positions from `root` on; `num_ready` of them exist at `since_ms`."""

    pace: HintPace
    root: int = 0
    since_ms: float = 0.0
    num_ready: int = 0

    def arrival_ms(self, position: int) -> float:
        """Time at which the hint for a position reaches the target."""
        index = position - self.root - self.num_ready
        return self.since_ms if index < 0 else self.since_ms + self.pace.delay_ms(index)

    def num_arrived(self, position: int, now_ms: float, limit: int) -> int:
        """Number of hints present for `position` and after it, at most `limit`."""
        count = 0
        while count < limit and self.arrival_ms(position + count) <= now_ms:
            count += 1
        return count

    def commit(self, ranks: Ranks, last: int, now_ms: float, *, is_rejection: bool) -> None:
        """The target generated position `last` itself. Drops the tree unless the tree contains that token."""
        rank = ranks[last]
        # The draft hears of it one message later. It sent the hint for that position one message ago, if any.
        is_written = is_rejection or self.arrival_ms(last) <= now_ms + 2.0 * self.pace.link_ms
        is_foreseen = is_written and rank < self.pace.num_branches
        if is_foreseen and rank == 0:
            return
        self.root, self.since_ms, self.num_ready = last + 1, now_ms, int(is_foreseen)


def plain_rate(pair: Pair, batch: int) -> float:
    """Rate of plain decoding: one token a step."""
    return 1.0 / pair.target_step_ms(batch, 0, has_hints=False)


def synchronous_rate(pair: Pair, batch: int, num_hints: int) -> float:
    """Rate of synchronous drafting: the draft's γ steps, two messages and the target's step follow one another."""
    draft_ms = pair.draft.at(batch, batch) + pair.overheads.draft_ms(batch)
    step_ms = pair.target_step_ms(batch, num_hints, has_hints=True) + 2.0 * pair.overheads.link_ms
    return mean_length(pair.texts, num_hints) / (step_ms + num_hints * draft_ms)


def bound_rate(pair: Pair, batch: int, num_hints: int) -> float:
    """Rate with free hints that are always present: only verification costs."""
    return mean_length(pair.texts, num_hints) / pair.target_step_ms(batch, num_hints, has_hints=False)


def mean_length(texts: Sequence[Ranks], num_hints: int) -> float:
    """τ: tokens that a step commits on average; 0 where no sequence is long enough for a step."""
    lengths = [length for ranks in texts for length in committed_lengths(ranks, num_hints)]
    return sum(lengths) / len(lengths) if lengths else 0.0


def ahead_rate(pair: Pair, batch: int, num_hints: int, num_waited: int, sessions_per_draft: int | None = None) -> float:
    """Rate with drafting ahead. A step waits until `num_waited` hints are present; 0 does not wait.

    `sessions_per_draft` defaults to the batch: one draft worker serves all of it.
    """
    pace = HintPace.of(pair, sessions_per_draft or batch)
    costs = [pair.target_step_ms(batch, count, has_hints=True) for count in range(num_hints + 1)]
    num_tokens, total_ms = 0, 0.0
    for ranks in pair.texts:
        tree, position, now_ms = _Tree(pace), 0, 0.0
        while position + num_hints < len(ranks):
            if num_waited:
                now_ms = max(now_ms, tree.arrival_ms(position + min(num_waited, num_hints) - 1))
            count = tree.num_arrived(position, now_ms, num_hints)
            now_ms += costs[count]
            num_accepted = num_agreeing(ranks, position, count)
            tree.commit(ranks, position + num_accepted, now_ms, is_rejection=num_accepted < count)
            position += num_accepted + 1
        num_tokens += position
        total_ms += now_ms
    return num_tokens / total_ms if total_ms else 0.0


def best_ahead(pair: Pair, batch: int, num_hints: int, sessions_per_draft: int | None = None) -> tuple[float, int]:
    """Best rate over all waits, and that wait in hints. The worker finds it by measuring; here all are tried."""
    best, best_wait = -inf, 0
    for num_waited in sorted({0, 1, 2, 3, 4, 6, 8, num_hints}):
        if num_waited <= num_hints:
            rate = ahead_rate(pair, batch, num_hints, num_waited, sessions_per_draft)
            if rate > best:
                best, best_wait = rate, num_waited
    return best, best_wait
