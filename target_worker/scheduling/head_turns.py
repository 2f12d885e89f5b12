"""Decides when a draft head beside the target's model drafts, for which sessions and how far. Pure.

A head runs in series with the steps, so what it drafts must gain more than its time costs. Whether it does is measured,
as it is for draft workers (`outrider.hints.hint_intake`): the speed of steps with the head is compared with that of
steps without, in trials that become rare. A session for which a draft worker's hints or another local source promise as
much gets nothing from it. So where a draft worker is lost or late, the head steps in before the very next step, and
where the head does not pay either, the step goes without.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.hints.acceptance import AcceptanceHistory
from outrider.hints.confidence import calibrations
from outrider.hints.hint_intake import IntakePolicy, IntakeShares
from outrider.hints.step_cost import StepCost, StepLine
from outrider.sampling_params import DecodingMode
from target_worker.hints.head_hints import HeadHints
from target_worker.limits import SchedulerLimits
from target_worker.messages import HeadItem, HeadResult, HeadTurn, StartSession
from target_worker.scheduling.session import Session

MAX_ROWS = 256
"""Most committed tokens that the head runs in one turn: a long prompt takes several, with steps between them."""
HOPELESS = 0.5
"""Share of its price that a pass must promise for the head to be tried at all; beyond that speeds are measured."""
NUM_REFUSED = 128
"""Steps for which it was not tried after which its time is learned anew: it may have been slow for a while."""
WITH_HEAD, WITHOUT = IntakeShares(1.0, 1.0), IntakeShares(0.0, 0.0)


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


class _Asking(NamedTuple):
    """A session that the head could draft for, and the acceptance to expect of each of its hints."""

    session: Session
    hints: HeadHints
    records: list[float]


class HeadTurns:
    """The turns of one worker's head, at most one before each step. Before a step: `draft`; after it: `observe`."""

    def __init__(self, head: DraftsLocally | None, *, may_pause: bool) -> None:
        """head: None where there is none. may_pause: whether the head rests where it makes steps slower."""
        self._head, self._may_pause = head, may_pause
        self._cost = StepCost()  # of a pass; the context is left out, one layer reads little of it
        self._policy = IntakePolicy()
        self._num_refused = 0
        self._shares: IntakeShares | None = None  # of the step that comes; None where nothing was to be drafted
        self._usual = {mode: AcceptanceHistory() for mode in DecodingMode}
        self._calibrations = calibrations()

    def hints(self, event: StartSession) -> HeadHints | None:
        """The head's hints of a new session; None where there is no head, or none are wanted."""
        if self._head is None or event.speculation.is_plain:
            return None
        mode = event.sampling.decoding_mode
        kv = None if self._head.allocator is None else KVSequence(self._head.allocator)
        return HeadHints(kv, self._calibrations.get(mode), self._usual[mode])

    def draft(self, sessions: Sequence[Session], line: StepLine, limits: SchedulerLimits, usual_rate: float) -> bool:
        """Lets the head draft for the next step of these sessions, where it pays; returns whether it did.

        line: cost of a step; usual_rate: recent tokens per millisecond of the whole batch, 0.0 while unknown.
        """
        self._shares = None
        if self._head is None:
            return False
        found = [asking for session in sessions if (asking := self._asking(session, limits)) is not None]
        if not found:
            return False
        self._shares = WITHOUT
        if self._may_pause and not self._policy.may_accept_hints(len(sessions)):
            return False
        pass_worth, row_worth = self._worth(line, max(usual_rate, len(sessions) / line.step_ms(len(sessions))))
        for asking in found:
            if asking.records[0] < row_worth:
                asking.hints.pass_over()
        found = [asking for asking in found if asking.records[0] >= row_worth]
        if self._is_hopeless(found, pass_worth) or not (items := self._items(found)):
            return False
        self._shares = WITH_HEAD
        self._run(HeadTurn(items, pass_worth, row_worth), {each.session.session_id: each.hints for each in found})
        return True

    def observe(self, num_sessions: int, num_fed: int, num_committed: int, num_context: int, whole_ms: float) -> None:
        """Takes the time of a step that only decoded, from the end of the step before it: tokens fed and committed over
        all sessions, tokens in the KV, milliseconds."""
        if self._shares is not None:
            self._policy.observe(num_sessions, num_fed, num_committed, num_context, whole_ms, self._shares)

    def _run(self, turn: HeadTurn, hints: dict[str, HeadHints]) -> None:
        assert self._head is not None
        result = self._head.draft(turn)
        for rows, pass_ms in result.passes:
            self._cost.observe(rows, pass_ms)
        for item, drafted in zip(turn.items, result.drafts, strict=True):
            if item.context is not None:
                hints[item.session_id].take(item.end, drafted.token_ids, drafted.levels)

    def _asking(self, session: Session, limits: SchedulerLimits) -> _Asking | None:
        """The head's part in a session's next step; None where others promise as much."""
        hints = session.head
        if self._head is None or hints is None or session.num_pending != 1:
            return None
        if hints.has_drafted(session.committed_len):
            return None
        limit = min(session.hint_limit(limits.num_speculative_tokens), self._head.max_depth)
        records = hints.likely(max(limit, 0))
        promised = sum(itertools.accumulate(records, operator.mul))
        if promised <= session.hint_path(limits).expected:
            return None
        return _Asking(session, hints, records)

    def _worth(self, line: StepLine, rate: float) -> tuple[float, float]:
        """The tokens that a further pass of the head, and each of its rows, must promise at `rate` tokens a
        millisecond; nothing while the cost of a pass is unknown."""
        if self._cost.coefficients is None:
            return 0.0, 0.0
        head = self._cost.line()
        return rate * head.fixed_ms, rate * (head.token_ms + line.token_ms)

    def _is_hopeless(self, found: Sequence[_Asking], pass_worth: float) -> bool:
        """Whether the first pass costs so much that the head is not even tried."""
        if sum(asking.records[0] for asking in found) >= HOPELESS * pass_worth:
            return False
        self._num_refused += 1
        if self._num_refused >= NUM_REFUSED:
            self._cost, self._num_refused = StepCost(), 0
        return True

    def _items(self, found: Sequence[_Asking]) -> list[HeadItem]:
        """The parts of sessions in a turn, as far as rows and KV blocks of the head go."""
        assert self._head is not None
        allocator = self._head.allocator
        num_left, num_free = MAX_ROWS, 0 if allocator is None else allocator.num_free
        items: list[HeadItem] = []
        for session, hints, records in found:
            start = session.committed_len - hints.num_pending(session.committed_len)
            end = min(session.committed_len, start + num_left)
            num_missing = 0 if hints.kv is None else hints.kv.num_missing(end - start + len(records))
            if end == start or num_missing > num_free:
                continue
            num_left -= end - start
            num_free -= num_missing
            context = session.logit_context([], 1) if end == session.committed_len else None
            items.append(
                HeadItem(
                    *(session.session_id, session.token_ids, start, end, hints.kv, session.kv),
                    *(context, session.sampling, session.seed, records, hints.calibration),
                )
            )
        return items
