"""Assigns batch slots and KV blocks: which sessions run, which wait, which are preempted. Pure.

A session gets a slot when the KV of its committed tokens fits beside what the running ones are about to need; from then
on it takes blocks as it grows. Among those of one priority, slots go to the owner with the smallest dominant share of
slots and KV blocks (Ghodsi et al., NSDI 2011), so that nobody's long prompts keep others waiting that hold less; among
equals to the one that has waited longest for its turn. One owner's go by arrival. When blocks run out, running sessions
take what they need for the next step in order of rank, which is priority, then arrival, and the one of last rank is
preempted. It returns its blocks and waits again at its old rank, before those that have not begun; its KV is
recomputed, as for a prompt, when there is room. Nothing makes room for a later rank, so the first session always
progresses and every session becomes the first.

A session in the background is preempted, too, when another one has no slot or blocks to begin: nobody waits for it.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.prompt_queue import OWNERS_MAX
from outrider.errors import InvalidRequest
from outrider.objective import Turn, by_due
from target_worker.limits import SchedulerLimits
from target_worker.messages import StartSession
from target_worker.scheduling.background_turns import not_in_background
from target_worker.scheduling.session import Session

by_rank = operator.attrgetter("rank")


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The sessions of a step in order of rank, each of which has room for a token, and KV blocks for hints."""

    decoding: list[Session]
    prefilling: list[Session]
    num_hint_blocks: int | None  # beyond these sessions' own needs; None: not scarce

    def without(self, session_ids: Collection[str]) -> StepRoom:
        """The same without some sessions."""
        if not session_ids:
            return self
        decoding = [session for session in self.decoding if session.session_id not in session_ids]
        prefilling = [session for session in self.prefilling if session.session_id not in session_ids]
        return replace(self, decoding=decoding, prefilling=prefilling)

    def limit_hints(self, num_fed: list[int]) -> list[int]:
        """Limits the hints that decoding sessions would feed to those that there are blocks for."""
        if self.num_hint_blocks is None:
            return num_fed
        num_left, limited = self.num_hint_blocks, []
        for session, wanted in zip(self.decoding, num_fed, strict=True):
            num_plain = session.kv.num_missing(1)
            fed = min(wanted, session.kv.room(num_left + num_plain) - 1)
            num_left -= session.kv.num_missing(1 + fed) - num_plain
            limited.append(fed)
        return limited


def turn_of(session: Session) -> Turn:
    """Decides when a session goes, among those of its tenant and priority that have not begun. One that has, and
    was preempted, keeps its place."""
    group = (session.rank[0], session.aim.owner, session.first_token_at is not None)
    return Turn(group, session.arrived_at, session.arrived_at + session.aim.objective.ttft_ms / 1e3)


