"""Whose hint trees grow next. Pure: events in, actions and steps out.

Each step feeds pending committed tokens (prefill) and, of all the sessions that are listened to, the nodes that are
most likely to be reached. A session whose tree is as large as its bounds allow rests until commits arrive.

Sessions whose texts begin alike share KV blocks, as they do on a target worker: where a hit lets the target decode at
once, hints are there at once as well.
"""

from __future__ import annotations

import heapq
from collections import Counter

from draft_worker.limits import DraftLimits
from draft_worker.messages import (
    Action,
    AttachmentAccepted,
    AttachmentEnded,
    AttachmentRefused,
    AttachSession,
    CommitHeard,
    DetachSession,
    Event,
    Expansion,
    KVMove,
    LinkOpened,
    SendHints,
    Step,
    Subscribe,
    Unsubscribe,
)
from draft_worker.session import DraftSession
from outrider.confidence import calibrations
from outrider.engine.chunk_cost import MIN_CHUNK_LEN, Chunk, ChunkCost
from outrider.engine.kv_cache import BlockAllocator, KVSequence
from outrider.engine.prefix_cache import TextBlocks
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.hint_tree import Hint
from outrider.turnover import Turnover, retry_after_s

FEW_TOKENS = 4
"""Pending tokens of all sessions together, which a step without prompts may feed as well."""
PLAIN_DECAY = 0.9
"""Per step without prompts: what one takes is that of the last ten or so."""


