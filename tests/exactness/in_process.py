"""Both workers' cores hand in hand in one thread, with real engines on tiny random models and no network.

`Bridge` starts sessions on a `TargetCore`, carries its commits to a draft and the draft's hints back, late and in
portions whose sizes a seeded generator draws. The draft is a real `DraftCore` (`ModelDraft`), or none of ours
(`tests.exactness.drafts`), or absent. Everything that is random or timed follows from `luck`, so a failure repeats.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from draft_worker import messages as draft_messages
from draft_worker.heads.loading import features_of
from draft_worker.limits import DraftLimits
from draft_worker.runner import DraftCore
from draft_worker.scheduler import DraftScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.loading.loading import load_model
from outrider.engine.model import Engine
from outrider.errors import Overloaded
from outrider.grammar import GrammarState
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.hints.step_cost import StepCost, StepLine
from outrider.observability.telemetry import DraftMetrics, TargetMetrics
from outrider.sampling_params import AcceptanceRule, DecodingMode, SamplingParams, SpeculationSettings
from protos.outrider.v1 import target_pb2
from target_worker import messages as target_messages
from target_worker.limits import SchedulerLimits
from target_worker.runner import TargetCore
from target_worker.scheduling.head_turns import DraftsLocally
from target_worker.scheduling.scheduler import Scheduler
from tests import models
from tests.exactness.heads import head_engine
from tests.exactness.reference import Ending, Reference
from tests.models import root_dir

STREAM_ID = 1
MEMORY_STREAM_ID = 2
TARGET_ADDRESS = "target:1"
MAX_MODEL_LEN = 192
MAX_NUM_SEQS = 48
MAX_DRAFT_STEPS = 60  # between two target steps; more than a tree has levels

# Models.


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A random Llama. `noise` is what a draft's weights differ by, relative to their spread."""

    vocab_size: int
    seed: int
    end_of_sequence_ids: tuple[int, ...]
    noise: float = 0.0


SMALL = TinyModel(vocab_size=8, seed=5, end_of_sequence_ids=(6,))
"""Few enough tokens to enumerate every output of four."""
LARGE = TinyModel(vocab_size=96, seed=3, end_of_sequence_ids=(7, 41))
"""Enough tokens that two outputs do not agree by chance."""
GOOD_NOISE = {SMALL.vocab_size: 0.2, LARGE.vocab_size: 0.03}
"""Noise, by vocabulary size, with which a draft is right more often than not."""


def draft_of(target: TinyModel) -> TinyModel:
    """A draft model that agrees with its target most of the time."""
    noise = GOOD_NOISE[target.vocab_size]
    return TinyModel(target.vocab_size, target.seed, target.end_of_sequence_ids, noise)


def _random_model(tiny: TinyModel) -> Any:
    """Its distributions are neither flat nor certain."""
    config = transformers.LlamaConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(tiny.end_of_sequence_ids),
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3 * tiny.noise)
    return model


@functools.cache
def _model_dir(tiny: TinyModel) -> Path:
    directory = root_dir() / f"exactness-{tiny.vocab_size}-{tiny.seed}-{tiny.noise}"
    _random_model(tiny).save_pretrained(directory)
    return directory


