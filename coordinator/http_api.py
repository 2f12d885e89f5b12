"""The HTTP edge: OpenAI's completion calls and what an operator needs beside them.

`create_app(service)` is a plain FastAPI application: Ray Serve hosts it, tests call it directly. Errors of
every kind leave as OpenAI's error body; a client that goes away cancels its request at both workers.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from coordinator.answer_size import SMALL_ANSWER_VALUES, num_values
from coordinator.chat_messages import read_messages
from coordinator.choice_writer import AnswerFormat
from coordinator.choices import ChoiceNews, RequestFinished
from coordinator.generation_request import GenerationInput, GenerationSpec, Origin
from coordinator.http_transport import (
    SMALL_BODY_BYTES,
    ApiKeyCheck,
    Application,
    EventStream,
    RequestIds,
    first_of,
    read_body,
    unless_disconnected,
)
from coordinator.journal import JournalEntry
from coordinator.json_text import to_json_text
from coordinator.news_queue import check_gathered, size_of
from coordinator.openai_response import ResponseWriter, error_body, sse
from coordinator.openai_schema import (
    DETOKENIZE_TOKENS_MAX,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from coordinator.openapi import openapi_json
from coordinator.request_session import Finished
from coordinator.resumption import Resumption, StreamPosition, parse_position
from coordinator.service import GenerationService, Recollection
from coordinator.text_output import VisibleOutput
from outrider.api_keys import Caller
from outrider.errors import (
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from outrider.tracing import TRACEPARENT
from outrider.worker_record import WorkerRecord

_log = logging.getLogger(__name__)

LAST_EVENT_HEADER: Final = "Last-Event-ID"
CANARY_KEY_HEADER: Final = "X-Canary-Key"
SHOULD_RETRY_HEADER: Final = "X-Should-Retry"
"""OpenAI's own: its clients try 408, 409, 429, 500 and above again unless it says false."""
BodyKind = type[CompletionBody] | type[ChatBody]
ResultT = TypeVar("ResultT")
_CLIENT_CLOSED_REQUEST: Final = 499  # nginx's word for it; nobody is left to read it


