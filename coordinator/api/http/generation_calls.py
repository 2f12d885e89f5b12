"""Answers the calls that generate, whole or as server-sent events, and resumes broken streams.

A client that disconnects cancels its request at both workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from fastapi import Request, Response

from coordinator.access.api_keys import Caller
from coordinator.api.answer.answer_size import SMALL_ANSWER_VALUES
from coordinator.api.answer.answer_writer import AnswerWriter
from coordinator.api.answer.json_text import to_json_text
from coordinator.api.http.calls import CALLS, Asked, Referring
from coordinator.api.http.http_transport import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    caller_of,
    first_of,
    read_body,
    request_id_of,
    unless_disconnected,
    unless_small,
)
from coordinator.api.schema.translated_body import renamed_errors
from coordinator.intake.generation_request import GenerationInput, GenerationSpec, Origin
from coordinator.output.output_queue import check_gathered, size_of
from coordinator.output.sequence_output import SequenceFinished
from coordinator.output.text_output import VisibleOutput
from coordinator.recovery.journal_entry import JournalEntry, Kind
from coordinator.recovery.resumption import Resumption, StreamPosition, parse_position
from coordinator.request.choices import ChoiceOutput, RequestFinished
from coordinator.service.generation_service import GenerationService
from coordinator.service.prompts import generate_each
from coordinator.service.streams import Recollection, hiding_model
from outrider.errors import InvalidRequest, NotFound, OutriderError
from outrider.observability.tracing import TRACEPARENT

_log = logging.getLogger(__name__)

LAST_EVENT_HEADER: Final = "Last-Event-ID"
CANARY_KEY_HEADER: Final = "X-Canary-Key"
IGNORED_HEADER: Final = "X-Outrider-Ignored"
"""Names what was accepted and not used: parameters of the request, tools, and parts of the schemas of tools."""
_IGNORED_CHARS_MAX: Final = 1000
_AND_MORE: Final = ", ..."
ResultT = TypeVar("ResultT")


class GenerationCalls:
    """The handlers of calls that generate, over one service."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, "responses")

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, "messages")

    async def resume(self, request: Request, request_id: str) -> Response:
        """Resumes a broken stream after the event that `Last-Event-ID` names, or from its start without one."""
        await self._service.admit(caller_of(request), may_have_begun=True)
        recollection = await self._service.streams.look_up(request_id, caller_of(request))
        entry = recollection.entry
        assert entry is not None
        if entry.kind not in CALLS:
            raise NotFound(f"the stream {request_id} was begun over gRPC, where it can be resumed", "request_id")
        request.state.request_id = request_id
        with hiding_model(request_id, caller_of(request)):
            return await self._answer(request, entry.kind, entry.payload, recollection)

    async def _generate(self, request: Request, kind: Kind) -> Response:
        # The header proves nothing: `_answer` looks up whether the stream has begun, and checks it if not.
        # A resumed stream may owe more than a new request.
        await self._service.admit(caller_of(request), may_have_begun=LAST_EVENT_HEADER in request.headers)
        return await self._answer(request, kind, await read_body(request))

    async def _answer(
        self, request: Request, kind: Kind, raw: bytes, recollection: Recollection | None = None
    ) -> Response:
        """Answers a request by its body, which was just read or is that of a stream in the journal."""
        answer = await unless_disconnected(request, self._prepared(request, kind, raw, recollection))
        return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else await answer()

    async def _prepared(
        self, request: Request, kind: Kind, raw: bytes, recollection: Recollection | None
    ) -> Callable[[], Awaitable[Response]]:
        """Reads and prepares a request; returns what generates its answer."""
        service, caller, arrival_s = self._service, caller_of(request), self._service.environment.now_s()
        asked = await unless_small(service.threads, caller, raw, partial(CALLS[kind], raw, request_id_of(request)))
        if isinstance(asked, Referring):
            service.environment.limits.rates.check(caller)  # whatever headers it has
            remembered = await service.responses.look_up(caller, asked.references)
            asked = await unless_small(service.threads, caller, raw, partial(asked.complete, remembered))
        last_event = request.headers.get(LAST_EVENT_HEADER, "") if asked.is_streaming and asked.is_resumable else ""
        inputs = [_from(each, _origin(request, raw)) for each in asked.inputs]
        if len(inputs) > 1:
            if last_event:
                raise InvalidRequest(LAST_EVENT_HEADER.lower(), "a stream of several prompts cannot be resumed")
            return await self._prepared_each(request, asked, inputs, arrival_s)
        first = inputs[0]
        claim = parse_position(last_event, first.n, LAST_EVENT_HEADER) if last_event else None
        if claim is not None and recollection is None:  # only the tokens are missing
            recollection = await service.streams.recall(first.request_id, first.origin.caller)
        has_begun = recollection is not None and recollection.has_begun(claim)
        if not has_begun and (recollection is not None or LAST_EVENT_HEADER in request.headers):
            await service.check_new(caller)
        with renamed_errors(asked.names):
            spec = await service.prepare(first, has_begun=has_begun)
        request.state.request_id = spec.request.request_id
        resumption = None
        if recollection is not None:
            spec, resumption = service.streams.resume(spec, claim, recollection)
        writer = asked.new_writer([spec], asked.before is not None and service.responses.is_open)
        headers = ignored_header([*asked.ignored_by(spec.served.tokenizer), *spec.loosened])
        if not asked.is_streaming:
            return partial(self._whole, request, asked, service.generate(spec, arrival_s), writer, headers)
        shows_ids = asked.has_event_ids or resumption is not None
        entry = JournalEntry(kind, raw) if shows_ids else None
        points = (resumption or Resumption.of_nothing(spec.num_choices)).points
        position = StreamPosition(points, spec.run) if shows_ids else None
        items = service.generate(spec, arrival_s, entry, resumption)
        return partial(self._stream, request, asked, items, writer, writer.opening(points), position, headers)

    async def _prepared_each(
        self, request: Request, asked: Asked, inputs: Sequence[GenerationInput], arrival_s: float
    ) -> Callable[[], Awaitable[Response]]:
        """Prepares a request with several prompts, of which each counts as a request."""
        specs: list[GenerationSpec] = []
        for _ in inputs[1:]:
            await self._service.admit(caller_of(request))
        for each in inputs:
            specs.append(await self._service.prepare(each))
            await asyncio.sleep(0)  # short prompts are tokenized here, without a pause for others
        request.state.request_id = asked.request_id
        writer = asked.new_writer(specs, False)
        headers = ignored_header(asked.ignored_by(specs[0].served.tokenizer))
        items = generate_each(self._service, specs, arrival_s)
        if not asked.is_streaming:
            return partial(self._whole, request, asked, items, writer, headers)
        return partial(self._stream, request, asked, items, writer, writer.opening(), None, headers)

    async def _whole(
        self,
        request: Request,
        asked: Asked,
        items: AsyncGenerator[ChoiceOutput | RequestFinished],
        writer: AnswerWriter,
        headers: Mapping[str, str],
    ) -> Response:
        result = await unless_disconnected(
            request,
            whole_answer(self._service, caller_of(request), items, writer, partial(self._keep, request, asked, writer)),
        )
        if result is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(result, media_type="application/json", headers=dict(headers))

    async def _stream(
        self,
        request: Request,
        asked: Asked,
        items: AsyncGenerator[ChoiceOutput | RequestFinished],
        writer: AnswerWriter,
        opening: Sequence[str],
        position: StreamPosition | None,
        headers: Mapping[str, str],
    ) -> Response:
        # The first item decides between a stream and an error status.
        first = await unless_disconnected(request, first_of(items))
        if first is None:
            await items.aclose()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        keep = partial(self._keep, request, asked, writer)
        events = self._events(caller_of(request), first, items, writer, opening, position, keep)
        return EventStream(events, items, headers)

    async def _keep(self, request: Request, asked: Asked, writer: AnswerWriter) -> None:
        """Stores a complete answer that later requests may refer to."""
        if asked.before is not None and writer.answer is not None:
            await self._service.responses.keep(caller_of(request), writer.request_id, writer.answer, asked.before)

    async def _events(
        self,
        caller: Caller,
        first: ChoiceOutput | RequestFinished,
        items: AsyncGenerator[ChoiceOutput | RequestFinished],
        writer: AnswerWriter,
        opening: Sequence[str],
        position: StreamPosition | None,
        keep: Callable[[], Awaitable[None]],
    ) -> AsyncGenerator[str]:
        """Writes the events of a stream; `position` becomes the id of each. `keep` as in `whole_answer`."""
        # Sent with the next event: the role, and the end of a sequence.
        held = "".join(opening)
        async with aclosing(items):
            try:
                item = first
                while not isinstance(item, RequestFinished):
                    event, output = await self._event(caller, item, writer), item.item
                    if not output.is_repeat:
                        if position is not None:
                            _advance(position, item)
                        if event is not None:
                            held += _with_id(position, event)
                    if held and not isinstance(output, SequenceFinished):
                        yield held
                        held = ""
                    item = await anext(items)
                held += "".join(_with_id(position, event) for event in writer.closing(item))
                await keep()
            except OutriderError as error:
                # The status line has been sent, so the error is the stream's last event.
                self._service.count_failure(error)
                held += writer.failure(error)
            except Exception as error:  # a bug of ours, which a closed connection would not report
                held += writer.failure(internal_error(self._service, writer.request_id, error))
            yield held + writer.end

    async def _event(self, caller: Caller, item: ChoiceOutput, writer: AnswerWriter) -> str | None:
        # The output of a step is small. A prompt may be long, and so may its token ids in the first event.
        if writer.is_long(item):
            threads = self._service.threads.of(caller.tenant, writer.num_values(item))
            return await threads.run_admitted(writer.event, item)
        return writer.event(item)


