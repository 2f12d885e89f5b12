"""The FastAPI application over one service: its routes, its middleware and its error answers.

Ray Serve hosts the application, or a process of its own; tests call it directly. Every error is answered with OpenAI's
error body, or with Anthropic's on the paths of its API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection

from coordinator.api.answer.openai_response import error_body
from coordinator.api.anthropic.errors import anthropic_error, has_anthropic_errors
from coordinator.api.http.batch_calls import BatchCalls
from coordinator.api.http.generation_calls import IGNORED_HEADER, GenerationCalls, internal_error
from coordinator.api.http.http_api import HttpApi
from coordinator.api.http.http_transport import REQUEST_ID_HEADER, Application, LimitedRequests, RequestContext
from coordinator.api.http.web_pages import WebPages
from coordinator.batches.batch_desk import BatchDesk
from coordinator.intake.generation_request import REQUEST_ID_CHARS_MAX
from coordinator.intake.request_limit import REFUSALS_AT_ONCE, RequestLimit
from coordinator.service.generation_service import GenerationService
from coordinator.settings import CoordinatorSettings
from outrider.errors import InvalidRequest, InvalidToken, OutriderError, Overloaded, Unauthenticated, Unavailable

SHOULD_RETRY_HEADER: Final = "X-Should-Retry"
"""OpenAI's own header: its clients retry 408, 409, 429, 500 and above unless it is false."""


def create_app(
    service: GenerationService,
    desk: BatchDesk | None = None,
    *,
    is_echoing_request_id: bool = True,
    limit: RequestLimit | None = None,
) -> FastAPI:
    """Builds the application over an opened service, which it does not close; without a `desk` batches are off. `limit`
    is shared with what else takes in requests."""
    settings = service.environment.settings

    def body_of(error: OutriderError, request: HTTPConnection, status: int | None = None) -> dict[str, Any]:
        if has_anthropic_errors(request.scope["path"]):
            return anthropic_error(error, str(request.state.request_id)[:REQUEST_ID_CHARS_MAX], status)
        return error_body(error)

    def answer(error: OutriderError, request: HTTPConnection) -> Response:
        service.count_failure(error)
        headers = {}
        if isinstance(error, Overloaded | Unavailable):
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        elif isinstance(error, Unauthenticated):
            is_token = isinstance(error, InvalidToken)  # RFC 6750, section 3.1
            headers["WWW-Authenticate"] = 'Bearer error="invalid_token"' if is_token else "Bearer"
        if error.is_final:
            headers[SHOULD_RETRY_HEADER] = "false"
        return JSONResponse(body_of(error, request), status_code=error.http_status, headers=headers)

    # The routes read bodies themselves, so `coordinator.api.http.openapi` documents them.
    app = Application(
        stall_max_s=settings.client_stall_max_s,
        on_cut=service.environment.metrics.slow_readers.labels("connection").inc,
        title="Outrider",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # to what `Host` says, and away from TLS
    )
    app.add_middleware(LimitedRequests, limit=limit or request_limit(settings), refuse=answer)
    app.add_middleware(
        RequestContext,
        is_echoing=is_echoing_request_id,
        routes=app.router.routes,
        web_pages=None if service.knows_callers else WebPages(settings.cors_origins, is_local=settings.is_local),
        authenticate=service.authenticate,
        refuse=answer,
    )
    _permit_origins(app, settings.cors_origins)
    _add_routes(app, HttpApi(service), GenerationCalls(service))
    _add_batch_routes(app, BatchCalls(service, desk))

    @app.exception_handler(OutriderError)
    async def answer_error(request: Request, error: OutriderError) -> Response:
        return answer(error, request)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        # Of a bounded length, whatever the path is.
        body = body_of(InvalidRequest(None, message), request, error.status_code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def answer_our_bug(request: Request, error: Exception) -> Response:
        told = internal_error(service, str(request.state.request_id), error)
        return JSONResponse(body_of(told, request), status_code=500)

    return app


def request_limit(settings: CoordinatorSettings) -> RequestLimit:
    """Makes the bound of one replica: what it serves, and some more to refuse."""
    return RequestLimit(settings.requests_max + REFUSALS_AT_ONCE)


def _permit_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Lets web pages of these origins call. It stands outside of the keys, since browsers ask for permission without
    one."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER, "Retry-After", SHOULD_RETRY_HEADER],
        )


def _add_routes(app: FastAPI, api: HttpApi, calls: GenerationCalls) -> None:
    app.add_api_route("/v1/completions", calls.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", calls.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses", calls.responses, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses/{response_id:path}", api.response, methods=["GET", "DELETE"], response_model=None)
    app.add_api_route("/v1/messages", calls.messages, methods=["POST"], response_model=None)
    app.add_api_route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"], response_model=None)
    # An id may contain slashes; it arrives decoded once.
    app.add_api_route("/v1/streams/{request_id:path}", calls.resume, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"], response_model=None)
    app.add_api_route("/livez", api.livez, methods=["GET"])
    app.add_api_route("/ping", api.ping, methods=["GET"], response_model=None)
    app.add_api_route("/version", api.version, methods=["GET"])
    app.add_api_route("/load", api.load, methods=["GET"])
    app.add_api_route("/metrics", api.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/openapi.json", api.openapi, methods=["GET"], response_model=None)
    app.add_api_route("/tokenize", api.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", api.detokenize, methods=["POST"])


def _add_batch_routes(app: FastAPI, calls: BatchCalls) -> None:
    app.add_api_route("/v1/files", calls.upload, methods=["POST"], response_model=None)
    app.add_api_route("/v1/files", calls.files, methods=["GET"], response_model=None)
    app.add_api_route("/v1/files/{file_id}", calls.file, methods=["GET", "DELETE"], response_model=None)
    app.add_api_route("/v1/files/{file_id}/content", calls.content, methods=["GET"], response_model=None)
    app.add_api_route("/v1/batches", calls.create, methods=["POST"], response_model=None)
    app.add_api_route("/v1/batches", calls.batches, methods=["GET"], response_model=None)
    app.add_api_route("/v1/batches/{batch_id}", calls.batch, methods=["GET"], response_model=None)
    app.add_api_route("/v1/batches/{batch_id}/cancel", calls.cancel, methods=["POST"], response_model=None)
