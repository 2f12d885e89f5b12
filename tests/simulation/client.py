"""A client that knows the right text and compares every token as it comes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio

from protos.outrider.v1 import common_pb2, generation_pb2
from tests.simulation.network import LOSSES, Network, Process
from tests.simulation.scenario import Request
from tests.target_worker.fakes import END, greedy_text

_RETRY_S: Final = (0.2, 1.0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What has to come."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str

    @classmethod
    def to(cls, request: Request) -> Answer:
        stop_ids = frozenset[int]() if request.ignore_eos else frozenset({END})
        whole, stop_token_id = greedy_text(
            request.prompt, len(request.prompt) + request.max_tokens, stop_ids, request.seed
        )
        output = whole[len(request.prompt) :]
        text = "".join("abcde"[token_id] for token_id in output)
        found = text.find(request.stop) if request.stop else -1
        if found >= 0:
            return cls(tuple(output[: found + len(request.stop)]), text[:found], "stop")
        return cls(tuple(output), text, "length" if stop_token_id is None else "stop")


@dataclass
class Client:
    """Sends its request, again where it was refused, until it has its answer or leaves."""

    request: Request
    network: Network
    process: Process
    chance: random.Random
    find_coordinator: Callable[[], str | None]  # what a load balancer knows
    on_wrong: Callable[[str], None]
    could_be_in_time: Callable[[int, float], bool]
    outcome: str = ""
    num_refusals: int = 0
    num_reconnects: int = 0
    _token_ids: list[int] = field(default_factory=list)
    _text: str = ""
    _has_begun: bool = False
    _num_before: int = 0  # tokens that earlier connections have brought
    _is_forgotten: bool = False  # the journal does not have it
    _run: str = ""  # the fingerprint that the chunks carried

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

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
            address = self.find_coordinator()
            if address is not None:
                await self._try(address, loop.time())
            if not self.outcome:
                await asyncio.sleep(self.chance.uniform(*_RETRY_S))

    async def _try(self, address: str, started_s: float) -> None:
        answer = Answer.to(self.request)
        self._num_before = len(self._token_ids)
        call = self.network.stream(
            self.process, address, "Generation/Generate", self._message(), generation_pb2.GenerationChunk
        )
        try:
            async for chunk in call:
                self._take(chunk, answer)
            if not self.outcome:
                self.on_wrong(f"request {self.request.number} ended without its end")
                self.outcome = "wrong"
        except grpc.aio.AioRpcError as error:
            self._take_error(error, asyncio.get_running_loop().time() - started_s)
        finally:
            call.cancel()

    def _take(self, chunk: generation_pb2.GenerationChunk, answer: Answer) -> None:
        self._has_begun = True
        self._run = chunk.run
        self._token_ids += chunk.token_ids
        self._text += chunk.text
        number = self.request.number
        if tuple(self._token_ids) != answer.token_ids[: len(self._token_ids)]:
            self.on_wrong(f"request {number}: tokens {self._token_ids}, right are {list(answer.token_ids)}")
        if not answer.text.startswith(self._text):
            self.on_wrong(f"request {number}: text {self._text!r}, right is {answer.text!r}")
        if chunk.HasField("finished"):
            finished = chunk.finished
            got = (tuple(self._token_ids), self._text, finished.finish_reason, finished.num_output_tokens)
            right = (answer.token_ids, answer.text, answer.finish_reason, len(answer.token_ids))
            if got != right:
                self.on_wrong(f"request {number} ended as {got}, right is {right}")
            self.outcome = "answered"

    def _take_error(self, error: grpc.aio.AioRpcError, elapsed_s: float) -> None:
        number, code, details = self.request.number, error.code(), error.details()
        if details in LOSSES:  # the coordinator is gone
            self.num_reconnects += 1
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            left_s = self.request.deadline_s - elapsed_s
            # A worker that cannot be in time says so before any work; of stop strings it knows nothing.
            answer = Answer.to(self.request)
            num_tokens = self.request.max_tokens if self.request.ignore_eos else len(answer.token_ids)
            is_early = left_s > 0.01 and self.could_be_in_time(num_tokens - len(self._token_ids), left_s)
            if is_early or (left_s > 0.01 and len(self._token_ids) > self._num_before):
                self.on_wrong(f"request {number} was late after {elapsed_s:g} s: {details}")
            self.outcome = "late"
        elif code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            if len(self._token_ids) > self._num_before:
                self.on_wrong(f"request {number} was given up after {len(self._token_ids)} tokens: {details}")
            self.num_refusals += 1
        elif code is grpc.StatusCode.NOT_FOUND and self._has_begun and not self._is_forgotten:
            self._is_forgotten = True
        else:
            self.on_wrong(f"request {number} failed: {code.name} {details}")
            self.outcome = "wrong"

    def _message(self) -> generation_pb2.GenerationRequest:
        """The request, or what it takes to go on with it; now and then without what the journal should have."""
        request = self.request
        point = generation_pb2.ResumePoint(num_tokens=len(self._token_ids), has_begun=True)
        if self._has_begun and not self._is_forgotten and self.chance.random() < 0.5:
            return generation_pb2.GenerationRequest(
                request_id=f"r{request.number}", resume_from=[point], run=self._run
            )
        return generation_pb2.GenerationRequest(
            request_id=f"r{request.number}",
            prompt_token_ids=generation_pb2.TokenPrompt(token_ids=request.prompt),
            sampling=common_pb2.SamplingParams(
                temperature=1.0 if request.seed else 0.0,
                top_p=1.0,
                seed=request.seed or None,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_eos,
            ),
            speculation=request.speculation.to_proto(),
            stop=[request.stop] if request.stop else [],
            deadline_ms=int(request.deadline_s * 1000),
            priority=request.number % 3 - 1,
            tenant=f"tenant {request.number % 2}",
            resume_from=[point] if self._has_begun else [],
            run=self._run,
        )


def texts_of(requests: Sequence[Request], length: int) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """What follows each prompt with each seed, ends of sequence included: whatever a session holds begins it."""
    keys = {(request.prompt, request.seed) for request in requests}
    return {key: greedy_text(key[0], length, frozenset(), key[1])[0] for key in keys}
