"""Resumable streams: finds those of other replicas in the journal, and lets requests go on with them.

A client that resumes sends its request again with its position (`coordinator.recovery.resumption`). This claim is
compared with the journal and with the request itself, and proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Final

from coordinator.access.api_keys import Caller
from coordinator.intake.generation_request import (
    GenerationInput,
    GenerationSpec,
    Origin,
    check_request_id,
    identified,
)
from coordinator.intake.run_identity import RunIdentity
from coordinator.recovery.journal import FLUSH_S, Journal
from coordinator.recovery.journal_entry import JournaledStream, JournalEntry
from coordinator.recovery.poison import LOSSES_MAX
from coordinator.recovery.resumption import Claim, Resumption
from outrider.errors import Conflict, InvalidRequest, ModelNotFound, NotFound, RegistryUnavailable, Unavailable
from outrider.sampling_params import DecodingMode

_log = logging.getLogger(__name__)

_WRITE_S: Final = 0.1  # for a journal write to arrive


@dataclass(frozen=True, slots=True)
class Recollection:
    """The journal's knowledge of a stream."""

    entry: JournalEntry | None
    is_away: bool = False  # the journal cannot be read

    def has_begun(self, claim: Claim | None) -> bool:
        """Whether the run of the client's claim has tokens, by the journal."""
        return claim is not None and any(self.tokens_of(claim))

    def tokens_of(self, claim: Claim) -> tuple[Sequence[int], ...]:
        """The run's tokens of each sequence; none if the journal has another run."""
        entry, run = self.entry, (claim.request_digest, claim.weights_digest)
        return entry.token_ids if entry and (entry.request_digest, entry.weights_digest) == run else ()

    def num_losses(self, request_digest: str) -> int:
        """Number of workers that this request has cost already, with any weights; 0 if the journal has another
        request."""
        entry = self.entry
        return 0 if entry is None or entry.request_digest != request_digest else entry.num_losses


@contextmanager
def hiding_model(request_id: str, caller: Caller) -> Iterator[None]:
    """Resumes a stream by its id alone: one whose model the caller may not use is as one that does not exist. Raises
    NotFound."""
    try:
        yield
    except ModelNotFound:
        if caller.models is None:
            raise
        raise _no_stream(request_id) from None


