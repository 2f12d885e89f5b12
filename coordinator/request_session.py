"""One request's life: a target that decides, a draft that rides ahead, and what the client sees of it.

    start ─► attempt at a target ──────────────► finished (stop, length, stop string)
                 │  ▲ refused, not reached: another target
                 └──┘ lost: prompt + committed tokens at another target

A request with several texts runs one of these for each (`coordinator.choices`).

Invariant: what was yielded is final. A replay hands the committed tokens to the next target, so the client
never sees a token lost, repeated or changed; for greedy and seeded requests the continuation is the very same
text, for others it is one with the same distribution. Leaving the generator, by whatever way, cancels both
sides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from coordinator.admission import Place, Wish
from coordinator.attempt import Attempt
from coordinator.draft_link import LinkedSession
from coordinator.environment import Environment
from coordinator.fair_queue import URGENT, Siblings, Ticket
from coordinator.fallback import ALWAYS, FallbackController, FallbackState, Trigger
from coordinator.generation_request import GenerationSpec
from coordinator.patience import Patience
from coordinator.poison import LOSSES_MAX, NOTED_S, ON_TRIAL, TRIAL_TOKENS, TRIAL_TOKENS_MAX
from coordinator.priors import StartingMode, key_for
from coordinator.prompt_scores import PromptScores
from coordinator.resumption import NOTHING_SEEN, ResumePoint
from coordinator.routing import WorkerKey, key_of, prefix_key
from coordinator.run_identity import prompt_digest
from coordinator.slot_search import Restrictions
from coordinator.statistics import RequestTimes, SpeculationCounts
from coordinator.text_output import PromptOutput, TextOutput, VisibleOutput
from coordinator.workers import remaining_ms
from outrider.detokenizer import IncrementalDetokenizer, StopStringMatcher
from outrider.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LostByOwnPause,
    OutriderError,
    Overloaded,
    Poisonous,
    Unavailable,
    WorkerFailed,
    WorkerLost,
    WorkerLostAtOnce,
    WorkerSilent,
    WorkerUnanswered,
    WorkerUnreached,
)
from outrider.worker_record import WorkerRecord
from protos.outrider.v1 import common_pb2, target_pb2

_log = logging.getLogger(__name__)

LONG_PROMPT_TOKENS: Final = 8192
"""One that is longer takes a millisecond or more, up to 30, to be made a message to a worker."""
REPEATED_TOKENS: Final = 1024
"""Of a known text that a turn of the event loop makes text again, for all requests together: 3 to 10 ms."""
_LATE_S: Final = 0.05  # what is left of a deadline that is not worth another try
_WAIT_S: Final = 0.1  # between two looks for a target
KNOWN_LOSSES_S: Final = 0.05  # how old may be what is known of other replicas' losses when a target was lost
_PROBE_S: Final = 0.5  # for a target to show that it is alive, though its connection broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a text that went well; last of what `RequestSession.run` yields."""

    text: str  # held back until now
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None  # the stop string, or the stop token's id
    num_prompt_tokens: int
    num_output_tokens: int
    decoding_mode: common_pb2.DecodingMode
    counts: SpeculationCounts
    times: RequestTimes
    num_cached_tokens: int | None  # of the prompt; known from the target's last word alone
    is_repeat: bool = False  # the client has it already, from another replica


News = PromptOutput | VisibleOutput | Finished


