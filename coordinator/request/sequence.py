"""The state machine of one output sequence of a request, from its admission to its last token. Pure.

`handle` takes an event and returns actions; the shell (`coordinator.request.sequence_runner`) waits for events and
performs actions. The state determines what it waits for:

| state     | waits for                               | event          | next                                      |
|-----------|-----------------------------------------|----------------|-------------------------------------------|
| NEW       | its start                               | Started        | REPEATING, or as PLACE                    |
| REPEATING | a turn of the event loop                | RepeatDue      | REPEATING, PLACE, FINISHED (stop string)  |
| CHECKING  | answers of targets counted as lost      | DoubtfulProbed | QUEUED                                    |
| QUEUED    | a slot at a target                      | SlotGranted    | RUNNING; QUEUED if it cannot begin there  |
|           |                                         | NoTarget       | as RETRY                                  |
|           |                                         | SlotRefused    | FAILED                                    |
| RUNNING   | events of the target's stream           | TargetStarted  | RUNNING                                   |
|           |                                         | TargetWaits    | RUNNING                                   |
|           |                                         | PromptScored   | RUNNING                                   |
|           |                                         | StepTaken      | RUNNING, FINISHED                         |
|           |                                         | TargetEnded    | FINISHED, FAILED                          |
|           |                                         | TargetLeft     | JUDGING, COUNTING, RETRY, FINISHED, FAILED|
|           |                                         | DraftLost      | RUNNING                                   |
| JUDGING   | whether the target's process is alive   | TargetProbed   | COUNTING, RETRY                           |
| COUNTING  | answers of targets counted as lost      | DoubtfulProbed | RETRY, FAILED (Poisonous)                 |
| WAITING   | a moment                                | WaitOver       | as PLACE                                  |

PLACE is CHECKING if a target must try the run alone and some of its losses are doubtful, else QUEUED. RETRY is PLACE,
WAITING or FAILED, as the retry policy decides. Cancelled ends a sequence in any state. An illegal event raises
IllegalEvent and changes nothing.

Invariant: shown output is final. A replay passes the committed tokens to the next target, so no token is lost, repeated
or changed for the client. Greedy and seeded sequences continue exactly as without the loss; others with the same
distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from coordinator.intake.generation_request import GenerationSpec
from coordinator.output.sequence_output import Output
from coordinator.placement.fair_queue import URGENT, Ticket
from coordinator.recovery.retry_policy import RetryPolicy
from coordinator.request import sequence_actions as act
from coordinator.request import sequence_events as seen
from coordinator.request.sequence_events import FINAL, IllegalEvent, SequenceState
from coordinator.request.sequence_losses import Loss, SequenceLosses
from coordinator.request.target_choice import TargetChoice
from coordinator.speculation.fallback import FallbackAction, FallbackController, FallbackState, Trigger
from outrider.errors import (
    DeadlineExceeded,
    LostByOwnPause,
    OutriderError,
    Overloaded,
    Poisonous,
    Unavailable,
    WorkerFailed,
    WorkerLost,
)
from outrider.registry.worker_record import WorkerRecord
from outrider.sampling_params import SpeculationSettings
from protos.outrider.v1 import target_pb2

REPEATED_TOKENS: Final = 1024
"""Repeated tokens that one turn of the event loop detokenizes: 3 to 10 ms."""
_LATE_S: Final = 0.05  # the rest of a deadline that is too short for another attempt


class SequenceMachine:
    """State machine of one sequence. Times are seconds on the caller's clock, an argument of every call."""

    def __init__(
        self,
        spec: GenerationSpec,
        index: int,
        *,
        arrival_s: float,
        output: Output,
        choice: TargetChoice,
        losses: SequenceLosses,
        controller: FallbackController,
        retries: RetryPolicy,
        ticket: Ticket,
        known_token_ids: Sequence[int] = (),
        has_begun: bool = False,
    ) -> None:
        """`index` numbers the request's sequences. `known_token_ids` are shown as a repeat and not generated again. A
        sequence that `has_begun` elsewhere does not queue as a new one."""
        self.spec = spec
        self.index = index
        self.output = output
        self.choice = choice
        self.losses = losses
        self.controller = controller
        self.ticket = ticket
        self.state = SequenceState.NEW
        self.target: WorkerRecord | None = None  # the current or last one
        self.error: OutriderError | None = None  # once it has failed
        self.arrival_s = arrival_s
        self.deadline_s = arrival_s + spec.deadline_s
        self._retries = retries
        # One token is always left to generate: it brings the target's last event.
        self._known_token_ids = known_token_ids[: spec.max_tokens - 1]
        self._has_begun = has_begun
        self._queued_since_s = 0.0
        self._total_queue_ms = 0.0  # waited for slots
        self._last_error: OutriderError | None = None  # with which it left the last target

    @property
    def is_over(self) -> bool:
        """Whether the state is final."""
        return self.state in FINAL

    @property
    def speculation(self) -> SpeculationSettings:
        """The target's current speculation settings."""
        wanted = self.spec.request.speculation
        is_plain = wanted.is_plain or not wanted.enabled
        return dataclasses.replace(wanted, enabled=self.controller.accepts_hints, is_plain=is_plain)

    def committed_len(self) -> int:
        """Number of tokens in `committed`."""
        return len(self.spec.prompt_token_ids) + len(self.output.token_ids)

    def committed(self) -> list[int]:
        """Prompt and committed tokens, with which the next target begins."""
        return [*self.spec.prompt_token_ids, *self.output.token_ids]

    def handle(self, event: seen.Event, now_s: float) -> list[act.Action]:
        """Takes an event. Raises IllegalEvent, changing nothing, if the table has no row for it.

        Leaving RUNNING always ends a trial: a target runs a suspect sequence alone only while it has it.
        """
        handler = _TABLE.get((self.state, type(event)))
        if handler is None:
            raise IllegalEvent(f"{type(event).__name__} is not allowed in state {self.state.name}")
        actions = handler(self, event, now_s)
        if self.state is not SequenceState.RUNNING:
            self.losses.end_trial()
        return actions

    def _start(self, _: seen.Started, now_s: float) -> list[act.Action]:
        if not self._known_token_ids:
            return self._look_for_slot(now_s)
        self.state = SequenceState.REPEATING
        return []

    def _repeat(self, _: seen.RepeatDue, now_s: float) -> list[act.Action]:
        num_shown = len(self.output.token_ids)
        actions: list[act.Action] = [
            act.Show(self.output.repeat(self._known_token_ids[num_shown : num_shown + REPEATED_TOKENS]))
        ]
        if (stop := self.output.stop_string) is not None:
            return [*actions, *self._finish("stop", stop, now_s)]
        if len(self.output.token_ids) < len(self._known_token_ids):
            return actions
        return [*actions, *self._look_for_slot(now_s)]

    def _look_for_slot(self, now_s: float) -> list[act.Action]:
        """Asks for a slot. A sequence with tokens goes before those without."""
        has_begun = self._has_begun or bool(self.output.token_ids)
        if has_begun and not self.spec.is_background and self.ticket.priority != URGENT:
            self.ticket = Ticket(URGENT, self.ticket.tenant, may_be_shed=False)
        if self.spec.run.doubtful and self.choice.needs_trial(now_s):
            self.state = SequenceState.CHECKING
        else:
            self._enter_queue(now_s)
        return []

    def _after_check(self, event: seen.DoubtfulProbed, now_s: float) -> list[act.Action]:
        for target in event.serving:
            self.losses.regain(target)
        self._enter_queue(now_s)
        return []

    def _enter_queue(self, now_s: float) -> None:
        self.state = SequenceState.QUEUED
        self._queued_since_s = now_s

    def _begin(self, event: seen.SlotGranted, now_s: float) -> list[act.Action]:
        target = event.slot.target
        self._total_queue_ms += (now_s - self._queued_since_s) * 1e3
        needs_trial = self.choice.needs_trial(now_s)
        may_begin = not needs_trial or self.losses.trials.may_begin(target, now_s)
        if not may_begin or not self.spec.run.bind(self.index, target):
            # While this slot was reserved, another sequence began there that excludes this one.
            self._enter_queue(now_s)
            return [act.ReleaseSlot(event.slot)]
        self.losses.begin(target, len(self.output.token_ids), on_trial=needs_trial)
        self.choice.try_now(target)
        self.target = target
        self.state = SequenceState.RUNNING
        return [act.OpenCall(event.slot), *_change(self.controller.start())]

    def _after_no_target(self, _: seen.NoTarget, now_s: float) -> list[act.Action]:
        self._total_queue_ms += (now_s - self._queued_since_s) * 1e3
        return self._retry(now_s, found_target=False, uses_attempt=False)

    def _after_refusal(self, event: seen.SlotRefused, _: float) -> list[act.Action]:
        """The last target's error says more than that there is none."""
        earlier = self._last_error if isinstance(event.error, Unavailable) else None
        return self._fail(earlier or event.error)

    def _note_mode(self, event: seen.TargetStarted, _: float) -> list[act.Action]:
        self.output.decoding_mode, self.output.exactness = event.decoding_mode, event.exactness
        return []

    def _note_scores(self, event: seen.PromptScored, _: float) -> list[act.Action]:
        self.output.add_prompt_scores(event.chunk)
        return []

    def _take_step(self, event: seen.StepTaken, now_s: float) -> list[act.Action]:
        step = event.step
        try:  # before any change: a replay begins where this step did
            self.output.check(step)
            shown_prompt = self._show_prompt()
        except WorkerFailed as error:
            return [act.Reject(error)]
        if not self.output.has_room:
            return [*shown_prompt, *self._finish("length", None, now_s)]
        gap_s = self.output.times.chunk(now_s)
        num_tokens = len(step.token_ids)
        num_draft, num_accepted = step.num_draft_tokens, step.num_accepted_draft_tokens
        hints = (num_draft, num_accepted, step.num_branches, step.num_accepted_branches)
        self.output.counts.add_step(num_draft, num_accepted, step.hint_source)
        self.output.counts.add_predicted(step.num_prediction_tokens, step.num_accepted_prediction_tokens)
        actions: list[act.Action] = [act.CountStep(num_tokens, *hints, gap_s)]
        visible = self.output.show(step)
        if self.losses.observe(len(self.output.token_ids)):
            actions.append(act.ShareLosses())
        before = self.controller.state
        changes = self.controller.on_step(num_tokens, *hints, gap_s=gap_s, is_paused=step.is_resting)
        actions += self._follow_controller(before, changes)
        actions += shown_prompt
        actions += map(act.Show, visible)
        if (stop := self.output.stop_string) is not None:
            actions += self._finish("stop", stop, now_s)
        return actions

    def _take_end(self, event: seen.TargetEnded, now_s: float) -> list[act.Action]:
        try:
            shown_prompt = self._show_prompt()
        except WorkerFailed as error:
            return [act.Reject(error)]
        self.output.take_end(event.counted, self._total_queue_ms, is_replay=self.losses.num_tokens_at_begin > 0)
        if self.spec.max_tokens == 0:
            return [*shown_prompt, *self._finish("length", None, now_s)]
        if event.reason == target_pb2.FINISH_REASON_NO_TOKEN:
            return [*shown_prompt, *self._fail(self.spec.no_token_may_follow(len(self.output.token_ids)))]
        is_stop = event.reason == target_pb2.FINISH_REASON_STOP
        return [*shown_prompt, *self._finish("stop" if is_stop else "length", event.stop_token_id, now_s)]

    def _show_prompt(self) -> list[act.Action]:
        return [act.Show(item) for item in self.output.show_prompt()]

    def _lose_draft(self, _: seen.DraftLost, now_s: float) -> list[act.Action]:
        before = self.controller.state
        return self._follow_controller(before, self.controller.on_no_draft())

    def _follow_controller(self, before: FallbackState, changes: tuple[FallbackAction, ...]) -> list[act.Action]:
        after, trigger = self.controller.state, self.controller.last_trigger
        if after is before:
            return _change(changes)
        assert isinstance(trigger, Trigger)
        return [*_change(changes), act.ReportFallback(before, after, trigger)]

    def _after_leaving(self, event: seen.TargetLeft, now_s: float) -> list[act.Action]:
        error, target = event.error, self.target
        assert target is not None
        self.losses.end_trial()  # before it is known whether this very target may try it again
        is_late = isinstance(error, DeadlineExceeded) and now_s >= self.deadline_s - _LATE_S
        if is_late or not isinstance(error, Overloaded | WorkerFailed | WorkerLost | DeadlineExceeded):
            return self._fail(error)
        self._last_error = error  # a target that is too late; another may be in time
        actions: list[act.Action] = [act.ReportLeft(target, error)]
        # If the target died right after the last token, only its last event is missing.
        if self.spec.max_tokens > 0 and not self.output.has_room:
            return [*actions, *self._finish("length", None, now_s)]
        match self.losses.judge(error, target, now_s, is_leaving=self.choice.is_leaving(target)):
            case Loss.POSSIBLE:
                self.state = SequenceState.JUDGING
            case Loss.CERTAIN:
                self.state = SequenceState.COUNTING
            case Loss.NONE:
                actions += self._try_next_target(now_s, is_loss=False)
        return actions

    def _after_probe(self, event: seen.TargetProbed, now_s: float) -> list[act.Action]:
        if event.lives or (event.lives is None and self._is_own_pause):
            return self._try_next_target(now_s, is_loss=False)
        self.state = SequenceState.COUNTING
        return []

    def _after_count(self, event: seen.DoubtfulProbed, now_s: float) -> list[act.Action]:
        for target in event.serving:
            self.losses.regain(target)
        is_ended, actions = self._record_loss(now_s)
        if not is_ended:
            return [*actions, *self._try_next_target(now_s, is_loss=True)]
        assert self._last_error is not None
        error = Poisonous(
            f"{self.spec.run.num_losses} target workers were lost while they had this request, or an earlier one "
            f"with its prompt, the last one with: {self._last_error.told}"
        )
        return [*actions, *self._fail(error)]

    def _record_loss(self, now_s: float) -> tuple[bool, list[act.Action]]:
        """Counts the loss of the target that was left; returns whether it ends the run."""
        assert self.target is not None
        is_gone = isinstance(self._last_error, WorkerLost)
        num_tokens = len(self.output.token_ids)
        is_ended = self.losses.lose(self.target, num_tokens, self.choice.targets, now_s, is_gone=is_gone)
        actions: list[act.Action] = [act.ShareLosses()] if is_gone else []
        return is_ended, [*actions, act.ReportPoison()] if is_ended else actions

    def _try_next_target(self, now_s: float, *, is_loss: bool) -> list[act.Action]:
        """Looks for another target, if that is possible."""
        error, target = self._last_error, self.target
        assert target is not None
        has_tokens = bool(self.output.token_ids)
        if not has_tokens:
            self.spec.run.release(self.index)
        if isinstance(error, Overloaded):
            # Others took the free slot, or the target tries another run: back to the queue.
            if self.losses.was_tried:
                self.losses.trials.refuse(target, now_s)
                self.choice.forgive(target)
            elif not has_tokens:
                self.choice.note_full(target, now_s)
            if not has_tokens:
                return [act.CountReplay(), *self._look_for_slot(now_s)]
        uses_attempt = self._retries.uses_attempt(error, is_loss=is_loss, waited_s=now_s - self.arrival_s)
        return [act.CountReplay(), *self._retry(now_s, found_target=True, uses_attempt=uses_attempt)]

    @property
    def _is_own_pause(self) -> bool:
        """Whether the connection broke while this process was stopped: an unread answer may have arrived."""
        return isinstance(self._last_error, LostByOwnPause)

    def _retry(self, now_s: float, *, found_target: bool, uses_attempt: bool) -> list[act.Action]:
        retries, num_tokens = self._retries, len(self.output.token_ids)
        if not retries.permits_another(now_s, num_tokens, found_target=found_target, uses_attempt=uses_attempt):
            return self._fail(self.choice.why_none(self._last_error, num_tokens, now_s))
        if not retries.has_begun:
            if isinstance(self._last_error, WorkerLost) and self.choice.is_hopeless():
                self.choice.forgive_all()  # lost ones may be back after a while in the queue
        elif not self.choice.rank(now_s):
            self.choice.forgive_all()
            if now_s >= self.deadline_s:
                late = "not finished within the request's deadline: there is no target to go on at"
                return self._fail(DeadlineExceeded(late))
            self.state = SequenceState.WAITING
            return []
        return self._look_for_slot(now_s)

    def _finish(self, reason: str, stop_reason: str | int | None, now_s: float) -> list[act.Action]:
        self.state = SequenceState.FINISHED
        return [act.Show(self.output.finish(reason, stop_reason, now_s))]

    def _fail(self, error: OutriderError) -> list[act.Action]:
        self.state = SequenceState.FAILED
        self.error = error
        return []

    def _cancel(self, _: seen.Cancelled, now_s: float) -> list[act.Action]:
        """Cancels the sequence; the loss of a target at the same moment still counts."""
        is_judged = self.state is SequenceState.JUDGING and not self._is_own_pause
        is_lost = is_judged or self.state is SequenceState.COUNTING
        self.state = SequenceState.CANCELLED
        return self._record_loss(now_s)[1] if is_lost else []


