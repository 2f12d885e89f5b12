"""How fast a pair will decode, by batch and block length: measured times replayed over counted agreement. Pure.

Four ways are compared. *Plain*: one token a step and session. *Synchronous*: the draft writes γ hints while the target
waits, the target verifies them while the draft waits. *Ahead*: what Outrider does (design §6): the draft goes on
writing while the target verifies; what it wrote beyond an accepted block stays live, a rejection costs a restart unless
the token that the target said instead was among the alternatives that the draft had room to continue. *Bound*: as if
hints cost nothing and were always there.

All sessions of a batch are taken to be alike and in step. Each is replayed over the texts' ranks (`agreement`), so runs
of agreement are real ones. Times are milliseconds, rates tokens per millisecond and session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from outrider.cli.tune.agreement import NUM_RANKED, Ranks, committed_lengths, num_agreeing
from outrider.cli.tune.times import Overheads, StepTimes

NODES_PER_DRAFT_STEP: Final = 8
"""Of all sessions: what a draft worker feeds at a time."""
NODES_PER_HINT: Final = 2
"""Of them, for one hint on a session's primary path: the likeliest first, and the draft is unsure of its own guess
often enough for an alternative to be likelier than the next hint. With the demo pair and eight sessions it was half."""


@dataclass(frozen=True, slots=True)
class Pair:
    """All that is known of a pair."""

    target: StepTimes
    draft: StepTimes
    texts: tuple[Ranks, ...]
    overheads: Overheads = field(default_factory=Overheads)

    def draft_step_ms(self, num_sessions: int) -> float:
        """A draft worker's step always has as many nodes as it may: alternatives fill what primary paths leave."""
        overhead_ms = self.overheads.draft_ms(min(num_sessions, NODES_PER_DRAFT_STEP))
        return self.draft.at(NODES_PER_DRAFT_STEP) + overhead_ms

    def target_step_ms(self, batch: int, num_hints: float, *, has_hints: bool) -> float:
        """A whole step of `batch` sessions with so many hints each."""
        forward_ms = self.target.at(batch * (1.0 + num_hints), batch)
        return forward_ms + self.overheads.target_ms(batch, has_hints=has_hints)


@dataclass(frozen=True, slots=True)
class HintPace:
    """When hints come from a draft worker that serves `num_sessions` sessions."""

    first_ms: float  # from a commit that the draft had not foreseen to the first hint after it
    gap_ms: float  # from one hint to the next
    num_branches: int  # guesses at each position that the draft continues, 2 to 4
    link_ms: float  # one way

    @classmethod
    def of(cls, pair: Pair, num_sessions: int) -> HintPace:
        """A commit arrives in the middle of a draft step; restarts come first, in as many steps as they need."""
        step_ms, link_ms = pair.draft_step_ms(num_sessions), pair.overheads.link_ms
        nodes_each = NODES_PER_DRAFT_STEP / num_sessions
        first_ms = 2.0 * link_ms + 0.5 * step_ms + step_ms / min(1.0, nodes_each)
        gap_ms = step_ms / min(1.0, nodes_each / NODES_PER_HINT)
        return cls(first_ms, gap_ms, min(max(int(nodes_each), NODES_PER_HINT), NUM_RANKED), link_ms)


@dataclass(slots=True)
class _Tree:
    """The hints of one session: those for positions from `root` on, `num_ready` of them at `since_ms` already."""

    pace: HintPace
    root: int = 0
    since_ms: float = 0.0
    num_ready: int = 0

    def arrival_ms(self, position: int) -> float:
        """When the hint for a position is with the target."""
        index = position - self.root - self.num_ready
        return self.since_ms if index < 0 else self.since_ms + self.pace.first_ms + index * self.pace.gap_ms

    def num_arrived(self, position: int, now_ms: float, limit: int) -> int:
        """Hints for `position` and after it, at most `limit`."""
        count = 0
        while count < limit and self.arrival_ms(position + count) <= now_ms:
            count += 1
        return count

    def commit(self, ranks: Ranks, last: int, now_ms: float, *, is_rejection: bool) -> None:
        """The target has said position `last` by itself; drops the tree unless it had foreseen the token."""
        rank = ranks[last]
        # When the draft hears of it, a message later, the hint for that position, if any, was sent a message ago.
        is_written = is_rejection or self.arrival_ms(last) <= now_ms + 2.0 * self.pace.link_ms
        is_foreseen = is_written and rank < self.pace.num_branches
        if is_foreseen and rank == 0:
            return
        self.root, self.since_ms, self.num_ready = last + 1, now_ms, int(is_foreseen)


def plain_rate(pair: Pair, batch: int) -> float:
    """One token a step."""
    return 1.0 / pair.target_step_ms(batch, 0, has_hints=False)


def synchronous_rate(pair: Pair, batch: int, num_hints: int) -> float:
    """The draft's γ steps and two messages stand in line with the target's."""
    draft_ms = pair.draft.at(batch, batch) + pair.overheads.draft_ms(batch)
    step_ms = pair.target_step_ms(batch, num_hints, has_hints=True) + 2.0 * pair.overheads.link_ms
    return _mean_length(pair.texts, num_hints) / (step_ms + num_hints * draft_ms)


def bound_rate(pair: Pair, batch: int, num_hints: int) -> float:
    """Hints are free and always there; only verifying them costs."""
    return _mean_length(pair.texts, num_hints) / pair.target_step_ms(batch, num_hints, has_hints=False)


def _mean_length(texts: Sequence[Ranks], num_hints: int) -> float:
    lengths = [length for ranks in texts for length in committed_lengths(ranks, num_hints)]
    return sum(lengths) / len(lengths) if lengths else 0.0


def ahead_rate(
    pair: Pair, batch: int, num_hints: int, num_waited: int, sessions_per_draft: int | None = None
) -> float:
    """The draft goes on while the target verifies. A step waits until `num_waited` hints are there, 0 for none of them.

    `sessions_per_draft` is the batch where one draft worker serves the whole of it, as when it is left out.
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


def best_ahead(
    pair: Pair, batch: int, num_hints: int, sessions_per_draft: int | None = None
) -> tuple[float, int]:
    """The rate with the best wait, and that wait in hints. The worker finds it by measuring; here all are tried."""
    best, best_wait = -inf, 0
    for num_waited in sorted({0, 1, 2, 3, 4, 6, 8, num_hints}):
        if num_waited <= num_hints:
            rate = ahead_rate(pair, batch, num_hints, num_waited, sessions_per_draft)
            if rate > best:
                best, best_wait = rate, num_waited
    return best, best_wait
