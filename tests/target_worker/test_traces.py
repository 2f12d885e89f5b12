"""Traces of whole runs of the target worker's scheduler (`traces/scheduler_*.txt`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.hints.hint_tree import ROOT_ID, Hint
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    CommitPublished,
    Event,
    HintsArrived,
    SessionAborted,
    SessionAdmitted,
    SessionEnded,
    SessionRefused,
    StartSession,
    StepItem,
    SubscribeDraft,
    TokensCommitted,
    WaitForHints,
)
from target_worker.scheduling.scheduler import Scheduler
from tests.golden import check_trace
from tests.target_worker.fakes import VOCAB_SIZE, FakeModel, next_token, start

TRACES = Path(__file__).parent / "traces"
STEP_MS = 2.0
WRONG = 3  # added to a token, it is another one


class Run:
    """A scheduler whose every event and decision is written down. Its clock starts at 0 ms."""

    def __init__(self, num_blocks: int = 20, **limits: Any) -> None:
        chosen: dict[str, Any] = {
            "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 40, "num_speculative_tokens": 3,
            "may_pause": False, "has_lookup": False, "hint_wait_ms_max": 0.0,
        }  # fmt: skip
        self.scheduler = Scheduler(SchedulerLimits(**(chosen | limits)), BlockAllocator(num_blocks, 4), VOCAB_SIZE)
        self.model = FakeModel(num_blocks * 4)
        self.now_ms = 0.0
        self.lines: list[str] = []
        self.outputs: dict[str, list[int]] = {}

    def take(self, event: Event) -> None:
        if isinstance(event, StartSession):
            self.outputs[event.session_id] = list(event.token_ids)
        self._write(told_event(event), self.scheduler.handle(event, self.now_ms / 1e3))

    def start(self, session_id: str, prompt: Sequence[int] = (1, 2, 3), *, num_tokens: int, **fields: Any) -> None:
        event = start(session_id, prompt, max_tokens=num_tokens, ignore_eos=True)
        self.take(replace(event, **fields))

    def subscribe(self, session_id: str, known_len: int = 3) -> None:
        self.take(SubscribeDraft(1, session_id, known_len))

    def hints(self, session_id: str, base_len: int, *, num_right: int, num_wrong: int = 0) -> None:
        """A chain below the first `base_len` tokens: the next tokens, then other ones."""
        path = (self.outputs.get(session_id) or [1, 2, 3])[:base_len]
        for index in range(num_right + num_wrong):
            wrong = 0 if index < num_right else WRONG
            path.append((next_token(path) + wrong) % VOCAB_SIZE)
        hints = [Hint(ROOT_ID + 1 + i, ROOT_ID + i, token) for i, token in enumerate(path[base_len:])]
        self.take(HintsArrived(session_id, 1, base_len, hints, self.now_ms / 1e3))

    def step(self, times: int = 1) -> None:
        """Runs what the scheduler decides, or writes down that it waits."""
        for _ in range(times):
            step = self.scheduler.next_step(self.now_ms / 1e3)
            if step is None:
                self._write("nothing to run")
            elif isinstance(step, WaitForHints):
                self._write(f"wait for hints, at most until {step.until * 1e3:g} ms")
            else:
                waiting = [f"{session.session_id} waits" for session in self.scheduler._slots.waiting]
                self._write("step: " + "; ".join([*map(told_item, step.items), *waiting]))
                result = self.model.run(step, STEP_MS)
                self.now_ms += STEP_MS
                self._write("step ended", self.scheduler.finish_step(step, result, self.now_ms / 1e3))

    def check(self, name: str, title: str) -> None:
        """Compares the trace with `traces/scheduler_NAME.txt`."""
        check_trace(TRACES / f"scheduler_{name}.txt", "\n".join([title, "", *self.lines, ""]))

    def _write(self, what: str, actions: Sequence[Action] = ()) -> None:
        self.lines.append(f"{self.now_ms:4.0f} ms  {what}")
        for action in actions:
            if isinstance(action, TokensCommitted):
                self.outputs[action.session_id] += action.token_ids
            self.lines.append(f"{'':13}-> {told_action(action)}")


def told_event(event: Event) -> str:
    what = f"{type(event).__name__} {getattr(event, 'session_id', '')}".rstrip()
    match event:
        case StartSession():
            return f"{what}: {len(event.token_ids)} tokens, {event.sampling.max_tokens} to generate"
        case SubscribeDraft():
            return f"{what}: stream {event.stream_id} knows {event.known_len} tokens"
        case HintsArrived():
            tokens = " ".join(str(hint.token_id) for hint in event.hints)
            return f"{what}: {tokens} after {event.base_len} tokens"
        case _:
            return what


def told_item(item: StepItem) -> str:
    num_plain = len(item.token_ids) - item.num_fed_hints
    hints = f" and {item.num_fed_hints} hints" if item.num_fed_hints else ""
    verified = f", verifies {len(item.hints)}" if item.hints else ""
    decided = "" if item.num_decided else ", decides nothing"
    return f"{item.session_id} feeds {num_plain} tokens{hints}{verified}{decided}"


def told_action(action: Action) -> str:
    match action:
        case SessionAdmitted():
            return f"admitted {action.session_id}, {action.decoding_mode.name.lower()}"
        case SessionRefused() | SessionAborted():
            verb = "refused" if isinstance(action, SessionRefused) else "aborted"
            return f"{verb} {action.session_id}: {type(action.error).__name__}, {action.error.message}"
        case TokensCommitted():
            origins = [common_pb2.TokenOrigin.Name(origin).split("_")[-1].lower() for origin in action.origins]
            tokens = [f"{token} {origin}" for token, origin in zip(action.token_ids, origins, strict=True)]
            return f"committed to {action.session_id}: {', '.join(tokens)}"
        case CommitPublished():
            whose = f"to stream {action.stream_id}: {action.session_id} from {action.from_len}"
            sent = " ".join(map(str, action.token_ids)) or "no tokens"
            state = "finished" if action.is_finished else "accepts hints" if action.accepts_hints else "paused"
            counts = f"; {action.num_matched} of {action.num_verified} hints were right"
            return f"{whose}: {sent}, {state}{counts if action.num_verified else ''}"
        case SessionEnded():
            reason = target_pb2.FinishReason.Name(action.reason).split("_")[-1].lower()
            stats = action.stats
            ended = f"{reason} after {action.num_output_tokens} tokens in {stats.num_steps} steps"
            hints = f"{stats.num_stale_hints} stale and {stats.num_late_hints} late hints"
            return f"ended {action.session_id}: {ended}, {hints}, {action.num_preemptions} preemptions"
        case _:
            return type(action).__name__


def test_a_prompt_is_fed_in_chunks_then_token_by_token() -> None:
    run = Run()
    run.start("a", [1, 2, 3, 4] * 5, num_tokens=3)
    run.step(6)
    run.check(
        "plain",
        "A prompt of 20 tokens is fed in chunks of at most 8; then each step feeds and commits a token.",
    )


def test_hints_are_verified_up_to_the_first_wrong_one() -> None:
    run = Run()
    run.start("a", num_tokens=7)
    run.subscribe("a")
    run.step()
    run.hints("a", 4, num_right=2, num_wrong=1)
    run.step()
    run.hints("a", 7, num_right=4)
    run.step()
    run.check(
        "hints",
        "The third of three hints is wrong: the target's own token follows the first two. The next ones are all right.",
    )


def test_hints_that_come_before_their_session_are_kept() -> None:
    run = Run()
    run.subscribe("a")
    run.hints("a", 3, num_right=2)
    run.start("a", num_tokens=4)
    run.step(3)
    run.check(
        "early",
        "The draft worker is faster than the coordinator: its hints are kept until the session starts.",
    )


def test_hints_are_waited_for_and_come() -> None:
    run = Run(hint_wait_ms_max=10.0, wait_for_num_hints=2)
    run.start("a", num_tokens=6)
    run.subscribe("a")
    run.step(2)
    run.now_ms += 3.0
    run.hints("a", 4, num_right=2)
    run.step(2)
    run.now_ms += 10.0
    run.step()
    run.check(
        "wait",
        "A step waits until two hints have come; the second time they do not, and it runs without them.",
    )


def test_late_and_stale_hints_are_counted() -> None:
    run = Run()
    run.start("a", num_tokens=6)
    run.subscribe("a")
    run.step(3)
    run.hints("a", 4, num_right=3)
    run.step()
    run.hints("a", 6, num_right=0, num_wrong=2)
    run.step(2)
    run.check(
        "late",
        "Hints for committed tokens are late if they are right and stale if they are wrong; the third is verified.",
    )


def test_the_last_in_rank_is_preempted_and_recomputed() -> None:
    run = Run(num_blocks=6, growth_tokens=0, max_num_seqs=3, max_num_batched_tokens=16)
    run.start("a", [1, 2, 3, 1, 2, 3, 1], num_tokens=5)
    run.start("b", [4, 3, 2, 4, 3, 2], num_tokens=3)
    run.start("c", [2, 2, 2], num_tokens=3)
    run.step(5)
    assert run.scheduler.num_preemptions == 1
    run.check(
        "preempted",
        "Five blocks of four tokens: a needs its third one, so c, the last to come, is preempted until b has ended.",
    )


def test_who_cannot_be_served_is_refused_or_ended() -> None:
    run = Run(max_num_seqs=1, max_num_waiting=1)
    run.start("a", num_tokens=30)
    run.step()
    run.start("b", num_tokens=4, deadline_at=0.004)
    run.start("c", num_tokens=4)
    run.start("a", num_tokens=4)
    run.start("long", [1] * 40, num_tokens=4)
    run.now_ms = 60.0
    run.step()
    run.check(
        "refused",
        "One session runs and one may wait: who comes too many or asks too much is refused at once.",
    )