class DraftScheduler:
    """All sessions of one draft worker."""

    def __init__(self, limits: DraftLimits, allocator: BlockAllocator, vocab_size: int) -> None:
        self.limits = limits
        self.allocator = allocator
        self.vocab_size = vocab_size
        self._sessions: dict[str, DraftSession] = {}
        self._moves: list[KVMove] = []
        self.num_cached_tokens = 0  # so far, whose KV was there already
        self._chunk_cost = ChunkCost()
        self._plain_ms = 0.0  # of a step without prompts, smoothed; 0.0: unknown
        self._calibrations = calibrations()
        self._num_sessions_of: Counter[str] = Counter()  # by target address
        # Targets that did not listen when last heard of, of those with sessions.
        self._resting: set[str] = set()
        # Every admitted session can grow to its full length, so that a step never runs out of blocks.
        entries_per_session = limits.max_model_len + limits.max_nodes
        num_affordable = (allocator.num_blocks - 1) // allocator.blocks_for(entries_per_session)
        self.num_slots = min(limits.max_num_seqs, num_affordable)
        self._turnover = Turnover()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def progress(self, session_id: str) -> DraftSession | None:
        """For status reports; to be read, not changed."""
        return self._sessions.get(session_id)

    def check_room(self) -> None:
        """Raises Overloaded when no other session may come. May be asked from another thread."""
        if len(self._sessions) >= self.num_slots:
            wait_s = self._turnover.stay_s() / max(self.num_slots, 1)
            raise Overloaded(f"all {self.num_slots} draft slots are taken", retry_after_s(wait_s))

    def handle(self, event: Event, now: float = 0.0) -> list[Action]:
        """`now` is the shell's clock, seconds; only what a refusal says of when to come back depends on it."""
        match event:
            case AttachSession():
                return self._attach(event, now)
            case DetachSession():
                session = self._sessions.get(event.session_id)
                if session is not None and session.attachment == event.attachment:
                    self._remove(session, now)
                    return [Unsubscribe(session.target_address, session.session_id)]
            case LinkOpened():
                return self._introduce(event.target_address)
            case CommitHeard():
                return self._hear(event, now)
        return []

    def _attach(self, event: AttachSession, now: float) -> list[Action]:
        try:
            self._check(event)
        except OutriderError as error:
            return [AttachmentRefused(event.session_id, event.attachment, error)]
        session = DraftSession(
            event.session_id,
            event.attachment,
            event.target_address,
            list(event.token_ids),
            event.num_prompt_tokens or len(event.token_ids),
            event.sampling,
            event.speculation,
            event.grammar,
            event.seed,
            TextBlocks(KVSequence(self.allocator), event.cache_salt),
            self.limits,
            self._calibrations.get(event.sampling.decoding_mode),
            attached_at=now,
        )
        self._sessions[event.session_id] = session
        self._num_sessions_of[session.target_address] += 1
        # Should it not listen to any, a prefill would be for nothing; if it does to this one, it says so at once.
        session.is_listened_to = session.target_address not in self._resting
        return [
            AttachmentAccepted(event.session_id),
            Subscribe(event.target_address, event.session_id, event.attachment, len(session.token_ids)),
        ]

    def _check(self, event: AttachSession) -> None:
        """Raises what the session is refused with."""
        if event.session_id in self._sessions:
            raise InvalidRequest("session_id", f"session {event.session_id} is already attached here")
        if len(event.token_ids) >= self.limits.max_model_len:
            raise InvalidRequest(
                "token_ids",
                f"{len(event.token_ids)} tokens are more than this draft model can follow "
                f"(at most {self.limits.max_model_len - 1})",
            )
        if not all(0 <= token_id < self.vocab_size for token_id in event.token_ids):
            raise InvalidRequest("token_ids", f"a token id is outside the vocabulary of {self.vocab_size}")
        self.check_room()

    def _remove(self, session: DraftSession, now: float) -> None:
        del self._sessions[session.session_id]
        self._turnover.leave(now - session.attached_at)
        session.kv.free()
        self._num_sessions_of[session.target_address] -= 1
        if not self._num_sessions_of[session.target_address]:
            del self._num_sessions_of[session.target_address]
            self._resting.discard(session.target_address)

    def _introduce(self, target_address: str) -> list[Action]:
        actions: list[Action] = []
        for session in self._sessions.values():
            if session.target_address == target_address:
                actions.append(
                    Subscribe(target_address, session.session_id, session.attachment, len(session.token_ids))
                )
                actions += self._resend(session)
        return actions

    def _resend(self, session: DraftSession) -> list[Action]:
        """Says the whole tree anew, below a root that needs nothing said before."""
        session.replant()
        return [self._send(session, session.live_hints())] if session.nodes else []

    def _hear(self, event: CommitHeard, now: float) -> list[Action]:
        session = self._sessions.get(event.session_id)
        if session is None:
            return []
        if event.is_finished:
            self._remove(session, now)
            return [AttachmentEnded(session.session_id)]
        (self._resting.discard if event.is_listening else self._resting.add)(session.target_address)
        if 0 <= event.num_held <= event.num_tried and event.num_tried > 0:
            session.acceptance.observe(event.num_held, event.num_tried)
        known_len = len(session.token_ids)
        if event.from_len > known_len:  # something was missed: ask again from where we are
            return [Subscribe(session.target_address, session.session_id, session.attachment, known_len)]
        new_token_ids = event.token_ids[known_len - event.from_len :]
        if known_len + len(new_token_ids) >= self.limits.max_model_len or any(
            token_id >= self.vocab_size for token_id in new_token_ids
        ):
            # The text is longer than we can follow, or the target's output layer is wider than ours, and it said a
            # token that we cannot read.
            self._remove(session, now)
            return [
                Unsubscribe(session.target_address, session.session_id),
                AttachmentEnded(session.session_id),
            ]
        if new_token_ids:
            move = session.commit(new_token_ids)
            if move is not None:
                self._moves.append(move)
        is_heard_again = event.is_listening and not session.is_listened_to
        session.is_listened_to = event.is_listening
        return self._resend(session) if is_heard_again else []

    def next_step(self) -> Step | None:
        """A step over everything that can grow, or None when nothing can."""
        growing = [session for session in self._sessions.values() if session.wants_to_grow()]
        if not growing:
            return None
        budget = self.limits.max_num_batched_tokens
        items = []
        chosen = self._most_probable(growing)
        # A chain goes on for as long as its next node is the likeliest there is to be fed.
        likeliest_left = max((session.next_priority() for session in growing), default=0.0)
        for session, node_ids in chosen:
            items.append(session.grow_item(node_ids, likeliest_left))
            budget -= len(node_ids)
        for session, num_tokens in self._chunks(growing, budget):
            items.append(session.prefill_item(num_tokens, likeliest_left))
        if not items:
            return None
        moves, self._moves = self._moves, []
        return Step(moves, items)

    def _chunks(self, growing: list[DraftSession], budget: int) -> list[tuple[DraftSession, int]]:
        """Whose pending tokens to feed, and how many, within `budget`.

        Beside sessions that have trees, or whose tree was left just now, prompts get as much time as a step takes
        without them: hints come half as often as before at the least.
        """
        has_company = any(session.num_sent_nodes for session in growing)
        budget_ms = self._plain_ms
        chunks: list[tuple[DraftSession, int]] = []
        is_first = True
        for session in self._prefilling(growing):
            chunk = Chunk(session.num_prefix, min(session.num_pending, budget))
            was_left = session.num_sent_nodes > 0 and session.num_pending <= MIN_CHUNK_LEN
            if has_company and not was_left:
                chunk = self._chunk_cost.cut(chunk, budget_ms, is_first=is_first)
                budget_ms -= self._chunk_cost.ms(chunk)
                is_first = False
            if chunk.num_tokens <= 0:
                break
            chunks.append((session, chunk.num_tokens))
            budget -= chunk.num_tokens
        return chunks

    def _prefilling(self, growing: list[DraftSession]) -> list[DraftSession]:
        """Sessions with pending tokens, those with the fewest first: one whose tree was left lacks a few, and does not
        wait for long prompts.

        One whose text is just being computed for another session waits for that, and then shares the result.
        """
        pending = [session for session in growing if session.num_pending]
        begun = [session for session in pending if session.has_begun]
        for session in pending:
            if not session.has_begun and not self._is_prefix_under_way(session, begun):
                if self.limits.enable_prefix_caching:
                    self.num_cached_tokens += session.begin()
                session.has_begun = True
                begun.append(session)
        return sorted(begun, key=lambda session: session.num_pending)

    def _is_prefix_under_way(self, session: DraftSession, begun: list[DraftSession]) -> bool:
        if not begun or not self.limits.enable_prefix_caching:
            return False
        return session.blocks.is_under_way(
            session.token_ids, [(other.blocks, other.token_ids) for other in begun]
        )

    def _most_probable(self, growing: list[DraftSession]) -> list[tuple[DraftSession, list[int]]]:
        """Up to `max_nodes_per_step` nodes to feed, those first that are most likely to be reached.

        The deeper a session's tree has grown the less likely its next node is, so that every session has its turn.
        """
        chosen: dict[int, list[int]] = {}
        heap = [(-first, i) for i, session in enumerate(growing) if (first := session.next_priority()) > 0.0]
        heapq.heapify(heap)
        for _ in range(self.limits.max_nodes_per_step):
            if not heap:
                break
            i = heap[0][1]
            chosen.setdefault(i, []).append(growing[i].take_next())
            if (following := growing[i].next_priority()) > 0.0:
                heapq.heapreplace(heap, (-following, i))
            else:
                heapq.heappop(heap)
        return [(growing[i], node_ids) for i, node_ids in chosen.items()]

    def finish_step(
        self, step: Step, expansions: list[list[Expansion]], step_ms: float = 0.0
    ) -> list[Action]:
        """Attaches the new nodes; `expansions[i]` belongs to the nodes of `step.items[i]`, then to those of its chain
        that were fed. step_ms: that it took, chains included; 0.0 where nobody measures."""
        self._learn_cost(step, step_ms)
        actions: list[Action] = []
        for item, expanded in zip(step.items, expansions, strict=True):
            session = self._sessions[item.session_id]  # events are handled between steps only
            if item.paths is None:
                session.finish_prefill(len(item.token_ids))
            if self.limits.enable_prefix_caching:
                session.publish()  # here, since the moves of entries are done with the step
            hints = session.expand(item.node_ids, expanded)
            if hints:
                actions.append(self._send(session, hints))
        return actions

    def _learn_cost(self, step: Step, step_ms: float) -> None:
        chunks = [
            Chunk(self._sessions[item.session_id].num_prefix, len(item.token_ids))
            for item in step.items
            if item.paths is None
        ]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens >= MIN_CHUNK_LEN:
            self._chunk_cost.observe(chunks, max(step_ms - self._plain_ms, 0.0))
        elif num_tokens <= FEW_TOKENS:
            self._plain_ms += (1.0 - PLAIN_DECAY if self._plain_ms else 1.0) * (step_ms - self._plain_ms)

    def _send(self, session: DraftSession, hints: list[Hint]) -> SendHints:
        return SendHints(
            *(session.target_address, session.session_id, session.attachment, session.base_len, hints),
            is_urgent=session.could_be_verified_next(hints),
        )