async def whole_answer(
    service: GenerationService,
    caller: Caller,
    items: AsyncGenerator[ChoiceOutput | RequestFinished],
    writer: AnswerWriter,
    keep: Callable[[], Awaitable[None]] | None = None,
) -> bytes:
    """Generates a whole answer as JSON. `keep` stores it before the client can refer to it."""
    outputs: list[ChoiceOutput] = []
    size = num_bytes = 0
    async with aclosing(items):
        async for item in items:
            if isinstance(item, RequestFinished):
                write = partial(_written, writer, outputs, item)
                is_small = size <= SMALL_ANSWER_VALUES
                result = write() if is_small else await service.threads.of(caller.tenant, size).run_admitted(write)
                if keep is not None:
                    await keep()
                return result
            outputs.append(item)
            size += writer.num_values(item)
            num_bytes += size_of(item.item) + writer.size_of(item)
            check_gathered(num_bytes)
    raise AssertionError("a request ended without a final item")


def internal_error(service: GenerationService, request_id: str, error: Exception) -> OutriderError:
    """Counts and logs a bug of ours, and returns the error to send to the client."""
    service.count_failure(error)
    _log.exception("request %s failed", request_id, exc_info=error)
    return OutriderError("internal error; the log has it")


def _from(asked: GenerationInput, origin: Origin) -> GenerationInput:
    """The request as its caller sent it: with the origin, and with the tenant of its API key if it has one."""
    asked = replace(asked, origin=origin, canary_key=origin.canary_key or asked.canary_key)
    # `user` then names a user of the tenant.
    return asked if origin.caller.tenant is None else replace(asked, tenant=origin.caller.tenant)