def _change(changes: tuple[FallbackAction, ...]) -> list[act.Action]:
    return [act.ChangeSpeculation(changes)] if changes else []


_S = SequenceState
_TABLE: Final[
    dict[tuple[SequenceState, type[seen.Event]], Callable[[SequenceMachine, Any, float], list[act.Action]]]
] = {
    (_S.NEW, seen.Started): SequenceMachine._start,
    (_S.REPEATING, seen.RepeatDue): SequenceMachine._repeat,
    (_S.CHECKING, seen.DoubtfulProbed): SequenceMachine._after_check,
    (_S.QUEUED, seen.SlotGranted): SequenceMachine._begin,
    (_S.QUEUED, seen.NoTarget): SequenceMachine._after_no_target,
    (_S.QUEUED, seen.SlotRefused): SequenceMachine._after_refusal,
    (_S.RUNNING, seen.TargetStarted): SequenceMachine._note_mode,
    (_S.RUNNING, seen.TargetWaits): lambda *_: [],
    (_S.RUNNING, seen.PromptScored): SequenceMachine._note_scores,
    (_S.RUNNING, seen.StepTaken): SequenceMachine._take_step,
    (_S.RUNNING, seen.TargetEnded): SequenceMachine._take_end,
    (_S.RUNNING, seen.TargetLeft): SequenceMachine._after_leaving,
    (_S.RUNNING, seen.DraftLost): SequenceMachine._lose_draft,
    (_S.JUDGING, seen.TargetProbed): SequenceMachine._after_probe,
    (_S.COUNTING, seen.DoubtfulProbed): SequenceMachine._after_count,
    (_S.WAITING, seen.WaitOver): lambda machine, _, now_s: machine._look_for_slot(now_s),
    **{(state, seen.Cancelled): SequenceMachine._cancel for state in _S if state not in FINAL},
}
