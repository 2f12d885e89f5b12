"""The state machine of a sequence: its table, and traces of whole runs (`traces/sequence_*.txt`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.output.sequence_output import SequenceFinished, SequenceOutput
from coordinator.output.text_output import VisibleOutput
from coordinator.placement.fair_queue import URGENT, Ticket
from coordinator.placement.routing import Router
from coordinator.placement.slot_queue import Slot
from coordinator.recovery.poison import PoisonRecord, Trials
from coordinator.recovery.resumption import NOTHING_SEEN, ResumePoint
from coordinator.recovery.retry_policy import RetryPolicy
from coordinator.request import sequence_actions as act
from coordinator.request.sequence import _TABLE, SequenceMachine
from coordinator.request.sequence_events import (
    FINAL,
    Cancelled,
    DoubtfulProbed,
    DraftLost,
    Event,
    IllegalEvent,
    NoTarget,
    PromptScored,
    RepeatDue,
    SequenceState,
    SlotGranted,
    SlotRefused,
    Started,
    StepTaken,
    TargetEnded,
    TargetLeft,
    TargetProbed,
    TargetStarted,
    WaitOver,
)
from coordinator.request.sequence_losses import SequenceLosses
from coordinator.request.target_choice import TargetChoice
from coordinator.speculation.fallback import FallbackController, FallbackPolicy
from outrider.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutriderError,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from outrider.registry.worker_record import Snapshot, WorkerRecord
from outrider.sampling_params import SamplingParams
from protos.outrider.v1 import common_pb2, target_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import record_of, served_model
from tests.golden import check_trace

TRACES = Path(__file__).parent / "traces"
DEADLINE_S = 100.0


class Run:
    """A machine between targets of a fixed registry, whose every transition is written down."""

    def __init__(
        self,
        clusters: ClusterFactory,
        *,
        num_targets: int = 2,
        max_tokens: int = 4,
        point: ResumePoint = NOTHING_SEEN,
        known: tuple[int, ...] = (),
        **request: Any,
    ) -> None:
        tokenizer = clusters.tokenizer
        self.script = clusters.script
        self.targets = tuple(record_of("target", f"h:{number}", tokenizer.fingerprint) for number in range(num_targets))
        self.now_s = 0.0
        self.lines: list[str] = []
        self.shown: list[int] = []
        self.poison, self.trials = PoisonRecord(), Trials()
        spec = GenerationSpec(
            request=GenerationInput(request_id="r", text="import", **request),
            model="demo",
            prompt_token_ids=tuple(tokenizer.encode("import")),
            max_tokens=max_tokens,
            sampling=SamplingParams(max_tokens=max(max_tokens, 1)),
            deadline_s=DEADLINE_S,
            served=served_model(tokenizer.fingerprint),
        )
        router = Router(lambda _: None, random.Random(1), 3.0)
        losses = SequenceLosses(spec, 0, self.poison, self.trials, num_losses_max=3, arrival_s=0.0)
        self.machine = SequenceMachine(
            *(spec, 0),
            arrival_s=0.0,
            output=SequenceOutput(spec, tokenizer, point, 0.0),
            choice=TargetChoice(spec, router, lambda: Snapshot(self.targets, ()), losses),
            losses=losses,
            controller=FallbackController(FallbackPolicy(), is_enabled=True),
            retries=RetryPolicy(3, 60.0),
            ticket=Ticket(),
            known_token_ids=known,
        )

    def slot(self, number: int) -> SlotGranted:
        return SlotGranted(Slot(self.targets[number], f"session-{number}", self.now_s))

    def step(self, num_tokens: int = 1, num_draft: int = 0) -> Callable[[], StepTaken]:
        """The next tokens of the script as of then; all but the last were hints, where there were any."""

        def event() -> StepTaken:
            have = len(self.machine.output.token_ids)
            return StepTaken(
                target_pb2.StepOutput(
                    token_ids=(self.script * 4)[have : have + num_tokens],
                    origins=[common_pb2.TOKEN_ORIGIN_PLAIN] * num_tokens,
                    num_draft_tokens=num_draft,
                    num_accepted_draft_tokens=num_tokens - 1 if num_draft else 0,
                )
            )

        return event

    def end(self) -> TargetEnded:
        return TargetEnded(target_pb2.FINISH_REASON_LENGTH, None, target_pb2.SessionFinished())

    def take(self, *events: Event | Callable[[], Event], after_s: float = 1.0) -> list[act.Action]:
        """Handles events one after the other; the actions of the last."""
        actions: list[act.Action] = []
        for each in events:
            event = each() if callable(each) else each
            before = self.machine.state
            actions = self.machine.handle(event, self.now_s)
            self.shown += [
                token_id
                for action in actions
                if isinstance(action, act.Show) and isinstance(action.item, VisibleOutput)
                for token_id in action.item.token_ids
            ]
            self.lines.append(
                f"{self.now_s:5.1f} s  {before.name:<9} {told_event(event):<42} -> {self.machine.state.name}"
                + "".join(f"\n{'':20}{told_action(action)}" for action in actions)
                + (f"\n{'':20}error: {type(self.machine.error).__name__}" if self.machine.error else "")
            )
            self.now_s += after_s
        return actions

    def check(self, name: str, title: str) -> None:
        """Compares the trace with `traces/sequence_NAME.txt`."""
        check_trace(TRACES / f"sequence_{name}.txt", "\n".join([title, "", *self.lines, ""]))


def told_event(event: Event) -> str:
    name = type(event).__name__
    match event:
        case SlotGranted(slot):
            return f"{name} at {slot.target.worker_id}"
        case StepTaken(step):
            return f"{name}: {len(step.token_ids)} tokens"
        case TargetLeft(error) | SlotRefused(error):
            return f"{name}: {type(error).__name__}"
        case TargetProbed(lives):
            return f"{name}: {'no answer' if lives is None else 'it lives' if lives else 'it is gone'}"
        case DoubtfulProbed(serving):
            return f"{name}: {len(serving)} serve"
        case _:
            return name


def told_action(action: act.Action) -> str:
    name = type(action).__name__
    match action:
        case act.Show(VisibleOutput() as item):
            return f"{name} {len(item.token_ids)} tokens{' again' if item.is_repeat else ''}"
        case act.Show(SequenceFinished() as item):
            return f"{name} the end: {item.finish_reason} after {item.num_output_tokens} tokens"
        case act.ChangeSpeculation(changes):
            return f"{name}: {', '.join(change.name for change in changes)}"
        case act.OpenCall(slot) | act.ReleaseSlot(slot):
            return f"{name} {slot.token}"
        case act.ReportFallback(before, after, trigger):
            return f"{name}: {before.name} to {after.name}, {trigger.name}"
        case act.ReportLeft(target, _):
            return f"{name} {target.worker_id}"
        case act.CountStep():
            return f"{name}: {action.num_accepted} of {action.num_draft_tokens} hints accepted"
        case _:
            return name


LOST = TargetLeft(WorkerLost("the connection broke"))


def lost(run: Run, number: int, serving: Iterable[WorkerRecord] = ()) -> None:
    """The sequence begins at a target, which goes away with it."""
    if run.machine.state is SequenceState.CHECKING:
        run.take(DoubtfulProbed(list(serving)))
    run.take(run.slot(number), LOST, TargetProbed(False), DoubtfulProbed(list(serving)))


class TestTraces:
    def test_a_sequence_from_its_slot_to_its_end(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), run.step(3, num_draft=4), run.step(1), run.end())
        assert run.shown == run.script[:4]
        run.check("whole", "A sequence of four tokens at one target; three of them in one step with hints.")

    def test_a_replay_begins_with_the_committed_tokens(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), run.step(2), LOST, TargetProbed(False), DoubtfulProbed(()))
        assert run.machine.ticket.priority == URGENT
        assert run.machine.committed()[-2:] == run.script[:2]
        run.take(run.slot(1), run.step(2), run.end())
        assert run.shown == run.script[:4]
        run.check("replay", "The first target is lost after two tokens; the second one goes on with the third.")

    def test_where_the_process_lives_the_connection_alone_broke(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), run.step(2), LOST, TargetProbed(True))
        assert run.machine.spec.run.num_losses == 0
        run.take(run.slot(1), run.step(2), run.end())
        run.check(
            "connection",
            "The connection to the first target breaks, and its process lives: no loss is counted.",
        )

    def test_a_full_target_sends_it_back_to_the_queue(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), TargetLeft(Overloaded("full")), run.slot(0), run.step(4), run.end())
        run.check("full", "The target has no room after all; later it has.")

    def test_one_that_costs_three_targets_is_tried_alone_and_ended(self, clusters: ClusterFactory) -> None:
        run = Run(clusters, num_targets=4)
        run.take(Started())
        for number in range(3):
            lost(run, number)
        assert run.machine.state is SequenceState.FAILED
        assert run.machine.spec.run.is_blamed
        run.check(
            "poison",
            "Three targets go away with it, the third one while it tried the run alone: it is ended.",
        )

    def test_targets_that_serve_again_are_no_losses(self, clusters: ClusterFactory) -> None:
        run = Run(clusters, num_targets=4)
        run.take(Started())
        lost(run, 0)
        lost(run, 1)
        assert run.machine.state is SequenceState.CHECKING
        run.take(DoubtfulProbed(run.targets[:2]))
        assert run.machine.spec.run.num_losses == 0
        run.take(run.slot(2), run.step(4), run.end())
        run.check(
            "regained",
            "Two targets seem lost; before a third one tries the run alone they are asked: they serve.",
        )

    def test_a_resumed_stream_shows_what_is_known_first(self, clusters: ClusterFactory) -> None:
        run = Run(clusters, point=ResumePoint(2, True), known=tuple(clusters.script[:2]))
        run.take(Started(), RepeatDue(), run.slot(0), run.step(2), run.end())
        assert run.shown == run.script[:4]
        run.check("resumed", "A client has two tokens from another replica; a target generates the other two.")

    def test_without_a_draft_worker_it_goes_on_plainly(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), run.step(1), DraftLost(), run.step(3), run.end())
        run.check("no_draft", "No draft worker has room; the target goes on alone.")

    def test_with_tokens_it_waits_for_a_target(self, clusters: ClusterFactory) -> None:
        run = Run(clusters, num_targets=1)
        run.take(Started(), run.slot(0), run.step(2), TargetLeft(WorkerUnreached("refused")))
        run.take(WaitOver(), NoTarget(), run.slot(0), run.step(2), run.end())
        run.check("waits", "The only target cannot be reached for a while; tokens that were shown are not given up.")


class TestTable:
    @pytest.mark.parametrize(
        ("state", "kind"),
        [(state, kind) for state, kind in product(SequenceState, get_args(Event)) if (state, kind) not in _TABLE],
        ids=lambda each: getattr(each, "name", None) or each.__name__,
    )
    def test_an_illegal_event_raises_and_changes_nothing(
        self, clusters: ClusterFactory, state: SequenceState, kind: type[Any]
    ) -> None:
        run = Run(clusters)
        run.machine.state = state
        events: dict[type[Any], Event] = {
            SlotGranted: run.slot(0),
            SlotRefused: SlotRefused(Overloaded("full")),
            TargetStarted: TargetStarted(common_pb2.DECODING_MODE_GREEDY),
            PromptScored: PromptScored(target_pb2.PromptLogprobs()),
            StepTaken: run.step()(),
            TargetEnded: run.end(),
            TargetLeft: LOST,
            TargetProbed: TargetProbed(True),
            DoubtfulProbed: DoubtfulProbed(()),
        }
        event: Event = events[kind] if kind in events else kind()
        before = len(run.machine.output.token_ids), run.machine.spec.run.num_losses
        with pytest.raises(IllegalEvent):
            run.machine.handle(event, 0.0)
        assert run.machine.state is state
        assert (len(run.machine.output.token_ids), run.machine.spec.run.num_losses) == before

    @pytest.mark.parametrize("state", SequenceState)
    def test_the_table_of_the_docstring_is_the_table(self, state: SequenceState) -> None:
        import coordinator.request.sequence as module

        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in (module.__doc__ or "").splitlines()
            if line.startswith("|") and not line.startswith("|-")
        ]
        told, current = set(), ""
        for name, _, event, _ in rows[1:]:
            current = name or current
            if current == state.name:
                told.add(event)
        # Cancelled stands below the table: it ends a sequence in any state.
        assert told == {kind.__name__ for of, kind in _TABLE if of is state and kind is not Cancelled}

    @pytest.mark.parametrize("state", sorted(FINAL, key=lambda state: str(state)))
    def test_nothing_leaves_a_final_state(self, state: SequenceState) -> None:
        assert not [kind for of, kind in _TABLE if of is state]


class TestEnds:
    @pytest.mark.parametrize(
        "error",
        [InvalidRequest("seed", "refused"), DeadlineExceeded("late")],
        ids=["a refused value", "a late one"],
    )
    def test_what_another_target_would_not_mend_ends_it(self, clusters: ClusterFactory, error: OutriderError) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), after_s=DEADLINE_S / 2)
        run.take(TargetLeft(error))
        assert run.machine.state is SequenceState.FAILED
        assert run.machine.error is error

    def test_a_target_that_died_after_the_last_token_owes_nothing(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), run.step(4), LOST)
        assert run.machine.state is SequenceState.FINISHED

    def test_tokens_without_the_log_probabilities_asked_for_are_rejected(self, clusters: ClusterFactory) -> None:
        run = Run(clusters)
        object.__setattr__(run.machine.spec.sampling, "num_logprobs", 1)
        run.take(Started(), run.slot(0))
        (action,) = run.take(run.step(2))
        assert isinstance(action, act.Reject)
        assert run.machine.state is SequenceState.RUNNING
        assert run.machine.output.token_ids == []

    @pytest.mark.parametrize("events", [(LOST,), (LOST, TargetProbed(False))], ids=["judging", "counting"])
    def test_a_client_that_leaves_just_then_does_not_hide_a_loss(
        self, clusters: ClusterFactory, events: tuple[Event, ...]
    ) -> None:
        run = Run(clusters)
        run.take(Started(), run.slot(0), *events, Cancelled())
        assert run.machine.state is SequenceState.CANCELLED
        assert run.machine.spec.run.num_losses == 1

    @pytest.mark.parametrize("ending", ["cancelled", "failed", "finished", "left"])
    def test_a_trial_ends_with_whatever_ends_the_sequence(self, clusters: ClusterFactory, ending: str) -> None:
        run = Run(clusters, num_targets=4)
        run.take(Started())
        lost(run, 0)
        lost(run, 1)
        run.take(DoubtfulProbed(()), run.slot(2))
        assert run.machine.losses.trial_tokens
        assert not run.trials.may_begin(run.targets[2], run.now_s)
        match ending:
            case "cancelled":
                run.take(Cancelled())
            case "failed":
                run.take(TargetLeft(InvalidRequest("seed", "refused")))
            case "finished":
                run.take(run.step(4), run.end())
            case _:
                run.take(TargetLeft(WorkerUnreached("refused")))
        assert run.trials.may_begin(run.targets[2], run.now_s)
