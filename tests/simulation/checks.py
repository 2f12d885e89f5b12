"""Checks of every worker after each of its steps: invariants I1, I2, I3, I7 and I8."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from draft_worker.messages import SendHints
from draft_worker.session import DraftSession
from outrider.engine.kv.kv_cache import Digest, KVSequence
from outrider.hint_service.session_names import session_id_of
from outrider.hints.hint_tree import ROOT_ID
from target_worker.scheduling.session import Session
from tests.simulation.actors import Draft, Target
from tests.simulation.judge import Judge
from tests.simulation.models import text_of
from tests.simulation.process import NOBODY

_ORPHAN_S: Final = 1.0
"""Time within which a healthy worker frees a session that has no caller any more."""
_TREE_NODES_MAX: Final = 512


class WorkerChecks:
    """Checks a worker's state after each step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, judge: Judge, wrong: Callable[[str], None]) -> None:
        self.loop, self._judge, self.wrong = loop, judge, wrong
        self.begun = judge.begun
        self._texts: dict[tuple[tuple[int, ...], int, int, bool], list[int]] = {}
        self._lengths: dict[str, int] = {}  # committed tokens of each session, as last seen
        # Tokens from the root to each node, as its draft worker means it.
        self._hints: dict[tuple[str, int, int], dict[int, tuple[int, ...]]] = {}
        self._owners: dict[Target | Draft, dict[Digest, str]] = {}  # tenants, by published blocks
        self._orphans: dict[object, None] = {}  # sessions that had no caller a moment ago
        self._waiting: dict[Target, set[str]] = {}  # sessions that waited after the last step

    def remember_hints(self, draft: Draft, sent: SendHints) -> None:
        """Records the path of each hint from the root, as its draft worker sent it."""
        paths = self._hints.setdefault((sent.session_id, sent.attachment, sent.base_len), {ROOT_ID: ()})
        for hint in sent.hints:
            paths[hint.node_id] = (*paths[hint.parent_id], hint.token_id)

    def check_target(self, target: Target) -> None:
        """Checks a target worker after one of its steps."""
        scheduler, limits = target.scheduler, target.shape.limits
        for session in scheduler._sessions.values():
            self._check_session(target, session)
            self._judge.on_step(target, session)
        # Those that were preempted wait beside as many as may wait. Sessions in the background are no reason to refuse
        # others, so each kind may fill all places.
        num_places = limits.max_num_seqs + limits.max_num_waiting
        num_background = scheduler.num_background
        num_most = max(num_background, len(scheduler._sessions) - num_background)
        if scheduler.num_running > limits.max_num_seqs or num_most > num_places:
            self.wrong(f"I7: {target.name} holds {scheduler.num_running} + {scheduler.num_waiting} sessions")
        self.check_blocks(target, [session.kv for session in scheduler._slots.running.values()])
        if len(scheduler._early._kept) > limits.max_early_sessions:
            self.wrong(f"I7: {target.name} keeps early events of {len(scheduler._early._kept)} sessions")

        self._check_callers(target, scheduler._sessions)
        self._check_tenants(target, scheduler._sessions)
        self._check_background(target)

    def check_draft(self, draft: Draft) -> None:
        """Checks a draft worker after one of its steps."""
        self.check_blocks(draft, [session.kv for session in draft.scheduler._sessions.values()])
        self._check_callers(draft, draft.scheduler._sessions)
        self._check_tenants(draft, draft.scheduler._sessions)

    def _check_background(self, target: Target) -> None:
        """Checks that no client waits for a slot, step after step, while a session in the background has one."""
        slots = target.scheduler._slots
        if not any(session.is_background for session in slots.running.values()):
            self._waiting.pop(target, None)
            return
        waiting = {
            session.session_id
            for session in slots.waiting
            if not session.is_background and not (slots.shares_prefix(session) and slots._is_prefix_under_way(session))
        }
        for session_id in waiting & self._waiting.get(target, set()):
            self.wrong(f"I10: {session_id} waits at {target.name} for a session in the background")
        self._waiting[target] = waiting

    def check_blocks(self, worker: Target | Draft, sequences: list[KVSequence]) -> None:
        """Every block has as many owners as there are sequences that hold it, and no block is lost."""
        try:
            worker.allocator.check_integrity(sequences)
        except AssertionError as error:
            self.wrong(f"I8: blocks of {worker.name}: {str(error)[:80]}")

    def _check_tenants(self, worker: Target | Draft, sessions: Mapping[str, Session | DraftSession]) -> None:
        """Checks that sessions share no published blocks with those of another tenant."""
        if not self._judge.has_tenants:
            return
        digests, owners = worker.allocator._digests, self._owners.setdefault(worker, {})
        for name, session in sessions.items():
            tenant = self._judge.tenant_of(session_id_of(name))
            for block_id in session.kv.block_ids:
                digest = digests.get(block_id)
                if digest is not None and owners.setdefault(digest, tenant) != tenant:
                    self.wrong(f"I9: {tenant} shares KV with {owners[digest]} at {worker.name}")
                    return

    def _check_callers(self, worker: Target | Draft, sessions: Mapping[str, object]) -> None:
        for session_id, session in sessions.items():
            if session_id not in worker.servicer._callers and session not in self._orphans:
                self._orphans[session] = None
                self.loop.call_later(_ORPHAN_S, self._check_orphan, worker, session_id, session, context=NOBODY)

    def _check_orphan(self, worker: Target | Draft, session_id: str, session: object) -> None:
        del self._orphans[session]
        if not worker.is_alive or worker.thread.stalled_s() > 0.0 or worker.is_frozen:
            return  # it frees nothing now, nor has to
        if worker.scheduler._sessions.get(session_id) is session and session_id not in worker.servicer._callers:
            self.wrong(f"I8: session {session_id} at {worker.name} belongs to nobody")

    def _check_session(self, target: Target, session: Session) -> None:
        prompt, seed = tuple(session.token_ids[: session.num_prompt_tokens]), session.sampling.seed or 0
        num = len(session.token_ids)
        if num > session.num_prompt_tokens:
            self.begun.add(prompt)
        key = prompt, seed, target.weights, session.grammar is not None
        whole = self._texts.get(key)
        if whole is None:
            length = target.shape.limits.max_model_len
            whole = list(text_of(prompt, length, seed=seed, weights=target.weights, has_grammar=key[3]))
            self._texts[key] = whole
        if session.token_ids != whole[:num]:
            self.wrong(f"I2: session {session.session_id} says {session.token_ids}, right is {whole[:num]}")
        before = self._lengths.get(session.session_id, 0)
        if session.committed_len < before:
            self.wrong(f"I1: session {session.session_id} went from {before} to {session.committed_len} tokens")
        self._lengths[session.session_id] = session.committed_len
        tree = session.tree
        if len(tree) > _TREE_NODES_MAX:
            self.wrong(f"I7: the tree of {session.session_id} has {len(tree)} nodes")
        named = session_id_of(session.session_id), tree._attachment, tree._base_len
        paths = self._hints.get(named, {})
        committed = tuple(session.token_ids[tree._base_len :])
        for node_id, node in tree._nodes.items():
            path = paths.get(node_id, ())
            is_live = path[: len(committed)] == committed and len(path) > len(committed)
            if not is_live or path[-1] != node.hint.token_id:
                self.wrong(f"I3: {session.session_id} keeps node {node_id} of {path} after {committed}")
                break
