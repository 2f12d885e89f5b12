"""A target worker and a draft worker: their real schedulers, on synthetic models, in virtual time.

As in `outrider.worker.model_thread`, events are handled between steps. A draft's chain ends when events arrive
(`draft_worker.runner`), and hints that the target's next step could not verify are batched for a moment
(`draft_worker.links`). The cost of receiving messages is part of the steps' costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from command_line.simulator.clock import Clock, Link
from command_line.simulator.fleet import BLOCK_SIZE, MS_PER_S, Fleet
from command_line.simulator.models import Growth, verdict
from command_line.simulator.traffic import VOCAB_SIZE, Text
from draft_worker.messages import Action as DraftAction
from draft_worker.messages import (
    AttachmentEnded,
    AttachmentRefused,
    CommitReceived,
    SendHints,
    Subscribe,
    Unsubscribe,
)
from draft_worker.messages import Step as DraftStep
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from target_worker.messages import (
    Action,
    CommitPublished,
    Event,
    HintsArrived,
    Step,
    StepResult,
    SubscribeDraft,
    UnsubscribeDraft,
    WaitForHints,
)
from target_worker.scheduling.scheduler import Scheduler

GATHERING_SHARE: Final = 0.25
"""Share of the time between two commits that hints wait for others, as in `draft_worker.links`."""
_INTERVAL_S_MAX: Final = 0.1

Texts = Mapping[str, Text]
"""Futures of all sessions by id; both synthetic models read them."""


class Worker(ABC):
    """One thread that takes events between steps."""

    def __init__(self, clock: Clock, since_s: float, until_s: float) -> None:
        self.clock = clock
        self.busy_s = 0.0  # within the measurement
        self.num_steps = 0  # within the measurement
        self._counts_s = since_s, until_s
        self._inbox: list[Any] = []
        self._is_busy = False

    def take(self, events: Iterable[Any]) -> None:
        self._inbox += events
        if not self._is_busy:
            self._next_step()

    @abstractmethod
    def _next_step(self) -> None:
        """Handles the queued events and starts a step, if there is one to run."""

    def _run_for(self, ms: float, then: Callable[..., None], *arguments: Any) -> None:
        since_s, until_s = self._counts_s
        start_s, end_s = self.clock.now_s, self.clock.now_s + ms / MS_PER_S
        self.busy_s += max(min(end_s, until_s) - max(start_s, since_s), 0.0)
        self.num_steps += since_s <= start_s < until_s
        self._is_busy = True
        self.clock.at(end_s, then, *arguments)


class TargetWorker(Worker):
    def __init__(
        self,
        *counted: Any,
        address: str,
        fleet: Fleet,
        texts: Texts,
        publish: Callable[[list[Action]], None],
        link_to_draft: Callable[[int], Link],
    ) -> None:
        """`publish` gets messages for the coordinator; drafts get theirs over their links."""
        super().__init__(*counted)
        self.address = address
        self._pool, self._texts = fleet.target, texts
        self._publish, self._link_to_draft = publish, link_to_draft
        allocator = BlockAllocator(fleet.target.kv_tokens // BLOCK_SIZE + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(fleet.target_limits(), allocator, VOCAB_SIZE)
        self.drafts: list[DraftWorker] = []
        self.num_items = 0  # sum of sessions over counted steps
        self._num_decisions = 0

    def _next_step(self) -> None:
        self._num_decisions += 1
        events, self._inbox = self._inbox, []
        now_s = self.clock.now_s
        for event in events:
            self._send(self.scheduler.handle(event, now_s))
        decision = self.scheduler.next_step(now_s)
        if isinstance(decision, WaitForHints):
            self.clock.at(max(decision.until, now_s + 1e-6), self._look_again, self._num_decisions)
        elif decision is not None:
            step_ms = self._step_ms(decision)
            num_before = self.num_steps
            self._run_for(step_ms, self._finish, decision, step_ms)
            self.num_items += len(decision.items) * (self.num_steps - num_before)

    def _look_again(self, num_decisions: int) -> None:
        if num_decisions == self._num_decisions and not self._is_busy:
            self._next_step()

    def _step_ms(self, step: Step) -> float:
        pool = self._pool
        num_hinted = sum(1 for item in step.items if item.hints)
        step_ms = pool.forward_ms(step.num_tokens, len(step.items), step.num_context)
        return step_ms + pool.hinted_ms * (num_hinted > 0) + pool.hinted_sequence_ms * num_hinted

    def _finish(self, step: Step, step_ms: float) -> None:
        verdicts = [verdict(item, self._texts[item.session_id]) for item in step.items]
        self._send(self.scheduler.finish_step(step, StepResult(verdicts, step_ms), self.clock.now_s))
        self._is_busy = False
        self._next_step()

    def _send(self, actions: list[Action]) -> None:
        by_draft: dict[int, list[CommitPublished]] = {}
        others: list[Action] = []
        for action in actions:
            if isinstance(action, CommitPublished):
                by_draft.setdefault(action.stream_id, []).append(action)
            else:
                others.append(action)
        if others:
            self._publish(others)
        for draft, commits in by_draft.items():
            self._link_to_draft(draft).send(self.drafts[draft].hear, self.address, commits)


class _HintLink:
    """Messages of a draft worker to one target."""

    def __init__(self, link: Link, target: TargetWorker) -> None:
        self.link, self.target = link, target
        self.pending: list[SendHints] = []
        self.is_waiting = False
        self._interval_s, self._last_s = 0.0, -1.0

    def hear(self, now_s: float) -> None:
        if self._last_s >= 0.0:
            gap_s = min(now_s - self._last_s, _INTERVAL_S_MAX)
            self._interval_s += 0.1 * (gap_s - self._interval_s)
        self._last_s = now_s

    @property
    def wait_s(self) -> float:
        return GATHERING_SHARE * self._interval_s


class DraftWorker(Worker):
    def __init__(
        self,
        *counted: Any,
        number: int,
        fleet: Fleet,
        texts: Texts,
        report: Callable[[DraftAction], None],
        link_to_target: Callable[[str], Link],
        target_at: Mapping[str, TargetWorker],
    ) -> None:
        """`report` gets messages for the coordinator: attachments that were refused or have ended."""
        super().__init__(*counted)
        self._number, self._pool, self._texts = number, fleet.draft, texts
        self._report, self._link_to_target, self._target_at = report, link_to_target, target_at
        limits = fleet.draft_limits()
        blocks_each = -(-(limits.max_model_len + limits.max_nodes) // BLOCK_SIZE)
        allocator = BlockAllocator(limits.max_num_seqs * blocks_each + 1, BLOCK_SIZE)
        self.scheduler = DraftScheduler(limits, allocator, VOCAB_SIZE)
        self._links: dict[str, _HintLink] = {}
        self._step_began_s = 0.0

    def hear(self, address: str, commits: list[CommitPublished]) -> None:
        """Handles a target's message."""
        self._link(address).hear(self.clock.now_s)
        self.take(
            CommitReceived(
                commit.session_id, commit.from_len, commit.token_ids, commit.accepts_hints,
                commit.is_finished, commit.num_verified, commit.num_matched,
            )
            for commit in commits
        )  # fmt: skip

    def _next_step(self) -> None:
        events, self._inbox = self._inbox, []
        for event in events:
            self._send(self.scheduler.handle(event, self.clock.now_s))
        step = self.scheduler.next_step()
        if step is not None:
            growths = [Growth(item, self._texts[item.session_id], self._pool.max_alternatives) for item in step.items]
            num_tokens = sum(len(item.token_ids) for item in step.items)
            self._step_began_s = self.clock.now_s
            self._run_for(self._pass_ms(num_tokens, growths), self._end_pass, step, growths)

    def _pass_ms(self, num_tokens: int, growths: list[Growth]) -> float:
        num_context = sum(growth.item.kv.length for growth in growths) if self._pool.context_ms else 0
        return self._pool.forward_ms(num_tokens, len(growths), num_context)

    def _end_pass(self, step: DraftStep, growths: list[Growth]) -> None:
        growing = [] if self._inbox else [growth for growth in growths if growth.goes_on]
        if growing:
            for growth in growing:
                growth.feed_one()
            self._run_for(self._pass_ms(len(growing), growing), self._end_pass, step, growths)
            return
        step_ms = (self.clock.now_s - self._step_began_s) * MS_PER_S
        self._send(self.scheduler.finish_step(step, [growth.expansions for growth in growths], step_ms))
        self._is_busy = False
        self._next_step()

    def _send(self, actions: list[DraftAction]) -> None:
        urgent: dict[str, None] = {}
        for action in actions:
            match action:
                case SendHints():
                    link = self._link(action.target_address)
                    link.pending.append(action)
                    if action.is_urgent:
                        urgent[action.target_address] = None
                    elif not link.is_waiting:
                        link.is_waiting = True
                        self.clock.at(self.clock.now_s + link.wait_s, self._end_wait, link)
                case Subscribe():
                    self._send_to_target(
                        action.target_address,
                        SubscribeDraft(self._number, action.session_id, action.known_len),
                    )
                case Unsubscribe():
                    self._send_to_target(action.target_address, UnsubscribeDraft(self._number, action.session_id))
                case AttachmentRefused() | AttachmentEnded():
                    self._report(action)
        for address in urgent:
            self._flush(self._links[address])

    def _send_to_target(self, address: str, event: Event) -> None:
        link = self._link(address)
        self._flush(link)
        link.link.send(link.target.take, [event])

    def _link(self, address: str) -> _HintLink:
        if address not in self._links:
            target = self._target_at[address]
            self._links[address] = _HintLink(self._link_to_target(address), target)
        return self._links[address]

    def _end_wait(self, link: _HintLink) -> None:
        link.is_waiting = False
        self._flush(link)

    def _flush(self, link: _HintLink) -> None:
        if link.pending:
            link.link.send(self._deliver, link.target, link.pending)
            link.pending = []

    def _deliver(self, target: TargetWorker, sent: list[SendHints]) -> None:
        now_s = self.clock.now_s
        target.take([HintsArrived(each.session_id, each.attachment, each.base_len, each.hints, now_s) for each in sent])