class RequestSession:
    """Generates one of a request's texts. Made, `run` once, dropped."""

    def __init__(
        self,
        environment: Environment,
        spec: GenerationSpec,
        arrival_s: float,
        *,
        index: int = 0,
        preferred: WorkerRecord | None = None,
        point: ResumePoint = NOTHING_SEEN,
        known_token_ids: Sequence[int] = (),
        has_begun: bool = False,
        siblings: Siblings | None = None,
    ) -> None:
        """`arrival_s` is when the request came in, on the environment's clock; `index` is the text's place among the
        candidates. A `preferred` target is tried first while it has room.

        What the client has already, up to `point`, is yielded as a repeat; of that the `known_token_ids` need not be
        generated again. One that `has_begun` is not asked to wait as if it were new. `siblings` are the request's
        sequences together.
        """
        request = spec.request
        self._environment = environment
        self._spec = spec
        self._index = index
        self._first_asked_s = arrival_s
        self._deadline_s = arrival_s + spec.deadline_s
        self._is_plain = request.speculation.is_plain or not request.speculation.enabled
        self._prior_key = key_for(spec, spec.request.tenant)
        # One that asks for speculation always learns nothing from others, and they would learn nothing from it.
        self._uses_priors = environment.settings.uses_priors and not request.speculation.is_always
        self._controller = FallbackController(
            ALWAYS if request.speculation.is_always else environment.policy,
            is_enabled=not self._is_plain,
            starting_mode=self._starting_mode(index),
        )
        self._output = TextOutput(
            IncrementalDetokenizer(
                environment.tokenizer,
                context_token_ids=spec.prompt_token_ids,
                skip_special_tokens=not spec.shows_special_tokens,
            ),
            StopStringMatcher(request.stop, include_stop_str_in_output=request.include_stop_str_in_output),
            spec.sampling.min_tokens,
        )
        self._sampling = spec.sampling_of(index).to_proto()
        self._preferred = preferred
        self._prompt = PromptScores(spec, is_repeat=point.has_begun)
        self._point = point
        # Log probabilities are not known of them, and come with their tokens only.
        has_logprobs = spec.sampling.num_logprobs is not None or spec.sampling.num_prompt_logprobs is not None
        self._known_token_ids = () if has_logprobs or spec.prompt_text is not None else known_token_ids
        self._has_begun = has_begun
        self._is_finished = False
        self._shown_state: str | None = None  # that the metrics count it under
        self._ticket = Ticket(
            request.priority,
            request.tenant,
            len(spec.prompt_token_ids),
            may_be_shed=not has_begun,
            siblings=siblings or Siblings(),
        )
        self._prefix = prefix_key(spec.prompt_token_ids, spec.cache_salt)
        self._waited_ms = 0.0  # for a place at a target
        self._num_cached_tokens: int | None = None
        self._num_tokens_at_begin = 0  # at the target that it is at
        self._num_tokens_at_loss: int | None = None  # generated at the target that was lost last
        self._trial: WorkerRecord | None = None  # the target that tries it alone
        self._trial_seen: tuple[int, int] | None = None  # losses, and changes of the record, at the last look
        self._is_tried = False  # whether it was to be tried alone then
        self._was_tried = False  # alone, by the target that it is at, or was at last
        self._has_gone_beyond = False  # the place of the loss before, there
        self._broke_at: WorkerRecord | None = None  # a target that it may have brought down
        self._tried: set[WorkerKey] = set()
        self._decoding_mode: common_pb2.DecodingMode = common_pb2.DECODING_MODE_UNSPECIFIED
        self.counts = SpeculationCounts()
        self.times = RequestTimes(arrival_s)

    async def run(self) -> AsyncGenerator[News]:
        """Yields what is shown of the prompt, if anything, what each step made visible, then one Finished.

        Raises Overloaded or Unavailable before the first token when no target takes the request, WorkerLost or
        WorkerFailed when every attempt ended early, DeadlineExceeded, InvalidRequest when a target refuses a value
        or the parameters leave no token that could follow.
        """
        if not self._spec.is_background:
            self._environment.metrics.count_start(self._spec.model, self._controller.state.name.lower())
        try:
            self._show_state()
            async with aclosing(self._repeated()) as repeated:
                async for known in repeated:
                    yield known
            if self._is_finished:
                return
            async with aclosing(self._run_attempts()) as items:
                async for item in items:
                    yield item
        finally:  # one that was cancelled has learned something too
            if self._broke_at is not None and not self._is_finished:
                # Whoever leaves, or is late, just then must not hide what the request did.
                self._lose(self._broke_at, is_gone=True)
            self._environment.metrics.move_fallback(self._spec.model, self._shown_state, None)
            if self._uses_priors:
                evidence, now_s = self._controller.evidence, self._environment.now_s()
                self._environment.priors.record(self._prior_key, evidence, now_s)

    async def _repeated(self) -> AsyncGenerator[News]:
        """What is known of the text and was shown before. The last token a target may say is always generated."""
        known = self._known_token_ids[: self._spec.max_tokens - 1]
        for start in range(0, len(known), REPEATED_TOKENS):
            part = known[start : start + REPEATED_TOKENS]
            async with self._environment.repeats:
                await asyncio.sleep(0)
            yield self._push(part, [common_pb2.TOKEN_ORIGIN_UNSPECIFIED] * len(part), (), is_repeat=True)
            if (stop := self._output.stop_string) is not None:
                yield self._finish("stop", stop)
                return

    async def _run_attempts(self) -> AsyncGenerator[News]:
        environment, settings, spec = self._environment, self._environment.settings, self._spec
        patience = Patience(settings.target_attempts_max, settings.target_wait_max_s)
        refusal: OutriderError | None = None
        while True:
            is_loss = False
            try:
                attempt = await self._begin_attempt()
            except Unavailable as error:
                raise refusal or error from None
            if attempt is not None:
                target = attempt.target
                try:
                    async with aclosing(self._run_attempt(attempt)) as items:
                        async for item in items:
                            yield item
                    return
                except (Overloaded, WorkerFailed, WorkerLost, DeadlineExceeded) as error:
                    if isinstance(error, DeadlineExceeded) and self._is_late():
                        raise
                    refusal = error  # of a target that would be too late; another may be in time
                    request_id = spec.request.request_id
                    _log.warning(
                        "request %s leaves target %s: %s",
                        *(request_id, target.worker_id, error.message),
                        extra={"request_id": request_id, "worker_id": target.worker_id},
                    )
                    spec.span.event("left its target", {"target": target.worker_id, "because": error.message})
                    # A target that died right after the last token owes us nothing but the word that it is done.
                    if 0 < spec.max_tokens <= len(self._output.token_ids):
                        yield self._finish("length", None)
                        return
                    if isinstance(error, WorkerUnanswered):
                        environment.poison.note_loss(target, None, environment.now_s())
                    is_loss = await self._is_loss(error, target)
                    self._broke_at = None
                    if is_loss:
                        await self._count_loss(error, target)
                    environment.metrics.target_replays.inc()
                if not self._output.token_ids:
                    spec.run.release(self._index)
                if isinstance(refusal, Overloaded) and attempt.is_trial:
                    # Or it is full. Another one may be free to try it, and this one before long.
                    environment.trials.refuse(target, environment.now_s())
                    self._tried.discard(key_of(target))
                    if not self._output.token_ids:
                        continue
                elif isinstance(refusal, Overloaded) and not self._output.token_ids:
                    # Others have taken what seemed free. Back to the queue, for as long as one may wait there.
                    environment.router.note_full(target, environment.now_s())
                    self._tried.discard(key_of(target))
                    continue
            if not patience.lasts(
                *(environment.now_s(), len(self._output.token_ids)),
                found_target=attempt is not None,
                counts=attempt is not None and self._counts(refusal, is_loss),
            ):
                raise self._no_way_on(refusal)
            if not patience.has_begun:
                if isinstance(refusal, WorkerLost) and self._is_hopeless():
                    self._tried.clear()  # those that were lost may be back, after a while in the queue
            elif not self._can_try_another():
                self._tried.clear()
                await self._wait_for_target()

    def _counts(self, refusal: OutriderError | None, is_loss: bool) -> bool:
        """Whether few attempts like this one are too many: not where the target has not had the request, nor for a
        while where it was lost with it, for which there is a limit of its own."""
        waited_s = self._environment.now_s() - self._first_asked_s
        if is_loss and waited_s < self._environment.settings.target_wait_max_s:
            return False
        return isinstance(refusal, WorkerUnanswered) or not isinstance(refusal, WorkerUnreached)

    async def _is_loss(self, error: OutriderError, target: WorkerRecord) -> bool:
        """Whether a target that this sequence was at may have been lost to it: not when the connection alone broke, nor
        when it was leaving anyway, nor to the run of another replica that it was trying."""
        environment = self._environment
        if not isinstance(error, WorkerFailed | WorkerLost) or isinstance(error, WorkerUnreached):
            return False
        if isinstance(error, WorkerLostAtOnce) and environment.trials.has_another(
            target, environment.now_s()
        ):
            return False
        is_leaving = self._is_leaving(target)
        if is_leaving or isinstance(error, WorkerFailed | WorkerSilent):
            return not is_leaving
        lives = await environment.channels.has_incarnation(target.address, target.incarnation, _PROBE_S)
        # After a pause of our own there is much to catch up with, and the answer may lie here unread.
        return lives is False or (lives is None and not isinstance(error, LostByOwnPause))

    def _is_leaving(self, target: WorkerRecord) -> bool:
        return any(
            worker.incarnation == target.incarnation and worker.state == "draining"
            for worker in self._environment.snapshot().targets
        )

    async def _count_loss(self, error: OutriderError, target: WorkerRecord) -> None:
        """Raises Poisonous when this run has cost more workers than one may, whatever it generated in between."""
        await self._regain()
        await self._environment.losses.refresh(KNOWN_LOSSES_S)
        if self._lose(target, is_gone=isinstance(error, WorkerLost)):
            raise Poisonous(
                f"{self._spec.run.num_losses} target workers were lost while they had this request, or an earlier one "
                f"with its prompt, the last one with: {error.message}"
            )

    async def _regain(self) -> None:
        """Takes targets for lost no longer that serve again: connections to them had broken, or they had been paused,
        many at once perhaps."""
        environment, run = self._environment, self._spec.run
        targets = run.doubtful
        serve = await asyncio.gather(
            *(
                environment.channels.is_serving(target.address, target.incarnation, _PROBE_S)
                for target in targets
            )
        )
        for target, is_there in zip(targets, serve, strict=True):
            if is_there and target in run.doubtful:  # no other sequence of the run was faster
                run.regain(target)
                environment.poison.regain(target)

    def _lose(self, target: WorkerRecord, *, is_gone: bool) -> bool:
        """Whether the run is to be ended for it. `is_gone`: as `RunIdentity.lose`."""
        environment, spec = self._environment, self._spec
        now_s, digest = environment.now_s(), self._prompt_digest
        spec.run.lose(self._index, target, is_gone=is_gone)
        self._num_tokens_at_loss = self._num_tokens_here
        if is_gone:
            environment.poison.note_loss(target, digest, now_s)
            environment.losses.tell_soon()
        is_proven = self._was_tried or spec.run.num_losses >= LOSSES_MAX
        if not is_proven or not self._is_blamed_for(
            spec.run.num_losses, has_passed_trial=self._has_gone_beyond
        ):
            return False
        spec.run.blame()
        if is_gone:
            environment.poison.convict(digest, now_s)
            environment.metrics.show_poison(environment.poison.convicted(now_s))
        _log.error(
            "request %s lost %d target workers one after the other and is ended; its prompt's digest is %s",
            *(spec.request.request_id, spec.run.num_losses, digest),
            extra={"request_id": spec.request.request_id, "prompt_digest": digest},
        )
        return True

    def _is_blamed_for(self, num_losses: int, *, has_passed_trial: bool) -> bool:
        """Whether the run is to be ended that has cost so many workers, or one, where another replica has just ended
        one with its prompt."""
        environment, spec = self._environment, self._spec
        return self._is_convicted or environment.poison.blames(
            self._prompt_digest,
            num_losses,
            spec.run.killed,
            has_passed_trial=has_passed_trial,
            num_losses_max=environment.settings.target_attempts_max,
            num_sequences=spec.num_candidates,
            targets=self._targets(),
            model=spec.model,
            since_s=self._first_asked_s - NOTED_S,
        )

    @property
    def _is_convicted(self) -> bool:
        """Whether a run with this prompt was ended for its losses of late."""
        environment = self._environment
        return environment.poison.time_left_s(self._prompt_digest, environment.now_s()) > 0

    @cached_property
    def _prompt_digest(self) -> str:
        return prompt_digest(self._spec.prompt_token_ids, self._spec.sampling.grammar)

    def _targets(self) -> Mapping[str, bool]:
        """Those of the model by their ids, whatever room they have, and whether they have the run's weights."""
        targets, run = self._environment.snapshot().targets, self._spec.run
        return {
            target.worker_id: run.accepts(target)
            for target in targets
            if target.model_name == self._spec.model
        }

    def _no_way_on(self, refusal: OutriderError | None) -> OutriderError:
        """Why a sequence is given up that no target takes."""
        environment, spec = self._environment, self._spec
        num_tokens = len(self._output.token_ids)
        others = environment.router.models(environment.snapshot(), environment.now_s()).get(spec.model, [])
        if not any(map(spec.run.accepts, others)) and others:
            why = "none of the target workers that are there has the weights and numerics that it began with"
            return Unavailable(
                f"the sequence stops after {num_tokens} tokens: {why}"
                + ("" if refusal is None else f" ({refusal.message})")
            )
        return refusal or Unavailable(f"no target worker is free to serve {spec.model!r}")

    def _is_late(self) -> bool:
        return self._environment.now_s() >= self._deadline_s - _LATE_S

    async def _wait_for_target(self) -> None:
        """Raises DeadlineExceeded."""
        if self._environment.now_s() >= self._deadline_s:
            raise DeadlineExceeded(
                "not finished within the request's deadline: there is no target to go on at"
            )
        await asyncio.sleep(_WAIT_S)

    def _can_try_another(self) -> bool:
        return bool(self._rank_targets())

    def _starting_mode(self, index: int) -> StartingMode:
        environment = self._environment
        if not self._uses_priors:
            return StartingMode.SPECULATING
        text_id = f"{self._spec.request.request_id}/{index}"
        return environment.priors.start(self._prior_key, text_id, environment.now_s())

    async def _begin_attempt(self) -> Attempt | None:
        """None where there is no target to try. Raises Overloaded and DeadlineExceeded, see `Admission.place`."""
        environment, spec = self._environment, self._spec
        has_begun = bool(self._has_begun or self._output.token_ids)
        if has_begun and not spec.is_background and self._ticket.priority != URGENT:
            self._ticket = Ticket(URGENT, self._ticket.tenant, may_be_shed=False)
        if self._is_on_trial:
            await self._regain()  # or perhaps it is not
        place = await self._find_place()
        if place is None:
            return None
        if len(spec.prompt_token_ids) > LONG_PROMPT_TOKENS:
            try:  # of 64 sequences of one request all would be made messages in the same turn of the loop
                async with environment.long_prompts:
                    await asyncio.sleep(0)
            except BaseException:
                environment.admission.leave(spec.model, place)
                self._end_trial()
                raise
        # A new id each time: a lost target may still hold the old session for a while, and so may its draft.
        session_id = place.token
        self._preferred = None
        self._tried.add(key_of(place.target))
        spec.span.event("placed", {"target": place.target.worker_id, "session_id": session_id})
        hint_token = environment.new_id()
        request = target_pb2.GenerateRequest(
            session_id=session_id,
            hint_token=hint_token,
            token_ids=self._committed(),
            num_prompt_tokens=len(spec.prompt_token_ids),
            sampling=self._sampling,
            speculation=self._speculation(),
            priority=self._ticket.priority,
            deadline_ms=remaining_ms(self._deadline_s, environment.now_s()),
            incarnation=place.target.incarnation,
            cache_salt=spec.cache_salt,
            owner=spec.owner,
            trial_tokens=0 if self._trial is None else self._num_trial_tokens,
        )
        session = LinkedSession(
            session_id=session_id,
            hint_token=hint_token,
            target=place.target,
            sampling=self._sampling,
            speculation=spec.request.speculation.to_proto(),
            num_prompt_tokens=len(spec.prompt_token_ids),
            num_tokens_max=spec.num_tokens_max,
            cache_salt=spec.cache_salt,
            owner=spec.owner,
            drafts=spec.drafts,
            deadline_s=self._deadline_s,
            traceparent=spec.span.traceparent,
            committed=self._committed,
        )
        return Attempt(
            *(environment, place, spec.model, request, session),
            speculation=self._speculation,
            on_no_draft=self._lose_draft,
        )

    async def _find_place(self) -> Place | None:
        """A slot at a target whose tokens can follow those of this run."""
        environment, spec = self._environment, self._spec
        while True:
            began_s = environment.now_s()
            wish = Wish(
                *(spec.model, self._ticket, self._rank_targets, self._is_hopeless),
                *(environment.new_id(), self._first_asked_s, self._deadline_s),
                *(spec.num_tokens_max, self._restrictions),
            )
            with environment.metrics.queued(spec.model):
                place = await environment.admission.place(wish)
            self._waited_ms += (environment.now_s() - began_s) * 1e3
            if place is None or self._takes(place.target):
                return place
            # While this place was being taken, another sequence began there that this one cannot be with.
            environment.admission.leave(spec.model, place)

    def _takes(self, target: WorkerRecord) -> bool:
        """Whether this sequence can begin at the target, as it does then."""
        trials, now_s = self._environment.trials, self._environment.now_s()
        if (self._is_on_trial and not trials.may_begin(target, now_s)) or not self._spec.run.bind(
            self._index, target
        ):
            return False
        self._num_tokens_at_begin = len(self._output.token_ids)
        self._has_gone_beyond = False
        self._was_tried = self._is_on_trial
        if self._was_tried:
            trials.begin(target)
            self._trial = target
        return True

    @property
    def _is_on_trial(self) -> bool:
        """Whether one more loss may end this run."""
        num_losses = self._spec.run.num_losses
        if num_losses < self._environment.settings.target_attempts_max - 1:
            return num_losses > 0 and self._is_convicted
        seen = num_losses, self._environment.poison.num_changes
        if self._trial_seen != seen:
            self._trial_seen = seen
            self._is_tried = self._is_blamed_for(num_losses + 1, has_passed_trial=False)
        return self._is_tried

    @property
    def _num_tokens_here(self) -> int:
        """Generated at the target that it is at, or was at last."""
        return len(self._output.token_ids) - self._num_tokens_at_begin

    @property
    def _num_trial_tokens(self) -> int:
        """With so many at a target its trial is over. Where earlier runs were lost is not known."""
        if self._num_tokens_at_loss is None:
            return TRIAL_TOKENS_MAX
        return min(self._num_tokens_at_loss + TRIAL_TOKENS, TRIAL_TOKENS_MAX)

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._environment.trials.end(self._trial)
            self._trial = None

    def _accepts(self, target: WorkerRecord) -> bool:
        """Whether this sequence may go there now."""
        return self._spec.run.accepts(target) and (
            not self._is_on_trial or self._environment.trials.may_begin(target, self._environment.now_s())
        )

    def _restrictions(self) -> Restrictions:
        """What keeps targets from this sequence beside its length: those it has tried, and what its run is bound to."""
        bound_to = {self._spec.run.weights_digest} - {None}
        return frozenset(self._tried) | bound_to | ({ON_TRIAL} if self._is_on_trial else set())

    def _rank_targets(self) -> list[WorkerRecord]:
        environment = self._environment
        ranked = environment.router.rank_targets(
            environment.snapshot(),
            environment.now_s(),
            model=self._spec.model,
            num_tokens=self._spec.num_tokens_max,
            excluded=self._tried,
            prefix=self._prefix,
            accepts=self._accepts,
        )
        preferred = self._preferred
        if preferred in ranked and environment.router.has_room(preferred):
            return [preferred, *(worker for worker in ranked if worker != preferred)]
        return ranked

    def _is_hopeless(self) -> bool:
        """Whether all targets have been tried. One that did not answer somebody else a moment ago may answer soon."""
        environment = self._environment
        return not environment.router.expects_target(
            environment.snapshot(),
            model=self._spec.model,
            num_tokens=self._spec.num_tokens_max,
            excluded=self._tried,
            accepts=self._spec.run.accepts,
        )

    async def _run_attempt(self, attempt: Attempt) -> AsyncGenerator[News]:
        try:
            async with attempt:
                attempt.apply(self._controller.start())
                try:
                    async with aclosing(attempt.events()) as events:
                        async for event in events:
                            for item in self._take(event, attempt):
                                yield item
                            if self._is_finished:
                                return
                except WorkerLost as error:
                    if not isinstance(error, WorkerUnreached | LostByOwnPause) and not self._is_leaving(
                        attempt.target
                    ):
                        self._broke_at = attempt.target
                    raise
        finally:
            self._end_trial()

    def _take(self, event: target_pb2.GenerateEvent, attempt: Attempt) -> list[News]:
        """Moves the request on by one event. What comes back goes to the client."""
        match event.WhichOneof("event"):
            case "started":
                self._decoding_mode = event.started.decoding_mode
                return []
            case "prompt":
                self._prompt.add(event.prompt)
                return []
            case "step":
                # Before anything changes: a replay has to begin where this step did.
                if self._sampling.HasField("num_logprobs") and (
                    len(event.step.logprobs) != len(event.step.token_ids)
                ):
                    raise WorkerFailed(
                        f"target worker {attempt.target.worker_id} sent tokens without log probabilities"
                    )
                shown = self._prompt.shown()
                # Where nothing is to be said, or a target counts max_tokens anew after a replay.
                if len(self._output.token_ids) >= self._spec.max_tokens:
                    return [*shown, self._finish("length", None)]
                visible = self._take_step(event.step, attempt)
                stop = self._output.stop_string
                return [*shown, *visible, *([] if stop is None else [self._finish("stop", stop)])]
            case "finished":
                return [*self._prompt.shown(), self._take_end(event.finished, attempt)]
            case _:
                return []  # a kind of event that a newer target may send

    def _take_end(self, finished: target_pb2.SessionFinished, attempt: Attempt) -> Finished:
        self.times.queue_ms = self._waited_ms + finished.queue_ms
        self.times.prefill_ms = finished.prefill_ms
        # What an earlier target counted of its part is lost with it.
        self.counts.add_end(finished.stats, is_complete=not attempt.is_replay)
        if not attempt.is_replay:
            self._num_cached_tokens = finished.num_cached_tokens
        num_output = len(self._output.token_ids)
        if self._spec.max_tokens == 0:
            return self._finish("length", None)
        if finished.reason == target_pb2.FINISH_REASON_NO_TOKEN:
            names = self._spec.forbidding_parameters(num_output)
            raise InvalidRequest(
                names[0] if len(names) == 1 else None,
                f"the parameters together leave no token that could follow after {num_output} tokens of output; the "
                f"ones that forbid tokens here are: {', '.join(names) or 'none of the request'}",
            )
        is_stop = finished.reason == target_pb2.FINISH_REASON_STOP
        stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
        return self._finish("stop" if is_stop else "length", stop_token_id)

    def _take_step(self, step: target_pb2.StepOutput, attempt: Attempt) -> list[News]:
        environment = self._environment
        metrics, model = environment.metrics, self._spec.model
        gap_s = self.times.chunk(environment.now_s())
        if not self._spec.is_background:
            environment.limits.owe(self._spec.request.origin.caller, len(step.token_ids))
            if gap_s is not None:
                metrics.observe_gap(model, gap_s)
        self.counts.add_step(step.num_draft_tokens, step.num_accepted_draft_tokens)
        environment.admission.count_output(model, self._ticket.tenant, len(step.token_ids))
        if step.num_draft_tokens:
            metrics.observe_step(model, step.num_draft_tokens, step.num_accepted_draft_tokens)
            self._watch(attempt.draft, step.num_draft_tokens, step.num_accepted_draft_tokens)
        room = self._spec.max_tokens - len(self._output.token_ids)
        visible = self._show(step.token_ids[:room], step.origins[:room], step.logprobs[:room])
        run = self._spec.run
        if (self._trial or run.num_losses) and not self._has_gone_beyond:
            self._has_gone_beyond = self._num_tokens_here > self._num_trial_tokens
            if self._has_gone_beyond:
                self._end_trial()
                environment.poison.excuse(self._prompt_digest, run.killed)
                environment.losses.tell_soon()
        state = self._controller.state
        actions = self._controller.on_step(
            len(step.token_ids),
            step.num_draft_tokens,
            step.num_accepted_draft_tokens,
            gap_s=gap_s,
            is_resting=step.is_resting,
        )
        attempt.apply(actions)
        self._count_move(state)
        return visible

    def _watch(self, draft: WorkerRecord | None, num_draft_tokens: int, num_accepted: int) -> None:
        environment = self._environment
        if draft is None:
            return
        finding = environment.watch.observe(draft, self._spec.model, num_draft_tokens, num_accepted)
        if finding is not None:
            _log.log(logging.ERROR if finding.is_alarm else logging.INFO, "%s", finding)
            environment.metrics.show_draft_alarms(environment.watch.alarms)

    def _show(
        self,
        token_ids: Sequence[int],
        origins: Sequence[common_pb2.TokenOrigin],
        logprobs: Sequence[common_pb2.TokenLogprobs],
    ) -> list[News]:
        """In two parts where the client has the first one already."""
        num_repeated = min(max(self._point.num_tokens - len(self._output.token_ids), 0), len(token_ids))
        if self._point.has_ended:
            num_repeated = len(token_ids)
        shown: list[News] = []
        for part, is_repeat in ((slice(0, num_repeated), True), (slice(num_repeated, None), False)):
            if token_ids[part] and self._output.stop_string is None:
                shown.append(self._push(token_ids[part], origins[part], logprobs[part], is_repeat=is_repeat))
        return shown

    def _push(
        self,
        token_ids: Sequence[int],
        origins: Sequence[common_pb2.TokenOrigin],
        logprobs: Sequence[common_pb2.TokenLogprobs],
        *,
        is_repeat: bool,
    ) -> VisibleOutput:
        visible = self._output.push(token_ids, origins, logprobs)
        return dataclasses.replace(visible, is_repeat=True) if is_repeat else visible

    def _lose_draft(self, attempt: Attempt) -> None:
        state = self._controller.state
        attempt.apply(self._controller.on_no_draft())
        self._count_move(state)

    def _show_state(self) -> None:
        controller = self._controller
        is_undrafted = (
            controller.state is FallbackState.PAUSED and controller.last_trigger is Trigger.NO_DRAFT
        )
        shown = "undrafted" if is_undrafted else controller.state.name.lower()
        self._environment.metrics.move_fallback(self._spec.model, self._shown_state, shown)
        self._shown_state = shown

    def _count_move(self, before: FallbackState) -> None:
        metrics, controller = self._environment.metrics, self._controller
        self._show_state()
        if controller.state is before:
            return
        metrics.fallback_transitions.labels(controller.state.name.lower()).inc()
        why = "" if controller.last_trigger is None else controller.last_trigger.name.lower()
        self._spec.span.event("fallback", {"state": controller.state.name.lower(), "because": why})
        if before is FallbackState.PROBING:
            assert isinstance(controller.last_trigger, Trigger)
            metrics.count_probe(self._spec.model, controller.last_trigger.name.lower())

    def _finish(self, reason: str, stop_reason: str | int | None) -> Finished:
        text = self._output.finish()
        if self._output.stop_string is not None:  # completed by a character that only the end made visible
            reason, stop_reason = "stop", self._output.stop_string
        self.times.end_s = self._environment.now_s()
        self._is_finished = True
        num_prompt, num_output = len(self._spec.prompt_token_ids), len(self._output.token_ids)
        return Finished(
            text=text, finish_reason=reason, stop_reason=stop_reason, num_prompt_tokens=num_prompt,
            num_output_tokens=num_output, decoding_mode=self._decoding_mode, counts=self.counts, times=self.times,
            num_cached_tokens=self._num_cached_tokens, is_repeat=self._point.has_ended,
        )  # fmt: skip

    def _speculation(self) -> common_pb2.SpeculationParams:
        speculation = self._spec.request.speculation
        is_listening = self._controller.is_listening
        return dataclasses.replace(speculation, enabled=is_listening, is_plain=self._is_plain).to_proto()

    def _committed(self) -> list[int]:
        return [*self._spec.prompt_token_ids, *self._output.token_ids]
