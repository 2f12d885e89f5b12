"""Scheduler of one draft worker: chooses the hint trees to grow next. Pure: events in, actions and steps out.

Each step feeds pending committed tokens (prefill) and the nodes most likely to be reached, over all sessions whose
target accepts hints. A session whose tree has reached its bounds pauses until commits arrive.

Sessions in the background, those of batches, are fed when no other can grow: they cost others no hints.

Sessions with a common prefix share KV blocks, as on a target worker: where a cache hit lets the target decode at once,
hints are ready at once, too.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from draft_worker.attachments import Attachments
from draft_worker.heads.arrived_features import ArrivedFeatures
from draft_worker.limits import DraftLimits
from draft_worker.messages import (
    Action,
    AttachSession,
    CommitReceived,
    Expansion,
    KVMove,
    SendHints,
    Step,
    StepItem,
    Subscribe,
)
from draft_worker.session import DraftSession
from draft_worker.step_items import Beyond, grow_item, prefill_item
from outrider.engine.chunk_cost import MIN_CHUNK_LEN, Chunk
from outrider.engine.kv.kv_cache import BlockAllocator, KVSequence
from outrider.engine.kv.prefix_cache import SequenceBlocks
from outrider.engine.prompt_queue import PromptQueue
from outrider.hints.confidence import calibrations
from outrider.hints.hint_tree import Hint

FEW_TOKENS = 4
"""Most pending tokens of all sessions together that a step without prompts may feed."""
PLAIN_DECAY = 0.9
"""Decay per step without prompts of the mean step time; it covers about the last ten."""


class DraftScheduler(Attachments[DraftSession]):
    """Schedules all sessions of one draft worker."""

    def __init__(
        self,
        limits: DraftLimits,
        allocator: BlockAllocator,
        vocab_size: int,
        *,
        new_features: Callable[[], ArrivedFeatures] | None = None,
        reads_masks: bool = False,
    ) -> None:
        """new_features: those of a new session, where the draft is a head. reads_masks: whether the draft model was
        trained for mask tokens."""
        # Every admitted session can grow to its full length, so that a step never runs out of blocks.
        entries_per_session = limits.max_model_len + limits.max_nodes
        num_affordable = (allocator.num_blocks - 1) // allocator.blocks_for(entries_per_session)
        super().__init__(min(limits.max_num_seqs, num_affordable), limits.max_model_len, vocab_size)
        self.limits = limits
        self._new_features = new_features
        self.allocator = allocator
        self._reads_masks = reads_masks and limits.num_mask_tokens > 0
        self._moves: list[KVMove] = []
        self.num_cached_tokens = 0  # total whose KV was in the cache already
        self._prompts = PromptQueue()
        self._plain_ms = 0.0  # mean time of a step without prompts; 0.0: unknown
        self._calibrations = calibrations()
        self._num_sessions_of: Counter[str] = Counter()  # by target address
        # Targets with sessions whose last message said that they accept no hints.
        self._paused_targets: set[str] = set()

    def _admit(self, event: AttachSession, now: float) -> DraftSession:
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
            SequenceBlocks(KVSequence(self.allocator), event.cache_salt),
            self.limits,
            self._calibrations.get(event.sampling.decoding_mode),
            attached_at=now,
            is_background=event.is_background,
            owner=event.owner,
        )
        self._num_sessions_of[session.target_address] += 1
        # While the target accepts no hints, a prefill would be wasted. When it does again, it says so at once.
        session.accepts_hints = session.target_address not in self._paused_targets
        session.features = None if self._new_features is None else self._new_features()
        return session

    def _forget(self, session: DraftSession) -> None:
        session.kv.free()
        self._num_sessions_of[session.target_address] -= 1
        if not self._num_sessions_of[session.target_address]:
            del self._num_sessions_of[session.target_address]
            self._paused_targets.discard(session.target_address)

    def _subscribe(self, session: DraftSession) -> Subscribe:
        features = session.features
        wish = ("", 0) if features is None else (features.head, features.num_known)
        return Subscribe(session.target_address, session.session_id, session.attachment, session.committed_len, *wish)

    def _resend(self, session: DraftSession) -> list[Action]:
        """Sends the whole tree again, below a root that refers to nothing sent before."""
        session.replant()
        return [self._send(session, session.live_hints())] if session.nodes else []

    def _judge(self, session: DraftSession, num_matched: int, num_verified: int) -> None:
        session.acceptance.observe(num_matched, num_verified)

    def _commit(
        self, session: DraftSession, event: CommitReceived, token_ids: list[int], now: float, *, is_resumed: bool
    ) -> list[Action]:
        (self._paused_targets.discard if event.accepts_hints else self._paused_targets.add)(session.target_address)
        is_gap = session.features is not None and not session.features.add(
            event.features_from, event.features, session.committed_len + len(token_ids) - 1
        )
        if token_ids:
            if not session.is_sampled:  # there every node travels with its distribution
                session.min_reach = session.floor.after_commit(now, self._plain_ms)
            move = session.commit(token_ids)
            if move is not None:
                self._moves.append(move)
        again: list[Action] = [self._subscribe(session)] if is_gap else []
        return again + (self._resend(session) if is_resumed else [])

    def next_step(self) -> Step | None:
        """Returns a step over everything that can grow, or None when nothing can."""
        growing = [session for session in self._sessions.values() if session.wants_to_grow()]
        # Those in the background only when there is nothing else to feed.
        items = self._items([session for session in growing if not session.is_background]) or self._items(growing)
        if not items:
            return None
        moves, self._moves = self._moves, []
        return Step(moves, items)

    def _items(self, growing: list[DraftSession]) -> list[StepItem]:
        """Chooses what a step feeds of these sessions."""
        budget = self.limits.max_num_batched_tokens
        items = []
        chosen = self._most_probable(growing)
        # A chain goes on as long as its next node is the likeliest of all that could be fed.
        likeliest_left = max((session.next_priority() for session in growing), default=0.0)
        chunks = self._chunks(growing, budget - sum(len(node_ids) for _, node_ids in chosen))
        beyond = Beyond(likeliest_left, self._num_masks(len(chosen) + len(chunks)))
        for session, node_ids in chosen:
            items.append(grow_item(session, node_ids, beyond))
        for session, num_tokens in chunks:
            items.append(prefill_item(session, num_tokens, beyond))
        return items

    def _num_masks(self, num_items: int) -> int | None:
        """Mask tokens for each session of a step: fewer where many share it, because every one is a row; None where the
        draft model does not know them."""
        share = self.limits.max_nodes_per_step // max(num_items, 1)
        return min(self.limits.num_mask_tokens, share) if self._reads_masks else None

    def _chunks(self, growing: list[DraftSession], budget: int) -> list[tuple[DraftSession, int]]:
        """Chooses the sessions whose pending tokens are fed, and how many of them, within `budget`.

        A session whose tree was discarded lacks only a few tokens and does not wait for prompts, which follow by turns.
        While other sessions have hint trees, prompts get as much time as a step without prompts takes: hints come at
        least half as often as before.
        """
        has_growing_trees = any(session.num_sent_nodes for session in growing)
        prompts, cost, budget_ms = self._prompts, self._prompts.cost, self._plain_ms
        chunks: list[tuple[DraftSession, int]] = []
        new: list[DraftSession] = []
        for session in self._prefilling(growing):
            if not session.num_sent_nodes or session.num_pending > MIN_CHUNK_LEN:
                new.append(session)
            elif num_tokens := min(session.num_pending, budget):
                chunks.append((session, num_tokens))
                budget -= num_tokens
        is_first = True
        for session in prompts.turns(new):
            chunk = Chunk(session.num_prefix, min(session.num_pending, budget))
            if has_growing_trees:
                chunk = cost.shorten(chunk, budget_ms, is_first=is_first)
                is_first = False
            if chunk.num_tokens <= 0:
                break
            chunks.append((session, chunk.num_tokens))
            prompts.charge(session.owner, chunk)
            budget_ms -= cost.ms(chunk)
            budget -= chunk.num_tokens
        return chunks

    def _prefilling(self, growing: list[DraftSession]) -> list[DraftSession]:
        """Sessions with pending tokens.

        A session whose prefix is being computed for another session waits for it, then shares the result.
        """
        pending = [session for session in growing if session.num_pending]
        begun = [session for session in pending if session.has_begun]
        for session in pending:
            if not session.has_begun and not self._is_prefix_under_way(session, begun):
                if self.limits.enable_prefix_caching:
                    self.num_cached_tokens += session.begin()
                session.has_begun = True
                begun.append(session)
        return begun

    def _is_prefix_under_way(self, session: DraftSession, begun: list[DraftSession]) -> bool:
        if not begun or not self.limits.enable_prefix_caching:
            return False
        return session.blocks.is_under_way(session.token_ids, [(other.blocks, other.token_ids) for other in begun])

    def _most_probable(self, growing: list[DraftSession]) -> list[tuple[DraftSession, list[int]]]:
        """Chooses up to `max_nodes_per_step` nodes to feed, those first that are most likely to be reached.

        The deeper a session's tree, the less likely its next node is, so that every session gets its share.
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

    def finish_step(self, step: Step, expansions: list[list[Expansion]], step_ms: float = 0.0) -> list[Action]:
        """Attaches the new nodes of a step and returns the hints to send.

        `expansions[i]` belongs to the nodes of `step.items[i]`, then to those of its chain that were fed. step_ms:
        measured time, chains included; 0.0 when not measured.
        """
        self._learn_cost(step, step_ms)
        actions: list[Action] = []
        for item, expanded in zip(step.items, expansions, strict=True):
            session = self._sessions[item.session_id]  # events are handled between steps only
            if item.paths is None:
                session.num_prefix += len(item.token_ids)
                session.num_corrected = session.num_prefix  # a head's pending tokens wait for the target's features
            elif item.corrected:
                session.num_corrected = item.corrected_end
            if self.limits.enable_prefix_caching:
                session.publish()  # only now: the step has done the moves of entries
            hints = session.expand(item.node_ids, expanded, item.num_masks)
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
            self._prompts.cost.observe(chunks, max(step_ms - self._plain_ms, 0.0))
        elif num_tokens <= FEW_TOKENS:
            self._plain_ms += (1.0 - PLAIN_DECAY if self._plain_ms else 1.0) * (step_ms - self._plain_ms)

    def _send(self, session: DraftSession, hints: list[Hint]) -> SendHints:
        return SendHints(
            session.target_address,
            session.session_id,
            session.attachment,
            session.base_len,
            hints,
            is_urgent=session.could_be_verified_next(hints),
        )