class HttpApi:
    """The routes, over one service."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatBody)

    async def resume(self, request: Request, request_id: str) -> Response:
        """The rest of a stream that broke, behind the event that `Last-Event-ID` names; all of it without."""
        recollection = await self._service.look_up(request_id, _caller(request))
        entry = recollection.entry
        assert entry is not None
        if entry.kind == "grpc":
            raise NotFound(
                f"the stream {request_id} was begun over gRPC, where it can be resumed", "request_id"
            )
        kind = ChatBody if entry.kind == "chat" else CompletionBody
        request.state.request_id = request_id
        return await self._answer(request, kind, entry.payload, recollection)

    async def _generate(self, request: Request, kind: BodyKind) -> Response:
        # A header proves nothing: whether the stream has begun is looked up below, and what has not is checked then.
        # One that goes on pays again, and may owe more than another.
        if LAST_EVENT_HEADER not in request.headers:
            self._service.environment.limits.check(_caller(request))
        return await self._answer(request, kind, await read_body(request))

    async def _answer(
        self, request: Request, kind: BodyKind, raw: bytes, recollection: Recollection | None = None
    ) -> Response:
        """To a body that was just read, or that of a stream in the journal."""
        arrival_s = self._service.environment.now_s()
        body, asked = await self._unless_small(raw, partial(_read, kind, raw, _request_id(request)))
        last_event = request.headers.get(LAST_EVENT_HEADER, "") if body.is_streaming else ""
        origin = _origin(request)
        asked = replace(asked, origin=origin, canary_key=origin.canary_key or asked.canary_key)
        if (tenant := origin.caller.tenant) is not None:
            asked = replace(asked, tenant=tenant)  # `user` is the tenant's own user then
        claim = parse_position(last_event, asked.n, LAST_EVENT_HEADER) if last_event else None
        if claim is not None and recollection is None:  # the body at hand says it all but for the tokens
            recollection = await self._service.recall(asked.request_id, origin.caller)
        has_begun = recollection is not None and recollection.has_begun(claim)
        spec = await self._service.prepare(asked, has_begun=has_begun)
        request.state.request_id = spec.request.request_id
        resumption = None
        if recollection is not None:
            spec, resumption = self._service.resume(spec, claim, recollection)
        writer = ResponseWriter(
            spec,
            AnswerFormat(
                is_chat=kind is ChatBody,
                returns_token_ids=bool(body.return_token_ids),
                as_token_ids=bool(body.return_tokens_as_token_ids),
                includes_usage=body.includes_usage,
            ),
            self._service.environment.tokenizer,
            created_s=int(time.time()),
            new_call_id=lambda: f"call_{uuid.uuid4().hex}",
        )
        if not body.is_streaming:
            answer = self._collect(spec, writer, arrival_s)
            result = await unless_disconnected(request, answer)
            if result is None:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            return Response(result, media_type="application/json")
        # The first item decides between a stream and a plain error status, so wait for it before answering.
        shows_ids = body.includes_event_ids or resumption is not None
        entry = JournalEntry("chat" if kind is ChatBody else "completions", raw) if shows_ids else None
        items = self._service.generate(spec, arrival_s, entry, resumption)
        first = await unless_disconnected(request, first_of(items))
        if first is None:
            await items.aclose()
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        points = (resumption or Resumption.of_nothing(spec.num_choices)).points
        opening = writer.opening(points)
        position = StreamPosition(points, spec.run) if shows_ids else None
        return EventStream(self._events(first, items, writer, opening, position), items)

    async def _collect(self, spec: GenerationSpec, writer: ResponseWriter, arrival_s: float) -> bytes:
        """The answer as JSON."""
        news: list[ChoiceNews] = []
        size = num_bytes = 0
        async with aclosing(self._service.generate(spec, arrival_s)) as items:
            async for item in items:
                if isinstance(item, RequestFinished):
                    write = partial(_written, writer, news, item)
                    is_small = size <= SMALL_ANSWER_VALUES
                    return (
                        write() if is_small else await self._service.environment.threads.run_admitted(write)
                    )
                news.append(item)
                size += num_values(spec, item.news)
                num_bytes += size_of(item.news) + writer.size_of(item)
                check_gathered(num_bytes)
        raise AssertionError("a request ended without its end")

    async def _events(
        self,
        first: ChoiceNews | RequestFinished,
        items: AsyncGenerator[ChoiceNews | RequestFinished],
        writer: ResponseWriter,
        opening: Sequence[dict[str, Any]],
        position: StreamPosition | None,
    ) -> AsyncGenerator[str]:
        """With a `position` each event has it as its id."""
        # What is sent with the next event instead of by itself: the role, and a text's end.
        held = "".join(map(sse, opening))
        async with aclosing(items):
            try:
                item = first
                while not isinstance(item, RequestFinished):
                    event, news = await self._event(item, writer), item.news
                    if not news.is_repeat:
                        if position is not None:
                            _advance(position, item)
                        if event is not None:
                            held += _with_id(position, event)
                    if held and not isinstance(news, Finished):
                        yield held
                        held = ""
                    item = await anext(items)
                held += "".join(_with_id(position, sse(chunk)) for chunk in writer.closing(item))
            except OutriderError as error:
                # The status line is long gone: the error is the stream's last event.
                self._service.count_failure(error)
                held += sse(error_body(error))
            except Exception as error:  # our bug; a connection that just ends would not say so
                held += sse(error_body(_internal_error(self._service, writer.request_id, error)))
            yield held + "data: [DONE]\n\n"

    async def _event(self, item: ChoiceNews, writer: ResponseWriter) -> str | None:
        # What a step brought is small; a prompt may be long, and so may its token ids beside the first step.
        if writer.is_long(item):
            return await self._service.environment.threads.run_admitted(writer.event, item)
        return writer.event(item)

    async def _unless_small(self, raw: bytes, work: Callable[[], ResultT]) -> ResultT:
        """What `work` makes of a body; by a thread where that may take long."""
        return work() if len(raw) <= SMALL_BODY_BYTES else await self._service.environment.threads.run(work)

    async def models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": status.model,
                    "object": "model",
                    "created": 0,
                    "owned_by": "outrider",
                    "max_model_len": status.max_model_len,
                    "num_target_workers": status.num_target_workers,
                    "num_draft_workers": status.num_draft_workers,
                }
                for status in self._service.models()
            ],
        }

    async def model(self, name: str) -> dict[str, Any]:
        for entry in (await self.models())["data"]:
            if entry["id"] == name:
                return dict(entry)
        raise NotFound(f"model {name!r} is not served", "model")

    async def health(self, request: Request) -> Response:
        """200 while at least one target worker is usable, else 503; the body says what was found, to those who may
        ask for more."""
        models = self._service.models()
        snapshot = self._service.snapshot()
        if self._service.has_keys and not hasattr(request.state, "caller"):
            return JSONResponse({"status": "ready" if models else "not ready"}, 200 if models else 503)
        body = {
            "status": "ready" if models else "no target worker is live",
            "registry": "degraded" if snapshot.degraded else "ok",
            "num_target_workers": sum(status.num_target_workers for status in models),
            "num_draft_workers": max((status.num_draft_workers for status in models), default=0),
            "target_weights": _target_weights(snapshot.targets),
            "excluded_workers": [
                {"worker_id": each.worker_id, "pool": each.pool, "reason": each.reason}
                for each in self._service.exclusions()
            ],
            "useless_drafts": [
                {"worker_id": worker_id, "model": model}
                for worker_id, model in self._service.environment.watch.alarms
            ],
        }
        return JSONResponse(body, status_code=200 if models else 503)

    async def livez(self) -> dict[str, str]:
        return {"status": "alive"}

    async def metrics(self) -> Response:
        return Response(
            generate_latest(self._service.environment.metrics.registry), media_type=CONTENT_TYPE_LATEST
        )

    async def openapi(self) -> Response:
        return Response(openapi_json(), media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        await self._service.admit(_caller(request))
        raw = await read_body(request)

        def read() -> tuple[TokenizeBody, GenerationInput]:
            body = parse_body(TokenizeBody, raw)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("prompt", "exactly one of prompt and messages is needed")
            return body, GenerationInput(
                request_id=_request_id(request),
                text=body.prompt,
                messages=None if body.messages is None else read_messages(body.messages),
                chat_template_kwargs=body.chat_template_kwargs or {},
            )

        body, text = await self._unless_small(raw, read)
        tokens = await self._service.preparation.tokenize(text, add_special_tokens=body.add_special_tokens)
        longest = max((status.max_model_len for status in self._service.models()), default=None)
        answer = {"count": len(tokens), "max_model_len": longest, "tokens": tokens}
        content = await self._unless_small(raw, partial(to_json_text, answer))
        return Response(content, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        await self._service.admit(_caller(request))
        raw = await read_body(request)
        vocab_size = self._service.environment.tokenizer.vocab_size

        def read() -> list[int]:
            token_ids = parse_body(DetokenizeBody, raw).tokens
            if len(token_ids) > DETOKENIZE_TOKENS_MAX:
                raise InvalidRequest("tokens", f"tokens may hold at most {DETOKENIZE_TOKENS_MAX} entries")
            if any(not 0 <= token_id < vocab_size for token_id in token_ids):
                raise InvalidRequest("tokens", f"token ids must lie between 0 and {vocab_size - 1}")
            return token_ids

        token_ids = await self._unless_small(raw, read)
        text = await self._service.preparation.decode(token_ids, skip_special_tokens=False)
        return JSONResponse({"prompt": text})


def _read(kind: BodyKind, raw: bytes, request_id: str) -> tuple[CompletionBody | ChatBody, GenerationInput]:
    """A body and what it asks for; `request_id` is for one that brings none. Raises InvalidRequest."""
    body = parse_body(ChatBody, raw) if kind is ChatBody else parse_body(CompletionBody, raw)
    return body, body.to_input(body.request_id or request_id)


def _written(writer: ResponseWriter, news: Sequence[ChoiceNews], finished: RequestFinished) -> bytes:
    return to_json_text(writer.whole(news, finished)).encode()


def _advance(position: StreamPosition, item: ChoiceNews) -> None:
    num_tokens = len(item.news.token_ids) if isinstance(item.news, VisibleOutput) else 0
    position.advance(item.index, num_tokens, has_ended=isinstance(item.news, Finished))


def _with_id(position: StreamPosition | None, event: str) -> str:
    return event if position is None else f"id: {position}\n{event}"


def _target_weights(targets: Iterable[WorkerRecord]) -> list[dict[str, Any]]:
    """Live targets by what they compute: a sequence moves only between targets of one entry."""
    counts = Counter((each.model_name, each.weights_fingerprint, each.numerics) for each in targets)
    return [
        {"model": model, "weights_fingerprint": weights, "numerics": numerics, "num_target_workers": count}
        for (model, weights, numerics), count in sorted(counts.items())
    ]


def create_app(service: GenerationService, *, is_echoing_request_id: bool = True) -> FastAPI:
    """The application over an opened service. Who opened it closes it."""
    api = HttpApi(service)

    def answer(error: OutriderError) -> Response:
        service.count_failure(error)
        headers = {}
        if isinstance(error, Overloaded | Unavailable):
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        elif isinstance(error, Unauthenticated):
            headers["WWW-Authenticate"] = "Bearer"
        if error.is_final:
            headers[SHOULD_RETRY_HEADER] = "false"
        return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)

    # FastAPI knows nothing of the bodies, which are read by hand: `openapi` does.
    app = Application(
        stall_max_s=service.environment.settings.client_stall_max_s,
        on_cut=service.environment.metrics.slow_readers.labels("connection").inc,
        title="Outrider",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(ApiKeyCheck, authenticate=service.authenticate, refuse=answer)
    app.add_middleware(RequestIds, is_echoing=is_echoing_request_id)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"], response_model=None)
    # An id may hold slashes; it arrives decoded, once.
    app.add_api_route("/v1/streams/{request_id:path}", api.resume, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/livez", api.livez, methods=["GET"])
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/openapi.json", api.openapi, methods=["GET"], response_model=None)
    app.add_api_route("/tokenize", api.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", api.detokenize, methods=["POST"])

    @app.exception_handler(OutriderError)
    async def answer_error(request: Request, error: OutriderError) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = error_body(InvalidRequest(None, message))  # of a bounded length, whatever the path is
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def answer_our_bug(request: Request, error: Exception) -> Response:
        return JSONResponse(
            error_body(_internal_error(service, _request_id(request), error)), status_code=500
        )

    return app


def _internal_error(service: GenerationService, request_id: str, error: Exception) -> OutriderError:
    """What the client is told of a bug of ours, which is counted and logged."""
    service.count_failure(error)
    _log.exception("request %s failed", request_id, exc_info=error)
    return OutriderError("internal error; the log has it")


def _request_id(request: Request) -> str:
    return str(request.state.request_id)


def _caller(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _origin(request: Request) -> Origin:
    headers = request.headers
    return Origin(_caller(request), headers.get(TRACEPARENT), headers.get(CANARY_KEY_HEADER, ""))