class BatchSlots:
    """All sessions of one worker, `waiting` and `running`, both ordered by rank; ranks are unique."""

    def __init__(self, limits: SchedulerLimits, allocator: BlockAllocator) -> None:
        self._limits = limits
        self._allocator = allocator
        self.waiting: list[Session] = []
        self.running: dict[str, Session] = {}
        self.num_preemptions = 0
        self._is_short = False  # KV blocks, for the first waiting session
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}  # numbers of owners' last turns, in this order
        # Upper bounds of the blocks that a step needs, hints included.
        size = allocator.block_size
        self._most_per_session = 1 + (limits.num_local_tokens_max + size) // size
        self._most_for_prompts = limits.max_num_batched_tokens // size

    def check_fits(self, event: StartSession) -> None:
        """Raises InvalidRequest for a session that would not fit even alone."""
        longest = min(event.num_prompt_tokens + event.sampling.max_tokens, self._limits.max_model_len)
        if self._allocator.blocks_for(longest) > self._allocator.num_blocks - 1:
            capacity = (self._allocator.num_blocks - 1) * self._allocator.block_size
            raise InvalidRequest("max_tokens", f"prompt and output do not fit the KV cache of {capacity} tokens")

    def add(self, session: Session) -> None:
        """Adds a waiting session."""
        bisect.insort(self.waiting, session, key=by_rank)

    def remove(self, session: Session) -> None:
        """Removes a session, running or waiting."""
        if self.running.pop(session.session_id, None) is None:
            self.waiting.remove(session)

    def num_before(self, session: Session) -> int:
        """Number of waiting sessions that get a slot before this one, whoever else ends or comes: others' turns depend
        on the shares that they will have."""
        return sum(
            each.priority < session.priority
            or (each.first_token_at is not None and each.priority == session.priority)
            or (each.owner == session.owner and each.rank < session.rank)
            for each in self.waiting
        )

    def num_ends_before(self, num_before: int, num_tokens: int) -> int:
        """Number of running sessions that must end before one of `num_tokens` gets a slot behind `num_before`
        others. Those in the background make room without an end."""
        # Copies: the thread that announces the worker reads these, too.
        waiting, running = not_in_background(self.waiting), list(self.running.values())
        staying = not_in_background(running)
        if waiting and self._is_short:
            return num_before + 1
        num_ends = max(num_before + 1 - (self._limits.max_num_seqs - len(staying)), 0)
        num_free = self.num_free + sum(len(each.kv.block_ids) for each in running if each.is_background)
        num_wanted = self._allocator.blocks_for(num_tokens + self._limits.growth_tokens)
        is_short = staying and not waiting and num_wanted + self._num_due(staying) > num_free
        return max(num_ends, 1) if is_short else num_ends

    @property
    def num_background(self) -> int:
        """Sessions in the background, running or waiting. Safe to call from any thread."""
        return sum(session.is_background for session in [*list(self.running.values()), *list(self.waiting)])

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def promote(self, now: float) -> None:
        """Gives slots to waiting sessions as long as they fit: by turns of their owners, and among one owner's by when
        their first tokens are due.

        One whose prompt prefix is being computed for another session lets others pass, then shares the result.
        """
        self._is_short = False
        last = next(reversed(self.running.values()), None)
        if len(self.running) >= self._limits.max_num_seqs and last is not None and not last.is_background:
            return  # whoever waits, and in what order
        for session in self._by_turns(now):
            while not self._has_room(session):
                if not self._make_room_for(session):
                    return
            if self.shares_prefix(session):
                if self._is_prefix_under_way(session):
                    continue
                num_cached = session.blocks.adopt(session.token_ids)
                if session.first_step_at is None:
                    session.num_cached_tokens = min(num_cached, session.num_prompt_tokens)
            self._leave_queue(session, now)
            if session.first_step_at is None:
                session.first_step_at = now
            running = [*self.running.values(), session]
            self.running = {each.session_id: each for each in sorted(running, key=by_rank)}

    def _by_turns(self, now: float) -> Iterator[Session]:
        """The waiting sessions one by one. Whose turn comes next depends on the shares that owners have by then."""
        lines: dict[tuple[int, bool], dict[str, list[Session]]] = {}
        for session in by_due(self.waiting, [turn_of(each) for each in self.waiting], now):
            is_new = session.first_token_at is None
            by_owner = lines.setdefault((session.priority, is_new), {})
            by_owner.setdefault(session.owner if is_new else "", []).append(session)
        for (priority, _), by_owner in sorted(lines.items(), key=operator.itemgetter(0)):
            while by_owner:
                shares = self._dominant_shares(priority)
                owner = min(by_owner, key=lambda each: (shares.get(each, 0.0), self._last_turns.get(each, 0)))
                yield by_owner[owner].pop(0)
                if not by_owner[owner]:
                    del by_owner[owner]

    def _dominant_shares(self, priority: int) -> dict[str, float]:
        """Shares of the slots or the KV that owners have, whichever is greater, those of later priorities left out."""
        num_slots, num_tokens = Counter[str](), Counter[str]()
        for session in self.running.values():
            if session.priority <= priority:
                num_slots[session.owner] += 1
                num_tokens[session.owner] += session.committed_len
        num_entries = (self._allocator.num_blocks - 1) * self._allocator.block_size
        return {
            owner: max(num / self._limits.max_num_seqs, num_tokens[owner] / num_entries)
            for owner, num in num_slots.items()
        }

    def _leave_queue(self, session: Session, now: float) -> None:
        """Removes a session that gets a slot. One that goes first because it is due takes the rank of the first in its
        group, and those that it passes move to the ranks behind: so nobody else goes later for it."""
        turn = turn_of(session)
        if now < turn.due_at < math.inf:
            passed = [each for each in self.waiting if turn_of(each).group == turn.group and each.rank <= session.rank]
            ranks = [each.rank for each in passed]
            for each, rank in zip([session, *passed[:-1]], ranks, strict=True):
                each.rank = rank
        self.waiting.remove(session)
        self.waiting.sort(key=by_rank)
        self._num_turns += 1
        self._last_turns.pop(session.owner, None)
        self._last_turns[session.owner] = self._num_turns
        if len(self._last_turns) > OWNERS_MAX:
            del self._last_turns[next(iter(self._last_turns))]

    def _has_room(self, session: Session) -> bool:
        """Whether a waiting session gets a slot now."""
        if len(self.running) >= self._limits.max_num_seqs:
            return False
        num_due = self._num_due(self.running.values())
        self._is_short = bool(self.running) and num_due + self._num_wanted(session) > self.num_free
        return not self._is_short

    def _make_room_for(self, session: Session) -> bool:
        """Preempts a session in the background for one that is not, and could use its slot at once; False if there is
        none."""
        last = next(reversed(self.running.values()), None)
        if last is None or not last.is_background or session.is_background:
            return False
        if self.shares_prefix(session) and self._is_prefix_under_way(session):
            return False
        self._preempt(last)
        return True

    def _num_due(self, sessions: Iterable[Session]) -> int:
        """Blocks that these sessions still need for their committed tokens and some growth."""
        blocks_for, growth = self._allocator.blocks_for, self._limits.growth_tokens
        return sum(
            max(blocks_for(min(len(each.token_ids) + growth, each.max_len)) - len(each.kv.block_ids), 0)
            for each in sessions
        )

    def _num_wanted(self, session: Session) -> int:
        """Blocks that a waiting session needs; blocks held by others already cost nothing."""
        num_shared = session.blocks.num_shared(session.token_ids) if self.shares_prefix(session) else 0
        return self._num_due([session]) - num_shared

    def shares_prefix(self, session: Session) -> bool:
        """Whether a session takes part in prefix caching; log probabilities of a prompt need its forward pass."""
        return self._limits.enable_prefix_caching and not session.has_prompt_to_score

    def _is_prefix_under_way(self, session: Session) -> bool:
        """Whether a running session's prefill is about to compute the first block that this one lacks. That of a
        session in the background may be held back, so no other waits for it."""
        computing = [
            (other.blocks, other.token_ids)
            for other in self.running.values()
            if other.num_pending > 1
            and self.shares_prefix(other)
            and (session.is_background or not other.is_background)
        ]
        return bool(computing) and session.blocks.is_under_way(session.token_ids, computing)

    def make_room(self) -> StepRoom:
        """Secures a block for each session that lacks one; returns the sessions that the next step can feed.

        Prompts get what is left over by turns, and then hints, so these go before any session is preempted. A session
        that gets nothing and has none behind it keeps its blocks and skips the step: perhaps another ends before those
        in front need them.
        """
        running = list(self.running.values())
        decoding = [session for session in running if session.num_pending == 1]
        prefilling = [session for session in running if session.num_pending > 1]
        most = len(decoding) * self._most_per_session
        if prefilling:
            most += len(prefilling) + self._most_for_prompts
        if most <= self.num_free:
            return StepRoom(decoding, prefilling, None)
        return self._make_room_by_rank(running)

    def _make_room_by_rank(self, running: list[Session]) -> StepRoom:
        room = StepRoom([], [], 0)
        num_taken = 0
        while running:
            session = running.pop(0)
            while session.kv.room(self.num_free - num_taken) == 0 and running:
                self._preempt(running.pop())
            if session.kv.room(self.num_free - num_taken) > 0:
                (room.prefilling if session.num_pending > 1 else room.decoding).append(session)
                num_taken += session.kv.num_missing(1)
        num_plain = sum(session.kv.num_missing(1) for session in room.decoding)
        num_wanted = sum(session.kv.num_missing(session.num_pending) for session in room.prefilling)
        num_for_prompts = min(num_wanted, self._most_for_prompts + len(room.prefilling))
        return replace(room, num_hint_blocks=max(self.num_free - num_plain - num_for_prompts, 0))

    def _preempt(self, session: Session) -> None:
        del self.running[session.session_id]
        session.preempt()
        self.num_preemptions += 1
        self.add(session)
