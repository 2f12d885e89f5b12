"""Decides when a draft head beside the target's model drafts, for which sessions and how far. Pure.

A head runs in series with the steps, so what it drafts must gain more than its time costs. A session for which a draft
worker's hints or another local source promise as much gets nothing from it. So where a draft worker is lost or late,
the head steps in before the very next step, and where the head does not pay either, the step goes without: every source
is judged by what its hints have gained.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.hints.acceptance import AcceptanceHistory
from outrider.hints.confidence import calibrations
from outrider.hints.step_cost import StepCost, StepLine
from outrider.sampling_params import DecodingMode
from target_worker.hints.head_hints import HeadHints
from target_worker.limits import SchedulerLimits
from target_worker.messages import HeadItem, HeadResult, HeadTurn, StartSession
from target_worker.scheduling.session import Session

MAX_ROWS = 256
"""Most committed tokens that the head runs in one turn: a long prompt takes several, with steps between them."""
NUM_MEASURED_TURNS = 6
"""Turns whose time is measured before times decide."""
MEASURED_DEPTH = 3
"""Tokens drafted in each of them."""
NUM_REFUSED = 128
"""Decisions against the head after which its time is measured anew: it may have been slow for a while."""
NUM_REFUSED_MAX = 2048
NUM_TRIAL_TURNS = 2


class DraftsLocally(Protocol):
    """A draft head that runs where the scheduler does."""

    @property
    def allocator(self) -> BlockAllocator | None:
        """The allocator of its KV blocks; None for a head without attention."""

    @property
    def max_depth(self) -> int:
        """Most tokens that it drafts in a row."""

    def draft(self, turn: HeadTurn) -> HeadResult:
        """Runs a turn. Extends the KV of its items by the committed tokens that it ran."""


class Asking(NamedTuple):
    """A session that the head could draft for. Tokens are those expected beyond the step's own."""

    now: float  # with the hints that are there
    drafted: Sequence[float]  # with a draft of 1, 2, ... tokens
    num_pending: int  # rows that the head runs first


class Depth(NamedTuple):
    """How far to draft, 0 for not at all, and the tokens per millisecond to expect of that."""

    num_tokens: int
    rate: float


def best_depth(
    asking: Sequence[Asking], num_others: int, others: float, num_fed: int, step: StepLine, head: StepLine
) -> Depth:
    """Returns how far to draft for all of `asking` to get the most tokens per millisecond.

    num_others: sessions of the same step that get nothing from the head; others: tokens expected of their hints;
    num_fed: hints that the step feeds without the head. step, head: cost of a step and of a pass of the head.
    """
    count = len(asking)
    tokens, rows = count + num_others + others, count + num_others + num_fed
    best, best_rate = 0, (tokens + sum(each.now for each in asking)) / step.step_ms(rows)
    # A long prompt is run once, so it is not this step's price.
    first_ms = head.step_ms(sum(min(each.num_pending, 1 + len(each.drafted)) for each in asking))
    for depth in range(1, 1 + max((len(each.drafted) for each in asking), default=0)):
        gained = sum(max(each.drafted[min(depth, len(each.drafted)) - 1], each.now) for each in asking)
        num_drafted = sum(min(depth, len(each.drafted)) for each in asking)
        spent_ms = step.step_ms(rows + num_drafted) + first_ms + (depth - 1) * head.step_ms(count)
        if (rate := (tokens + gained) / spent_ms) > best_rate:
            best, best_rate = depth, rate
    return Depth(best, best_rate)