class ResumableStreams:
    """Writes this replica's streams to the journal, and finds those of others there."""

    def __init__(self, check_new: Callable[[Caller], Awaitable[None]]) -> None:
        """`check_new` checks a request that finds no stream as one that begins none; raises Overloaded."""
        self.journal: Journal | None = None  # None without a registry
        self._check_new = check_new

    @property
    def is_degraded(self) -> bool:
        """Whether the journal cannot be written."""
        return self.journal is not None and self.journal.is_degraded

    def begin(self, spec: GenerationSpec, entry: JournalEntry | None, *, is_resumed: bool) -> JournaledStream | None:
        """Begins the stream's entry in the journal; None if it is not kept. A new run then also clears an earlier one's
        entry under its id."""
        if entry is None or self.journal is None:
            return None
        journal_id, stream = _journal_id(spec.request), None
        if spec.num_candidates == spec.num_choices:
            entry = replace(
                entry,
                request_digest=spec.run.request_digest,
                seed=spec.sampling.seed,
                max_tokens=spec.max_tokens,
                num_losses=spec.run.num_losses,
            )
            tenant = spec.request.origin.caller.tenant
            stream = self.journal.begin(journal_id, entry, spec.deadline_s, tenant)
        if stream is not None:  # at once: a run may lose its workers before it has shown anything
            spec.run.on_loss = partial(_write_losses, stream, spec.run)
        elif not is_resumed:
            self.journal.forget(journal_id, spec.deadline_s)
        return stream

    async def recall(self, request_id: str, caller: Caller) -> Recollection:
        """Reads the entry of a stream that another replica may have begun; another tenant's counts as none. Raises
        InvalidRequest."""
        check_request_id(request_id)
        if self.journal is None:
            return Recollection(None)
        try:
            entry = await self.journal.load(_journal_id(GenerationInput(request_id=request_id, origin=Origin(caller))))
        except RegistryUnavailable as error:
            _log.warning("request %s cannot be looked up: %s", request_id, error.message)
            return Recollection(None, is_away=True)
        return Recollection(entry)

    async def look_up(self, request_id: str, caller: Caller) -> Recollection:
        """Finds an existing entry. Raises InvalidRequest, NotFound if there is none, Unavailable if the journal cannot
        be read, and Overloaded if there is none yet and the tenant has used up its limits."""
        recollection = await self.recall(request_id, caller)
        if recollection.entry is None and self.journal is not None and not recollection.is_away:
            await self._check_new(caller)  # only a stream that has begun may be owed for
            await asyncio.sleep(FLUSH_S + _WRITE_S)  # one that has just begun is being written
            recollection = await self.recall(request_id, caller)
        if recollection.entry is None:
            if recollection.is_away:
                raise Unavailable(
                    f"the registry does not answer, so the stream {request_id} cannot be looked up; try again "
                    "later, or send the request again with the id of the last received event",
                    2.0,
                )
            raise _no_stream(request_id)
        return recollection

    def resume(
        self, spec: GenerationSpec, claim: Claim | None, recollection: Recollection
    ) -> tuple[GenerationSpec, Resumption]:
        """Restores the request as its run began, and the known part of its output. `claim` is None for a client that
        has seen nothing. Raises InvalidRequest if shown tokens cannot be generated again, Conflict if they are of
        another run, and Unavailable if only the journal would know, which cannot be read."""
        entry = recollection.entry
        restored = spec if entry is None else _restored(spec, entry)
        if claim is None:  # a new begin, with the same seed
            is_same = entry is not None and restored.run.request_digest == entry.request_digest
            spec = restored if is_same else spec
            spec.run.resume_with(recollection.num_losses(spec.run.request_digest))
            return spec, Resumption.of_nothing(spec.num_candidates)
        if spec.num_candidates > spec.num_choices:
            raise InvalidRequest("best_of", "with best_of above n a stream cannot be resumed")
        if spec.sampling.decoding_mode is DecodingMode.REJECTION:
            raise InvalidRequest(
                "seed",
                "a sampled output can be resumed only if the request has a seed; send it again as a new request",
            )
        found = [each for each in (restored, spec) if each.run.request_digest == claim.request_digest]
        if not found:
            if recollection.is_away and (spec.has_drawn_seed or spec.request.max_tokens is None):
                raise Unavailable(
                    f"the registry does not answer, so the beginning of the stream {spec.request.request_id} is "
                    "not known; try again later",
                    2.0,
                )
            raise _other_run(spec, recollection)
        spec = identified(found[0], claim.weights_digest)
        spec.run.resume_with(recollection.num_losses(claim.request_digest))
        known = recollection.tokens_of(claim)[: spec.num_choices]
        return spec, Resumption(claim.points, known + ((),) * (spec.num_choices - len(known)))


def _restored(spec: GenerationSpec, entry: JournalEntry) -> GenerationSpec:
    """The request with the values that were drawn or chosen when its run began, unless it gives them itself."""
    sampling, max_tokens = spec.sampling, spec.max_tokens
    if spec.request.sampling.seed is None:
        sampling = replace(sampling, seed=entry.seed)
    if spec.request.max_tokens is None and entry.max_tokens is not None:
        max_tokens = entry.max_tokens
        sampling = replace(sampling, max_tokens=max(max_tokens, 1))
    return identified(replace(spec, sampling=sampling, max_tokens=max_tokens))


def _other_run(spec: GenerationSpec, recollection: Recollection) -> Conflict:
    """The reason that a stream cannot go on with this request."""
    name = spec.request.request_id
    if recollection.entry is not None:
        why = "what was begun under this id is another request, or another run of it"
    elif spec.has_drawn_seed:
        why = "its seed was drawn by the server, and the journal that knew it is gone"
    else:
        why = "the request is not the one that the stream began with"
    return Conflict(
        f"the stream {name} cannot be resumed: {why}; send the request without the id of an event to begin anew",
        "request_id",
    )


def _write_losses(stream: JournaledStream, run: RunIdentity) -> None:
    stream.count_losses(LOSSES_MAX if run.is_blamed else run.num_losses)


def _journal_id(request: GenerationInput) -> str:
    """Key of a stream in the journal: clients choose request ids, and tenants do not see each other's."""
    tenant = request.origin.caller.tenant
    if tenant is None:
        return request.request_id
    return f"{sha256(tenant.encode()).hexdigest()[:16]}:{request.request_id}"


def _no_stream(request_id: str) -> NotFound:
    return NotFound(
        f"there is no stream {request_id} to resume: it ended a while ago, was too long to be kept, or never began; "
        "send the request again with the id of the last received event, or without one to start again",
        "request_id",
    )