def _origin(request: Request, raw: bytes) -> Origin:
    headers = request.headers
    return Origin(caller_of(request), headers.get(TRACEPARENT), headers.get(CANARY_KEY_HEADER, ""), len(raw))


def ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    """Returns the header that names parameters that were not used, if there are any. It ends with `...` if it does not
    name all of them in full."""
    told = ""
    for name in ignored:  # names are the client's, so they may be megabytes
        told += (", " if told else "") + _header_text(name[: _IGNORED_CHARS_MAX + 1])
        if len(told) > _IGNORED_CHARS_MAX:
            told = told[: _IGNORED_CHARS_MAX - len(_AND_MORE)].rstrip(", ") + _AND_MORE
            break
    return {IGNORED_HEADER: told.rstrip(" ")} if told else {}


def _header_text(name: str) -> str:
    """Replaces what a header may not hold: names are the client's."""
    return "".join(each if each.isascii() and each.isprintable() and each != "," else "?" for each in name)


def _written(writer: AnswerWriter, outputs: Sequence[ChoiceOutput], finished: RequestFinished) -> bytes:
    return to_json_text(writer.whole(outputs, finished)).encode()


def _advance(position: StreamPosition, item: ChoiceOutput) -> None:
    num_tokens = len(item.item.token_ids) if isinstance(item.item, VisibleOutput) else 0
    position.advance(item.index, num_tokens, has_ended=isinstance(item.item, SequenceFinished))


def _with_id(position: StreamPosition | None, event: str) -> str:
    return event if position is None else f"id: {position}\n{event}"