@functools.cache
def engine(tiny: TinyModel, role: str) -> Engine:
    """The loaded model; roles that share weights have caches of their own."""
    config = models.engine_config(_model_dir(tiny), max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    return load_model(config)


@functools.cache
def hugging_face_model(tiny: TinyModel) -> Any:
    """The same folder as transformers reads it, untouched by us."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        _model_dir(tiny), dtype=torch.float32, local_files_only=True
    )
    return model.eval()


@functools.cache
def reference(tiny: TinyModel) -> Reference:
    return Reference(hugging_face_model(tiny), tiny.end_of_sequence_ids)


# What the cores are told. Everything that depends on the form of their messages stands here.


def start_session(
    session_id: str,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    *,
    settings: SpeculationSettings,
    seed: int,
    grammar: GrammarState | None = None,
    prediction: Sequence[int] = (),
) -> target_messages.StartSession:
    return target_messages.StartSession(
        session_id=session_id,
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        speculation=settings,
        seed=seed,
        grammar=None if grammar is None else grammar.fork(),
        prediction=prediction,
    )


def speculation(
    rule: str, *, enabled: bool = True, num_draft_probs: int = 0, draft_probs_bits: int = 0
) -> SpeculationSettings:
    return SpeculationSettings(
        enabled=enabled,
        acceptance_rule=AcceptanceRule[rule.upper()],
        num_draft_probs=num_draft_probs,
        draft_probs_bits=draft_probs_bits,
    )


def attach_session(
    session_id: str,
    attachment: int,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    *,
    settings: SpeculationSettings,
    seed: int,
    grammar: GrammarState | None = None,
) -> draft_messages.AttachSession:
    return draft_messages.AttachSession(
        session_id=session_id,
        attachment=attachment,
        target_address=TARGET_ADDRESS,
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        sampling=sampling,
        speculation=settings,
        seed=seed,
        grammar=None if grammar is None else grammar.fork(),
    )


def subscription(
    session_id: str, known_len: int, num_features: int | None = None, *, is_memory: bool = False
) -> target_messages.SubscribeDraft:
    stream_id = MEMORY_STREAM_ID if is_memory else STREAM_ID
    return target_messages.SubscribeDraft(stream_id, session_id, known_len, num_features, is_memory)


def hints_arrived(
    session_id: str,
    attachment: int,
    base_len: int,
    hints: Sequence[Hint],
    *,
    is_memory: bool = False,
    match_len: int = 0,
) -> target_messages.HintsArrived:
    return target_messages.HintsArrived(
        session_id=session_id,
        attachment=attachment,
        base_len=base_len,
        hints=list(hints),
        arrived_at=0.0,
        is_memory=is_memory,
        match_len=match_len,
    )


def hint(node_id: int, parent_id: int, token_id: int, distribution: DraftDistribution | None = None) -> Hint:
    return Hint(node_id, parent_id, token_id, distribution)


def ending(ended: target_messages.SessionEnded) -> Ending:
    """How a session ended, in the reference's words."""
    if ended.reason == target_pb2.FINISH_REASON_LENGTH:
        return Ending()
    if ended.reason == target_pb2.FINISH_REASON_STOP:
        return Ending(ended.stop_token_id, is_complete=ended.stop_token_id is None)
    assert ended.reason == target_pb2.FINISH_REASON_NO_TOKEN, ended
    return Ending(is_stuck=True)


def _target_core(
    tiny: TinyModel,
    cost: StepCost,
    num_blocks: int | None,
    role: str,
    head: DraftsLocally | None,
    *,
    verifies_branches: bool,
) -> TargetCore:
    limits = SchedulerLimits(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_waiting=4 * MAX_NUM_SEQS,
        # Long prompts come in chunks, with other sessions' hints between them.
        max_num_batched_tokens=64 if tiny.vocab_size == LARGE.vocab_size else 512,
        max_model_len=MAX_MODEL_LEN,
        growth_tokens=32 if num_blocks is None else 0,  # where KV is scarce, it is to be scarce often
        num_speculative_tokens=5,
        hint_wait_ms_max=0.0,
        max_lookup_tokens=4096,
        may_pause=False,  # hostile hints are to be verified too
        verifies_branches=verifies_branches,
        end_of_sequence_ids=frozenset(tiny.end_of_sequence_ids),
    )
    model = engine(tiny, role)
    scheduler = ClocklessScheduler(limits, _new_allocator(model, num_blocks), model.vocab_size, head)
    scheduler.cost = cost
    return TargetCore(scheduler, model, TargetMetrics("tiny", "target"))


def _draft_core(tiny: TinyModel, mask_token_id: int | None, max_model_len: int, *, is_head: bool) -> DraftCore:
    limits = DraftLimits(
        max_num_seqs=2 * MAX_NUM_SEQS,  # it hears of a session's end later
        max_num_batched_tokens=256,
        max_model_len=max_model_len,
        max_nodes=40 if tiny.vocab_size == LARGE.vocab_size else 16,
        max_lookahead=8 if tiny.vocab_size == LARGE.vocab_size else 4,
        num_mask_tokens=3,
        end_of_sequence_ids=frozenset(tiny.end_of_sequence_ids),
    )
    if is_head:
        head = head_engine(engine(tiny, "target"))
        scheduler = ClocklessDraftScheduler(limits, head.allocator, head.vocab_size, new_features=features_of(head))
        return DraftCore(scheduler, head, DraftMetrics("tiny", "draft"))
    model = engine(tiny, "draft")
    if mask_token_id is not None:
        model.mask_token_id = mask_token_id
    allocator = _new_allocator(model)
    scheduler = ClocklessDraftScheduler(limits, allocator, model.vocab_size, reads_masks=mask_token_id is not None)
    return DraftCore(scheduler, model, DraftMetrics("tiny", "draft"))


def _new_allocator(model: Engine, num_blocks: int | None = None) -> BlockAllocator:
    """A separate allocator for one core: a failed test leaves nothing behind in the engine, which all tests share."""
    return BlockAllocator(num_blocks or model.allocator.num_blocks, model.allocator.block_size)


class GivenCost(StepCost):
    """A step's cost that no clock has a say in, so that a run repeats itself."""

    token_ms = 0.4

    def observe(self, num_tokens: int, step_ms: float, num_context: int = 0, num_reread: int = 0) -> None:
        pass

    def line(self, num_context: int = 0) -> StepLine:
        return StepLine(20.0, self.token_ms)


class ClocklessScheduler(Scheduler):
    """No clock has a say in what else it learns from a step's time: how to cut prompts, what a token is worth."""

    def finish_step(
        self, step: target_messages.Step, result: target_messages.StepResult, now: float
    ) -> list[target_messages.Action]:
        step_ms = self.cost.line().step_ms(step.num_tokens)
        return super().finish_step(step, replace(result, step_ms=step_ms), now=0.0)


class ClocklessDraftScheduler(DraftScheduler):
    def finish_step(
        self, step: draft_messages.Step, expansions: list[list[draft_messages.Expansion]], step_ms: float = 0.0
    ) -> list[draft_messages.Action]:
        return super().finish_step(step, expansions, step_ms=1.0)


# Sessions.


@dataclass(frozen=True, slots=True)
class Request:
    """One session to be run. `right_text`, where it is known, is what hostile drafts tell the truth from."""

    session_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    rule: str = "block"
    right_text: tuple[int, ...] = ()
    num_given: int = 0  # tokens of right_text that were committed on another worker
    grammar: GrammarState | None = None
    prediction: tuple[int, ...] = ()  # that the client sent

    @property
    def given_text(self) -> list[int]:
        return [*self.prompt, *self.right_text[: self.num_given]]


@dataclass(slots=True)
class Result:
    """Everything that the target reported to the caller of one session."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[target_messages.TokensCommitted] = field(default_factory=list)
    ended: target_messages.SessionEnded | None = None
    other_actions: list[target_messages.Action] = field(default_factory=list)

    @property
    def ending(self) -> Ending:
        assert self.ended is not None
        return ending(self.ended)

    def hint_counts(self) -> tuple[int, int]:
        """Hints verified and accepted, but for a last step that a stop token cut short: the rest was not needed."""
        steps = self.steps if self.ending == Ending() else self.steps[:-1]
        verified = sum(step.num_draft_tokens for step in steps)
        return verified, sum(step.num_accepted_draft_tokens for step in steps)


class Draft(Protocol):
    """The peer of the target on the hint stream. Its methods return the events that it sends."""

    def attach(self, request: Request, known: Sequence[int]) -> list[target_messages.Event]: ...

    def hear(self, commit: target_messages.CommitPublished) -> list[target_messages.Event]: ...

    def detach(self, session_id: str) -> list[target_messages.Event]:
        """Handles the coordinator's message that the session has ended."""

    def run(self) -> list[target_messages.Event] | None:
        """Runs a step; None when there is nothing to do."""

    def close(self) -> None: ...


class ModelDraft:
    """A real `DraftCore`. Its `luck` decides the seeds of sampled hints, and which session is attached anew."""

    is_memory = False

    def __init__(
        self,
        tiny: TinyModel,
        luck: int,
        mask_token_id: int | None = None,
        *,
        is_head: bool = False,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        """`mask_token_id`: of a draft that guesses several tokens in one pass; any token serves, rightly or wrongly.
        `is_head`: whether it runs a draft head of `tiny`."""
        self.core = _draft_core(tiny, mask_token_id, max_model_len, is_head=is_head)
        self._rng = random.Random(luck)
        self._requests: dict[str, tuple[Request, int]] = {}

    def attach(self, request: Request, known: Sequence[int]) -> list[target_messages.Event]:
        """Attaches, or detaches and attaches anew."""
        attachment = 1
        events: list[target_messages.Event] = []
        if request.session_id in self._requests:
            attachment += self._requests[request.session_id][1]
            events += self._handle(draft_messages.DetachSession(request.session_id, attachment - 1))
        self._requests[request.session_id] = request, attachment
        is_coupled = request.sampling.decoding_mode is DecodingMode.COUPLED
        return events + self._handle(
            attach_session(
                request.session_id,
                attachment,
                known,
                len(request.prompt),
                request.sampling,
                settings=self._settings(request),
                seed=request.seed if is_coupled else self._rng.getrandbits(64),
                grammar=request.grammar,
            )
        )

    def hear(self, commit: target_messages.CommitPublished) -> list[target_messages.Event]:
        return self._handle(
            draft_messages.CommitReceived(
                session_id=commit.session_id,
                from_len=commit.from_len,
                token_ids=commit.token_ids,
                accepts_hints=commit.accepts_hints,
                is_finished=commit.is_finished,
                features=commit.features,
                features_from=commit.features_from,
            )
        )

    def detach(self, session_id: str) -> list[target_messages.Event]:
        _, attachment = self._requests.pop(session_id)
        return self._handle(draft_messages.DetachSession(session_id, attachment))

    def reopen(self) -> list[target_messages.Event]:
        """Opens its stream again after it was cut."""
        return self._handle(draft_messages.LinkOpened(TARGET_ADDRESS))

    def run(self) -> list[target_messages.Event] | None:
        actions, until = self.core.run_next(0.0)
        return None if until is None else self._events(actions)

    def close(self) -> None:
        assert self.core.scheduler.num_sessions == 0
        self.core.scheduler.allocator.check_integrity([])

    def _settings(self, request: Request) -> SpeculationSettings:
        """Distributions of all sizes and precisions."""
        return speculation(
            request.rule,
            num_draft_probs=self._rng.choice([0, 1, 3, 8]),
            draft_probs_bits=self._rng.choice([0, 4, 8, 16]),
        )

    def _handle(self, event: draft_messages.Event) -> list[target_messages.Event]:
        return self._events(self.core.handle(event, 0.0))

    def _events(self, actions: Sequence[draft_messages.Action]) -> list[target_messages.Event]:
        events: list[target_messages.Event] = []
        for action in actions:
            match action:
                case draft_messages.SendHints():
                    told = action.session_id, action.attachment, action.base_len, action.hints
                    events.append(hints_arrived(*told, is_memory=self.is_memory, match_len=action.match_len))
                case draft_messages.Subscribe():
                    num_features = action.known_features if action.head else None
                    is_memory = action.is_memory
                    events.append(subscription(action.session_id, action.known_len, num_features, is_memory=is_memory))
                case draft_messages.Unsubscribe():
                    stream_id = MEMORY_STREAM_ID if self.is_memory else STREAM_ID
                    events.append(target_messages.UnsubscribeDraft(stream_id, action.session_id))
                case draft_messages.AttachmentRefused():
                    # It has not heard yet that others have ended. This session goes without.
                    assert isinstance(action.error, Overloaded), action.error
        return events


FromTarget = target_messages.CommitPublished | target_messages.SessionEnded


@dataclass(frozen=True, slots=True)
class Manner:
    """How the two sides take turns."""

    on_time: float = 0.5  # chance that every hint that the draft can find arrives before a target step
    unrest: float = 0.0  # chance per target step that a session's draft is attached anew, or not listened to
    has_branches: bool = True  # beside the path; off where the share of accepted hints is to tell how good a draft is


class Bridge:
    """Runs requests to their end, at most `at_once` at a time."""

    def __init__(
        self,
        tiny: TinyModel,
        draft: Draft | None,
        luck: int,
        manner: Manner,
        num_blocks: int | None = None,
        *,
        role: str = "target",
        local_head: DraftsLocally | None = None,
    ) -> None:
        """`num_blocks`: of the target's KV cache, if not as many as anybody could want. `role`: of the target's engine,
        which `local_head` belongs to."""
        self._rng = random.Random(luck)
        self._manner = manner
        self._draft = draft
        self._cost = GivenCost()
        self._local_head = local_head
        self._target = _target_core(
            tiny, self._cost, num_blocks, role, local_head, verifies_branches=manner.has_branches
        )
        self._to_target: deque[target_messages.Event] = deque()
        self._to_draft: deque[FromTarget] = deque()
        self._requests: dict[str, Request] = {}
        self._results: dict[str, Result] = {}
        self._silenced: set[str] = set()

    def run(self, requests: Sequence[Request], at_once: int = MAX_NUM_SEQS) -> list[Result]:
        """Results in the order of `requests`."""
        waiting = deque(requests)
        num_idle = 0
        while waiting or any(result.ended is None for result in self._running()):
            while waiting and len(self._running()) < at_once:
                self._start(waiting.popleft())
            self._let_draft_run()
            # Hints for nothing, at the usual price, and so dear that only a sure draft is verified.
            self._cost.token_ms = self._rng.choice([1e-4, 1e-4, 0.4, 3.0])
            actions, until = self._target.run_next(0.0)
            self._take(actions)
            num_idle = num_idle + 1 if until is None and not waiting else 0
            assert num_idle < 100, "sessions run, and the target has nothing to do"
        self._deliver(self._to_draft, len(self._to_draft))
        if self._draft is not None:
            self._draft.close()
        assert self._target.scheduler.num_running == 0
        self._target.scheduler.allocator.check_integrity([])
        if self._local_head is not None and self._local_head.allocator is not None:
            self._local_head.allocator.check_integrity([])
        return [self._results[request.session_id] for request in requests]

    def _running(self) -> list[Result]:
        return [result for result in self._results.values() if result.ended is None]

    def _start(self, request: Request) -> None:
        self._requests[request.session_id] = request
        self._results[request.session_id] = Result(list(request.right_text[: request.num_given]))
        event = start_session(
            request.session_id,
            request.given_text,
            len(request.prompt),
            request.sampling,
            settings=speculation(request.rule),
            seed=request.seed,
            grammar=request.grammar,
            prediction=request.prediction,
        )
        # Both workers get a request at once: the draft worker may be the first to speak.
        if self._draft is not None and self._rng.random() < 0.5:
            self._to_target.extend(self._draft.attach(request, request.given_text))
            self._deliver(self._to_target, self._rng.randrange(len(self._to_target) + 1))
            self._tell_target(event)
        else:
            self._tell_target(event)
            if self._draft is not None:
                self._to_target.extend(self._draft.attach(request, request.given_text))

    def _tell_target(self, event: target_messages.Event) -> None:
        self._take(self._target.handle(event, 0.0))

    def _let_draft_run(self) -> None:
        if self._draft is None:
            return
        self._upset()
        if self._rng.random() < self._manner.on_time:
            self._deliver(self._to_draft, len(self._to_draft))
            for _ in range(MAX_DRAFT_STEPS):
                if (events := self._draft.run()) is None:
                    break
                self._to_target.extend(events)
            self._deliver(self._to_target, len(self._to_target))
            return
        self._deliver(self._to_draft, self._some(len(self._to_draft)))
        for _ in range(self._rng.choice([0, 1, 2, 4])):
            self._to_target.extend(self._draft.run() or [])
        self._deliver(self._to_target, self._some(len(self._to_target)))

    def _some(self, count: int) -> int:
        """All of it mostly, so that neither side falls behind for ever."""
        return count if self._rng.random() < 0.6 else self._rng.randrange(count + 1)

    def _upset(self) -> None:
        """Drafts are attached anew and hints are not listened to for a while."""
        assert self._draft is not None
        for session_id, request in self._requests.items():
            result = self._results[session_id]
            if result.ended is not None or self._rng.random() >= self._manner.unrest:
                continue
            if self._rng.random() < 0.5:
                self._to_target.extend(self._draft.attach(request, [*request.prompt, *result.token_ids]))
            else:
                self._silenced ^= {session_id}
                settings = speculation(request.rule, enabled=session_id not in self._silenced)
                self._tell_target(target_messages.ChangeSpeculation(session_id, settings))

    def _deliver(
        self,
        messages: deque[target_messages.Event] | deque[FromTarget],
        count: int,
    ) -> None:
        for _ in range(count):
            message = messages.popleft()
            if isinstance(message, target_messages.CommitPublished):
                assert self._draft is not None
                self._to_target.extend(self._draft.hear(message))
            elif isinstance(message, target_messages.SessionEnded):
                assert self._draft is not None
                self._to_target.extend(self._draft.detach(message.session_id))
            else:
                self._tell_target(message)

    def _take(self, actions: Sequence[target_messages.Action]) -> None:
        for action in actions:
            if isinstance(action, target_messages.CommitPublished):
                self._to_draft.append(action)
                continue
            result = self._results[action.session_id]
            match action:
                case target_messages.TokensCommitted():
                    assert len(action.token_ids) == len(action.origins) > 0
                    result.token_ids += action.token_ids
                    result.steps.append(action)
                case target_messages.SessionEnded():
                    assert action.num_output_tokens == len(result.token_ids)
                    result.ended = action
                    if self._draft is not None:
                        self._to_draft.append(action)
                case target_messages.SessionRefused() | target_messages.SessionAborted():
                    raise AssertionError(f"the target ended {action.session_id}: {action.error}")
                case _:
                    result.other_actions.append(action)
