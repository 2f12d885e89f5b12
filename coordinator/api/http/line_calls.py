"""Runs the lines of batches as the API's own calls do, behind all other requests.

A line is read and answered by the code of the call that it names. It goes last in every queue, leaves slots of each
target free, and counts for no limit of its tenant's requests: batches have limits of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from coordinator.access.api_keys import Caller, Scope, TenantLimits
from coordinator.api.answer.openai_response import error_body
from coordinator.api.http.calls import CALLS, Asked, Referring
from coordinator.api.http.generation_calls import internal_error, whole_answer
from coordinator.api.http.http_transport import SMALL_BODY_BYTES, unless_small
from coordinator.api.schema.translated_body import renamed_errors
from coordinator.batches.batch import Batch
from coordinator.batches.batch_lines import LineResult
from coordinator.batches.batch_runner import Hold
from coordinator.batches.line_room import RoomSize
from coordinator.intake.generation_request import (
    PRIORITY_MAX,
    GenerationInput,
    GenerationSpec,
    Origin,
    check_input,
)
from coordinator.placement.routing import background_slots
from coordinator.recovery.journal_entry import Kind
from coordinator.service.generation_service import GenerationService
from coordinator.service.prompts import generate_each, num_sequences
from outrider.canary.plan import ANY_DRAFT
from outrider.errors import InvalidRequest, OutriderError, Unavailable
from outrider.objective import NO_OBJECTIVE
from outrider.sampling_params import BACKGROUND_PRIORITY

_log = logging.getLogger(__name__)

ENDPOINTS: Final[Mapping[str, Kind]] = MappingProxyType(
    {"/v1/completions": "completions", "/v1/chat/completions": "chat", "/v1/responses": "responses"}
)
"""The calls that a line may name."""
SEQUENCES_MAX: Final = 256
"""Most sequences of lines that a replica runs at once."""
LINES_PREFIX: Final = "batch:"  # of their tenant's name: their fair share is separate from that of its own requests


class LineCalls:
    """Lines of batches over one service."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        # One long line at a time: the threads for large requests, and the places to wait for them, are others' first.
        self._long_lines = asyncio.Semaphore(1)

    def check_body(self, batch: Batch, url: str, body: bytes) -> None:
        """Checks a line as far as its text tells. Raises InvalidRequest, or NotFound for the model."""
        asked = self._read(url, body, "line")
        with renamed_errors(asked.names):
            for each in asked.inputs:
                check_input(each)
        with suppress(Unavailable):  # there may be a target later
            self._service.catalog.find(asked.inputs[0].model, _caller_of(batch))

    def room(self) -> RoomSize:
        """How many sequences of lines this replica may run: of each model as many as its targets have slots for them,
        and of all at most half as many as other requests may be."""
        num_slots: Counter[str] = Counter()
        names = self._service.catalog.names()
        for target in self._service.snapshot().targets:
            if target.model_name in names:
                num_slots[target.model_name] += background_slots(target)
        return RoomSize(min(SEQUENCES_MAX, self._service.background_max), num_slots)

    async def run(self, batch: Batch, url: str, body: bytes, request_id: str, hold: Hold) -> LineResult:
        """Runs a line. Raises as GenerationService.prepare and GenerationService.generate."""
        service = self._service
        origin = Origin(caller := _caller_of(batch), num_bytes=len(body))
        turn = nullcontext() if len(body) <= SMALL_BODY_BYTES else self._long_lines
        async with turn:
            asked = await unless_small(service.threads, caller, body, lambda: self._read(url, body, request_id))
        model = service.catalog.find(asked.inputs[0].model, caller).name
        async with hold(model, num_sequences(asked.inputs)):
            arrival_s = service.environment.now_s()
            async with turn:
                with renamed_errors(asked.names):
                    specs = [in_background(await service.prepare(self._input(each, origin))) for each in asked.inputs]
            writer = asked.new_writer(specs, False)
            items = (
                service.generate(specs[0], arrival_s) if len(specs) == 1 else generate_each(service, specs, arrival_s)
            )
            content = await whole_answer(service, caller, items, writer)
        return LineResult(200, request_id, await asyncio.to_thread(json.loads, content))

    def failure(self, error: Exception, request_id: str) -> LineResult:
        """The result of a line that failed for good. A bug of ours is counted and logged."""
        told = error if isinstance(error, OutriderError) else internal_error(self._service, request_id, error)
        body: dict[str, Any] = error_body(told)
        return LineResult(told.http_status, request_id, body)

    def _read(self, url: str, body: bytes, request_id: str) -> Asked:
        asked = CALLS[ENDPOINTS[url]](body, request_id)
        if isinstance(asked, Referring):
            raise InvalidRequest("previous_response_id", "a line of a batch cannot refer to stored responses")
        if asked.is_streaming:
            raise InvalidRequest("stream", "a line of a batch is answered whole; leave stream out")
        return asked

    def _input(self, asked: GenerationInput, origin: Origin) -> GenerationInput:
        tenant = asked.tenant if origin.caller.tenant is None else origin.caller.tenant
        deadline_s = asked.deadline_s or self._service.environment.settings.deadline_max_s
        return replace(asked, origin=origin, tenant=tenant, deadline_s=deadline_s, priority=PRIORITY_MAX)


def _caller_of(batch: Batch) -> Caller:
    """The key that created a batch, without its limits."""
    return Caller(batch.tenant, frozenset(Scope), TenantLimits(), batch.shares_prefixes, batch.models)


def in_background(spec: GenerationSpec) -> GenerationSpec:
    """Copies a request so that it goes behind all others, and takes no part in a canary."""
    tenant = f"{LINES_PREFIX}{spec.request.tenant}"
    request = replace(spec.request, priority=BACKGROUND_PRIORITY, tenant=tenant)
    return replace(spec, request=request, is_background=True, objective=NO_OBJECTIVE, assignment=None, drafts=ANY_DRAFT)
