"""A client that knows the right text and compares every token as it comes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc
import grpc.aio

from outrider.sampling_params import GrammarKind, GrammarSpec
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.simulation.answers import Answer, answers_to, letters
from tests.simulation.calls import LOSSES, Call
from tests.simulation.models import logprob_of
from tests.simulation.network import Network, Process
from tests.simulation.scenario import Request

_RETRY_S: Final = (0.2, 1.0)
_LOST_WORKERS_MAX: Final = 3
_STRANDED_MAX: Final = 3
_COMES_BACK_MAX: Final = 8
"""How often a persistent client sends its request in spite of refusals."""

_IDENTITY_CODES: Final = (
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
)
"""Status codes of a refused resumption that would have continued another run."""
_STALL_CODES: Final = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)


class Surroundings(Protocol):
    """A client's view of the world, and the judge's knowledge of its request."""

    network: Network

    def first_word_within_s(self, request: Request) -> float:
        """Seconds within which a coordinator that is reachable must send the first chunk."""

    @property
    def waits_briefly(self) -> bool:
        """Whether a sequence that has begun may be given up for lack of a target."""

    def find_coordinator(self) -> str | None:
        """The address of a coordinator that a load balancer would pick; None if there is none."""

    def wrong(self, problem: str) -> None:
        """Reports a violation."""

    def could_be_in_time(self, num_tokens: int, left_s: float) -> bool:
        """Whether so many tokens can certainly be generated within `left_s`, if nothing delays them."""

    def seeds_of(self, request: Request) -> Sequence[int]:
        """Seeds with which targets have been asked for the request."""

    def weights_of(self, request: Request) -> Sequence[int]:
        """Weights that may have generated the request's output."""

    def on_tokens(self, request: Request) -> None:
        """Records that the client has received some of the output."""

    def num_attempts(self, request: Request) -> int:
        """How often all coordinators together have asked targets for the request."""