class HeadTurns:
    """The turns of one worker's head, at most one before each step."""

    def __init__(self, head: DraftsLocally | None) -> None:
        """head: None where there is none."""
        self._head = head
        self._cost = StepCost()  # of a pass; the context is left out, one layer reads little of it
        self._num_measured = NUM_MEASURED_TURNS  # turns left that are made whatever they cost
        self._num_refused, self._retry_after = 0, NUM_REFUSED
        self._usual = {mode: AcceptanceHistory() for mode in DecodingMode}
        self._calibrations = calibrations()

    def hints(self, event: StartSession) -> HeadHints | None:
        """The head's hints of a new session; None where there is no head, or none are wanted."""
        if self._head is None or event.speculation.is_plain:
            return None
        mode = event.sampling.decoding_mode
        kv = None if self._head.allocator is None else KVSequence(self._head.allocator)
        return HeadHints(kv, self._calibrations.get(mode), self._usual[mode])

    def draft(self, sessions: Sequence[Session], line: StepLine, limits: SchedulerLimits) -> bool:
        """Lets the head draft for the next step of these sessions, where it pays; returns whether it did. line: cost
        of a step."""
        if self._head is None:
            return False
        asking: list[tuple[Session, HeadHints, Asking]] = []
        num_others, others, num_fed = 0, 0.0, 0
        for session in sessions:
            now = sum(session.hint_path(limits).gains())
            num_fed += session.path.num_feedable
            found = self._asking(session, now, limits)
            if found is None:
                num_others, others = num_others + 1, others + now
            else:
                asking.append((session, *found))
        worth = self._worth([each for *_, each in asking], num_others, others, num_fed, line)
        if worth is None:
            for _, hints, _ in asking:
                hints.pass_over()
            return False
        if not (items := self._items(asking)):
            return False
        self._run(HeadTurn(items, *worth), {session.session_id: hints for session, hints, _ in asking})
        return True

    def _run(self, turn: HeadTurn, hints: Mapping[str, HeadHints]) -> None:
        assert self._head is not None
        result = self._head.draft(turn)
        self._num_measured = max(self._num_measured - 1, 0)
        for rows, pass_ms in result.passes:
            self._cost.observe(rows, pass_ms)
        for item, drafted in zip(turn.items, result.drafts, strict=True):
            if item.context is not None:
                hints[item.session_id].take(item.end, drafted.token_ids, drafted.levels)

    def _asking(self, session: Session, now: float, limits: SchedulerLimits) -> tuple[HeadHints, Asking] | None:
        """The head's part in a session's next step; None where others promise as much."""
        head = session.head
        if self._head is None or head is None or session.num_pending != 1 or head.has_drafted(session.committed_len):
            return None
        limit = min(session.hint_limit(limits.num_speculative_tokens), self._head.max_depth)
        drafted = list(itertools.accumulate(itertools.accumulate(head.likely(max(limit, 0)), operator.mul)))
        if not drafted or drafted[-1] <= now:
            return None
        return head, Asking(now, drafted, head.num_pending(session.committed_len))

    def _worth(
        self, asking: Sequence[Asking], num_others: int, others: float, num_fed: int, line: StepLine
    ) -> tuple[float, float] | None:
        """The tokens that a further pass of the head, and each of its rows, must promise; None: it is not to draft."""
        if not asking:
            return None
        if self._num_measured:
            return 0.0, 0.0
        head = self._cost.line()
        depth, rate = best_depth(asking, num_others, others, num_fed, line, head)
        if depth:
            self._num_refused, self._retry_after = 0, NUM_REFUSED
            return rate * head.fixed_ms, rate * (head.token_ms + line.token_ms)
        self._num_refused += 1
        if self._num_refused >= self._retry_after:
            self._cost, self._num_measured, self._num_refused = StepCost(), NUM_TRIAL_TURNS, 0
            self._retry_after = min(2 * self._retry_after, NUM_REFUSED_MAX)
        return None

    def _items(self, asking: Sequence[tuple[Session, HeadHints, Asking]]) -> list[HeadItem]:
        """The parts of sessions in a turn, as far as rows and KV blocks of the head go."""
        assert self._head is not None
        allocator = self._head.allocator
        num_left, num_free = MAX_ROWS, 0 if allocator is None else allocator.num_free
        items: list[HeadItem] = []
        most = MEASURED_DEPTH if self._num_measured else self._head.max_depth
        for session, head, (_, drafted, _) in asking:
            depth = min(most, len(drafted))
            start = session.committed_len - head.num_pending(session.committed_len)
            end = min(session.committed_len, start + num_left)
            num_missing = 0 if head.kv is None else head.kv.num_missing(end - start + depth)
            if end == start or num_missing > num_free:
                continue
            num_left -= end - start
            num_free -= num_missing
            context = session.logit_context([], 1) if end == session.committed_len else None
            items.append(
                HeadItem(
                    session.session_id,
                    session.token_ids,
                    start,
                    end,
                    head.kv,
                    session.kv,
                    context,
                    session.sampling,
                    session.seed,
                    head.likely(depth),
                    head.calibration,
                )
            )
        return items
