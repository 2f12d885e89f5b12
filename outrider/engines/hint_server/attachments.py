"""Attaches the engine's open requests to draft workers, in a coordinator's place. Runs on the event loop.

While a request is open, one task keeps it attached: to another worker, or to the same one again, when a worker fails or
falls silent. Every attempt has a higher attachment number, so that hints of the one before count no more. A worker that
cannot follow the request, since its context is too short or it lacks a token, is not asked for it again; others may.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from outrider.concurrency.background import end_tasks
from outrider.engines.hint_server.draft_pool import DraftPool, DraftWorker
from outrider.security.tls import Dialer, Role
from outrider.worker.rpc import CHANNEL_OPTIONS
from protos.outrider.v1 import draft_pb2, draft_pb2_grpc

logger = logging.getLogger(__name__)

SHORTEST_S: Final = 0.01
"""Least time between two attempts for one request, seconds."""
SILENT_S: Final = 5.0
"""A draft worker reports once a second; one that is silent for so long is given up."""
MAX_ATTEMPTS: Final = 4
"""Attachments that are tried at once, oldest requests first. Where all draft workers are full, the others wait without
asking."""
_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_UNSUITED: Final = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE})
"""A healthy worker cannot take this request. Another one may: contexts and vocabularies of draft workers differ."""
_REFUSED: Final = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}
)


class _UnsuitedError(Exception):
    """This draft worker cannot follow this request, or cannot follow it any further."""


class _Attempt:
    """One attempt to attach, of which only so many are under way at once."""

    def __init__(self, attempts: asyncio.Semaphore) -> None:
        self._attempts = attempts
        self._is_under_way = False

    async def begin(self) -> None:
        """Does nothing while it is under way."""
        if not self._is_under_way:
            await self._attempts.acquire()
            self._is_under_way = True

    def end(self) -> None:
        """May be called more than once."""
        if self._is_under_way:
            self._is_under_way = False
            self._attempts.release()


class Attachments:
    """The attachments of one engine's open requests."""

    def __init__(
        self,
        pool: DraftPool,
        dialer: Dialer,
        reached_by: Callable[[str], str],
        tokenizer_fingerprint: str,
        now: Callable[[], float],
    ) -> None:
        """`reached_by` is the engine's address for the draft worker at an address, and may raise OSError; `now` is a
        clock, seconds."""
        self._pool = pool
        self._dialer = dialer
        self._reached_by = reached_by
        self._fingerprint = tokenizer_fingerprint
        self._now = now
        self._attempts = asyncio.Semaphore(MAX_ATTEMPTS)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}  # by address: version of the certificates

    def open(self, number: int, announcement: draft_pb2.AttachRequest, committed: Callable[[int], list[int]]) -> None:
        """Keeps a request attached until `close`. `committed` gives its tokens, [] once it has ended."""
        task = asyncio.create_task(self._keep_attached(number, announcement, committed), name=f"attachment {number}")
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def close(self, number: int) -> None:
        """Detaches a request."""
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()

    async def end(self) -> None:
        await end_tasks(*self._tasks.values())
        for _, channel in self._channels.values():
            await channel.close(grace=None)

    async def _keep_attached(
        self, number: int, announcement: draft_pb2.AttachRequest, committed: Callable[[int], list[int]]
    ) -> None:
        request = draft_pb2.AttachRequest()
        request.CopyFrom(announcement)
        request.tokenizer_fingerprint = self._fingerprint
        request.num_prompt_tokens = request.num_prompt_tokens or len(request.token_ids)
        unsuited = set[DraftWorker]()
        while True:
            attempt = _Attempt(self._attempts)
            try:
                worker = await self._one_that_is_there(attempt, unsuited)
                token_ids = committed(number)
                if not token_ids:
                    return
                request.attachment += 1
                del request.token_ids[:]
                request.token_ids.extend(token_ids)
                if await self._hold(worker, request, attempt.end):
                    return
            except _UnsuitedError as error:
                unsuited.add(worker)
                logger.info("draft worker %s cannot follow session %s: %s", worker.address, request.session_id, error)
            finally:
                attempt.end()
            await asyncio.sleep(SHORTEST_S)

    async def _one_that_is_there(self, attempt: _Attempt, unsuited: set[DraftWorker]) -> DraftWorker:
        """Begins the attempt. Waits for as long as there is no worker beside the unsuited ones: names of draft workers
        may stand for others later."""
        await attempt.begin()
        while (worker := self._pool.choose(self._now(), unsuited)) is None:
            if unsuited:
                attempt.end()  # there may be a worker for other requests
            await asyncio.sleep(self._pool.wait_s(self._now(), unsuited) + SHORTEST_S)
            await attempt.begin()
        return worker

    async def _hold(self, worker: DraftWorker, request: draft_pb2.AttachRequest, on_answer: Callable[[], None]) -> bool:
        """Holds one attachment; calls `on_answer` when the worker answers. Returns whether the request has ended.

        Raises _UnsuitedError if this worker cannot take the request any more."""
        try:
            request.target_address = self._reached_by(worker.address)
            if await self._follow(worker, request, on_answer):
                return True
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNSUITED:
                raise _UnsuitedError(error.details() or error.code().name) from error
            self._note(worker, error.code(), error.details() or "")
        except TimeoutError:
            self._note(worker, grpc.StatusCode.DEADLINE_EXCEEDED, f"silent for {SILENT_S:g} s")
        except OSError as error:
            self._note(worker, grpc.StatusCode.UNAVAILABLE, f"no way to it: {error}")
        else:
            raise _UnsuitedError("it ended the attachment")
        return False

    async def _follow(
        self, worker: DraftWorker, request: draft_pb2.AttachRequest, on_answer: Callable[[], None]
    ) -> bool:
        """Holds one attachment; returns whether the draft worker saw the request's end, else it ended the attachment
        itself. Raises AioRpcError, and TimeoutError when the worker falls silent."""
        call = draft_pb2_grpc.DraftStub(await self._channel(worker.address)).Attach(request)
        worker.num_sessions += 1
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    status: Any = await call.read()
                on_answer()
                if status is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return False
                if worker.num_failures:
                    logger.info("draft worker %s is back", worker.address)
                self._pool.succeed(worker)
                if status.is_finished:
                    return True
        finally:
            worker.num_sessions -= 1
            call.cancel()
            if not worker.num_sessions and worker not in self._pool.workers:  # its name resolves to others now
                await self._close_channel(worker.address)

    async def _close_channel(self, address: str) -> None:
        known = self._channels.pop(address, None)
        if known is not None:
            await known[1].close(grace=None)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        """The channel to a draft worker, opened with the current certificates."""
        version = self._dialer.version
        known = self._channels.get(address)
        if known is not None and known[0] == version:
            return known[1]
        made = self._dialer.open(address, Role.DRAFT, _OPTIONS)
        self._channels[address] = version, made
        if known is not None:
            await known[1].close(grace=SILENT_S)
        return made

    def _note(self, worker: DraftWorker, code: grpc.StatusCode, details: str) -> None:
        """Takes a failure, and reports the first of several in a row."""
        now = self._now()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._pool.fill(worker, now)
        elif code in _REFUSED:
            if self._pool.refuse(worker, now):
                logger.warning("draft worker %s does not draft for this engine: %s", worker.address, details)
        elif self._pool.fail(worker, now):
            logger.warning("draft worker %s is lost (%s %s); trying again", worker.address, code.name, details)