@dataclass
class _Choice:
    """The part of one choice that the client has received so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    has_begun: bool = False
    has_ended: bool = False

    @property
    def point(self) -> generation_pb2.ResumePoint:
        return generation_pb2.ResumePoint(
            num_tokens=len(self.token_ids), has_begun=self.has_begun, has_ended=self.has_ended
        )


@dataclass
class Client:
    """Sends its request, again where it was refused, until it has its answer or leaves."""

    request: Request
    world: Surroundings
    process: Process
    chance: random.Random
    outcome: str = ""
    num_tries: int = 0
    num_refusals: int = 0
    num_reconnects: int = 0
    num_anew: int = 0  # runs begun because an earlier one could not be gone on with
    _choices: list[_Choice] = field(default_factory=list)
    _num_before: int = 0  # tokens that earlier connections have brought
    _attempts_before: int = 0
    _is_forgotten: bool = False  # the journal does not have it
    _num_stranded: int = 0
    _num_chunks: int = 0
    _has_stalled: bool = False
    _is_stalled_now: bool = False
    _run: str = ""  # the fingerprint that the chunks carried

    def __post_init__(self) -> None:
        self._choices = [_Choice() for _ in range(self.request.num_choices)]
        if self.request.is_liar:
            answer = Answer.to(self.request, 0, self.request.seed, 0)
            first = answer.token_ids[:1]
            self._choices = [_Choice(list(first), letters(first), has_begun=True)]
            self._run = "0" * 12 + "-" + "0" * 12  # which looks as those do that coordinators make

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def _has_begun(self) -> bool:
        return any(choice.has_begun for choice in self._choices)

    async def run(self) -> None:
        if self.request.leaves_after_s is None:
            await self._until_answered()
            return
        try:
            async with asyncio.timeout(self.request.leaves_after_s):
                await self._until_answered()
        except TimeoutError:
            self.outcome = "left"

    async def _until_answered(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.outcome:
            address = self.world.find_coordinator()
            if address is not None:
                await self._try(address, loop.time())
            if not self.outcome:
                await asyncio.sleep(self.chance.uniform(*_RETRY_S))

    async def _try(self, address: str, started_s: float) -> None:
        self.num_tries += 1
        self._num_before = self.num_tokens
        self._attempts_before = self.world.num_attempts(self.request)
        call = self.world.network.stream(
            self.process, address, "Generation/Generate", self._message(), generation_pb2.GenerationChunk
        )
        stays_s = self.request.stays_s or None
        try:
            async with asyncio.timeout(stays_s):
                await self._read(call)
            if not self.outcome:
                self.wrong("ended without its end")
                self.outcome = "wrong"
        except TimeoutError:
            self._come_back_or("left")
        except grpc.aio.AioRpcError as error:
            self._take_error(error, asyncio.get_running_loop().time() - started_s)
        finally:
            call.cancel()

    async def _read(self, call: Call) -> None:
        loop, request = asyncio.get_running_loop(), self.request
        self._num_chunks, self._is_stalled_now = 0, False
        asked_s = loop.time()
        async for chunk in call:
            if not self._num_chunks and loop.time() - asked_s > self.world.first_word_within_s(request):
                self.wrong(f"had no word for {loop.time() - asked_s:.0f} s")
            self._num_chunks += 1
            self._take(chunk)
            if self._num_chunks == request.stalls_after and not self._has_stalled:
                self._has_stalled = self._is_stalled_now = True
                await asyncio.sleep(request.stalls_s)

    def wrong(self, problem: str) -> None:
        self.world.wrong(f"request {self.request.number} {problem}")

    def _take(self, chunk: generation_pb2.GenerationChunk) -> None:
        choice = self._choices[chunk.index]
        choice.has_begun = True
        self._run = chunk.run
        choice.token_ids += chunk.token_ids
        if chunk.token_ids:
            self.world.on_tokens(self.request)
        choice.text += chunk.text
        if self.request.has_logprobs:
            got = [each.logprob for each in chunk.logprobs]
            if got != (expected := [logprob_of(token_id) for token_id in chunk.token_ids]):
                self.wrong(f"got log probabilities {got}, right are {expected}")
        answers = self._fitting(chunk.index)
        if answers:
            self._check_end(chunk, choice, answers)
        elif not self.outcome:
            right = [list(answer.token_ids) for answer in self._answers(chunk.index)][:3]
            self.wrong(f"has tokens {choice.token_ids}, text {choice.text!r}; right are {right}")

    def _fitting(self, index: int) -> list[Answer]:
        """The answers that what has come may become."""
        choice = self._choices[index]
        num, text = len(choice.token_ids), choice.text
        return [
            answer
            for answer in self._answers(index)
            if answer.token_ids[:num] == tuple(choice.token_ids) and answer.text.startswith(text)
        ]

    def _answers(self, index: int) -> list[Answer]:
        request = self.request
        seeds = self.world.seeds_of(request) if request.is_seed_drawn else (request.seed,)
        weights = tuple(self.world.weights_of(request))
        if not request.is_seed_drawn:
            return list(answers_to(request, index, request.seed, weights))
        # With what any choice was asked for: which of them it was is not told there.
        return [answer for seed in seeds for answer in answers_to(request, 0, seed, weights)]

    def _check_end(self, chunk: generation_pb2.GenerationChunk, choice: _Choice, answers: Sequence[Answer]) -> None:
        if not chunk.HasField("finished"):
            return
        finished = chunk.finished
        got = (tuple(choice.token_ids), choice.text, finished.finish_reason, finished.num_output_tokens)
        right = [(each.token_ids, each.text, each.finish_reason, len(each.token_ids)) for each in answers]
        if got not in right:
            self.wrong(f"ended as {got}, right is {right}")
        choice.has_ended = True
        if all(each.has_ended for each in self._choices):
            self.outcome = "answered"

    # What may go wrong.

    def _take_error(self, error: grpc.aio.AioRpcError, elapsed_s: float) -> None:
        code, details, request = error.code(), error.details(), self.request
        has_grown = self.num_tokens > self._num_before
        if details in LOSSES:  # the coordinator is gone
            self.num_reconnects += 1
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._check_late(elapsed_s, details, has_grown=has_grown)
            self._come_back_or("late")
        elif self._is_stalled_now and code in _STALL_CODES:
            self.num_refusals += 1
        elif has_grown and self._may_be_given_up(code):
            self.num_refusals += 1
            self._num_stranded += 1
            if request.poisons_after or self._num_stranded >= _STRANDED_MAX:
                self._come_back_or("given up")
        elif code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            # Of several choices one that has not begun may be refused, and with it the others.
            if has_grown and request.num_choices == 1:
                self.wrong(f"was given up after {self.num_tokens} tokens: {details}")
            self.num_refusals += 1
            if request.poisons_after or (self._has_begun and self._may_be_stranded()):
                self._come_back_or("given up")
        elif code in _IDENTITY_CODES and self._may_begin_anew():
            self._begin_anew()
        elif code is grpc.StatusCode.NOT_FOUND and self._has_begun and not self._is_forgotten:
            self._is_forgotten = True
        else:
            self.wrong(f"failed: {code.name} {details}")
            self.outcome = "wrong"

    def _check_late(self, elapsed_s: float, details: str | None, *, has_grown: bool) -> None:
        left_s = self.request.deadline_s - elapsed_s
        # A worker that cannot be in time says so before any work; of stop strings it knows nothing.
        num_tokens = self.request.max_tokens
        if not self.request.ignore_eos:
            num_tokens = min(len(each.token_ids) for each in self._answers(0) or [Answer((), "", "")])
        is_early = left_s > 0.01 and self.world.could_be_in_time(num_tokens - self.num_tokens, left_s)
        # Where there are several choices, one may be refused while another one has begun.
        has_grown = has_grown and self.request.num_choices == 1
        if is_early or (left_s > 0.01 and has_grown):
            self.wrong(f"was late after {elapsed_s:g} s: {details}")

    def _may_be_given_up(self, code: grpc.StatusCode) -> bool:
        """Whether a sequence that has begun may end: after as many lost workers as one may have, or where none is left
        that has its weights, or has room for it within the brief time that it waits then."""
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self.world.waits_briefly
        if code is not grpc.StatusCode.UNAVAILABLE:
            return False
        # What the journal knows of a run that goes on counts, and with another coordinator too.
        num_before = 0 if self._has_begun else self._attempts_before
        num_attempts = self.world.num_attempts(self.request) - num_before
        has_several = len(self.world.weights_of(self.request)) > 1
        return num_attempts >= _LOST_WORKERS_MAX or has_several or self.world.waits_briefly

    def _may_be_stranded(self) -> bool:
        self._num_stranded += len(self.world.weights_of(self.request)) > 1
        return self._num_stranded >= 3 * _STRANDED_MAX

    def _may_begin_anew(self) -> bool:
        """Whether nobody may know any more what its text was to be."""
        request = self.request
        has_several = len(self.world.weights_of(request)) > 1
        is_unsure = request.is_seed_drawn or request.request_id or request.is_liar or has_several
        return self._has_begun and bool(is_unsure) and self.num_anew < 20

    def _come_back_or(self, outcome: str) -> None:
        if self.request.comes_back and self.num_tries < _COMES_BACK_MAX:
            self._begin_anew()
        else:
            self.outcome = outcome

    def _begin_anew(self) -> None:
        self.num_anew += 1
        self._is_forgotten, self._run = False, ""
        self._choices = [_Choice() for _ in range(self.request.num_choices)]

    def _message(self) -> generation_pb2.GenerationRequest:
        """The request, or what it takes to go on with it; now and then without what the journal should have."""
        request = self.request
        request_id = request.name if not self.num_anew else f"r{request.number} {self.num_anew}"
        points = [choice.point for choice in self._choices] if self._has_begun else []
        # Of two that share an id, or two runs of which one may have other weights, each has to say which it is.
        is_known = not (request.request_id or request.is_liar)
        is_by_id = len(self.world.weights_of(request)) > 1 or self.chance.random() < 0.5
        if points and not self._is_forgotten and is_known and is_by_id:
            return generation_pb2.GenerationRequest(
                request_id=request_id, resume_from=points, tenant=request.tenant_name, run=self._run
            )
        is_sampled = bool(request.seed or request.is_seed_drawn)
        sampling = common_pb2.SamplingParams(
            temperature=1.0 if is_sampled else 0.0,
            top_p=1.0,
            seed=request.seed or None,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            num_logprobs=0 if request.has_logprobs else None,
        )
        if request.grammar:
            sampling.grammar.CopyFrom(GrammarSpec(GrammarKind.REGEX, request.grammar).to_proto())
        return generation_pb2.GenerationRequest(
            request_id=request_id,
            prompt_token_ids=generation_pb2.TokenPrompt(token_ids=request.prompt),
            sampling=sampling,
            speculation=request.speculation.to_proto(),
            stop=[request.stop] if request.stop else [],
            n=request.num_choices,
            deadline_ms=int(request.deadline_s * 1000),
            priority=request.rank,
            tenant=request.tenant_name,
            resume_from=points,
            run=self._run,
        )
