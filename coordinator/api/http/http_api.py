"""Answers the calls of the HTTP API that generate nothing: models, health, metrics, tokenization."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from coordinator.access.api_keys import ANYBODY, Caller
from coordinator.api.answer.json_text import to_json_text
from coordinator.api.anthropic.message_body import CountTokensBody
from coordinator.api.http.calls import unread
from coordinator.api.http.generation_calls import ignored_header
from coordinator.api.http.http_transport import caller_of, read_body, request_id_of, unless_left, unless_small
from coordinator.api.http.openapi import openapi_json
from coordinator.api.schema.openai_schema import (
    DETOKENIZE_TOKENS_MAX,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from coordinator.api.schema.translated_body import renamed_errors, translated
from coordinator.intake.generation_request import GenerationInput, Origin
from coordinator.service.generation_service import GenerationService
from outrider import __version__
from outrider.errors import InvalidRequest, ModelNotFound
from outrider.registry.worker_record import WorkerRecord
from outrider.sampling_params import check_count


class HttpApi:
    """The handlers of calls that generate nothing, over one service."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._started_s = int(time.time())

    async def models(self, request: Request) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [
                {
                    "id": status.model,
                    "object": "model",
                    "created": self._started_s,
                    "owned_by": "outrider",
                    "max_model_len": status.max_model_len,
                    "has_chat_template": status.has_chat_template,
                    "num_target_workers": status.num_target_workers,
                    "num_draft_workers": status.num_draft_workers,
                }
                for status in self._service.catalog.served(caller_of(request))
            ],
        }

    async def model(self, request: Request, name: str) -> dict[str, Any]:
        for entry in (await self.models(request))["data"]:
            if entry["id"] == name:
                return dict(entry)
        raise ModelNotFound(f"The model {name!r} does not exist")

    async def health(self, request: Request) -> Response:
        """Answers 200 while at least one target worker is usable, else 503; authenticated callers get details."""
        models, refusal = self._service.catalog.served(ANYBODY), self._service.environment.models.refusal()
        snapshot = self._service.snapshot()
        caller: Caller | None = getattr(request.state, "caller", None)
        # Details are about all models.
        if caller is None or (self._service.knows_callers and caller.models is not None):
            return JSONResponse({"status": "ready" if models else "not ready"}, 200 if models else 503)
        body = {
            "status": "ready" if models else "no target worker is live",
            "registry": "degraded" if snapshot.degraded else "ok",
            "num_target_workers": sum(status.num_target_workers for status in models),
            "num_draft_workers": self._service.catalog.num_drafts() if models else 0,
            "models": [status.model for status in models],
            "refused_models_file": refusal,
            "target_weights": _target_weights(snapshot.targets),
            "excluded_workers": [
                {"worker_id": each.worker_id, "pool": each.pool, "reason": each.reason}
                for each in self._service.catalog.exclusions()
            ],
            "unpaired_workers": [
                {
                    "model": each.model,
                    "draft_head": each.draft_head,
                    "target_head": each.target_head,
                    "num_draft_workers": len(each.draft_ids),
                    "num_target_workers": len(each.target_ids),
                    "reason": str(each),
                }
                for each in self._service.catalog.unpaired()
            ],
            "useless_drafts": [
                {"worker_id": worker_id, "model": model}
                for worker_id, model in self._service.environment.speculation.watch.alarms
            ],
        }
        return JSONResponse(body, status_code=200 if models else 503)

    async def ping(self) -> Response:
        """Answers 200 while at least one target worker is usable, else 503, as SageMaker asks."""
        return Response(status_code=200 if self._service.catalog.served(ANYBODY) else 503)

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def load(self) -> dict[str, int]:
        """Answers the number of sequences that this replica serves or lets wait, as vLLM does."""
        return {"server_load": self._service.num_active}

    async def livez(self) -> dict[str, str]:
        return {"status": "alive"}

    async def metrics(self) -> Response:
        return Response(generate_latest(self._service.environment.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self) -> Response:
        return Response(openapi_json(), media_type="application/json")

    async def tokenize(self, request: Request) -> Response:
        await self._service.admit(caller_of(request))
        return await unless_left(request, self._tokenize(request, await read_body(request)))

    async def _tokenize(self, request: Request, raw: bytes) -> Response:
        caller, threads = caller_of(request), self._service.threads

        def read() -> tuple[TokenizeBody, GenerationInput]:
            body = parse_body(TokenizeBody, raw)
            return body, replace(body.to_input(request_id_of(request)), origin=Origin(caller, num_bytes=len(raw)))

        body, text = await unless_small(threads, caller, raw, read)
        tokenizer, longest = self._service.catalog.tokenizer_of(body.model, caller)
        tokens = await self._service.preparation.tokenize(text, tokenizer)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": longest, "tokens": tokens}

        def write() -> str:
            entry = tokenizer.vocabulary_entry
            return to_json_text(answer | ({"token_strs": list(map(entry, tokens))} if body.return_token_strs else {}))

        content = await unless_small(threads, caller, raw, write)
        return Response(content, media_type="application/json")

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a conversation of Anthropic's API."""
        await self._service.admit(caller_of(request))
        return await unless_left(request, self._count_tokens(request, await read_body(request)))

    async def _count_tokens(self, request: Request, raw: bytes) -> Response:
        caller = caller_of(request)

        def read() -> tuple[CountTokensBody, GenerationInput]:
            body = parse_body(CountTokensBody, raw)
            asked = translated(body, body.translate, request_id_of(request))
            return body, replace(asked, origin=Origin(caller, num_bytes=len(raw)))

        body, asked = await unless_small(self._service.threads, caller, raw, read)
        tokenizer = self._service.catalog.find(asked.model, caller).served.tokenizer
        with renamed_errors(body.names):
            tokens = await self._service.preparation.tokenize(asked, tokenizer)
        ignored = [*body.ignored, *unread(body.template_words(), tokenizer)]
        return JSONResponse({"input_tokens": len(tokens)}, headers=ignored_header(ignored))

    async def response(self, request: Request, response_id: str) -> Response:
        """Returns a stored response, or deletes it."""
        caller = caller_of(request)
        await self._service.admit(caller)
        if request.method == "DELETE":
            await self._service.responses.delete(caller, response_id)
            return JSONResponse({"id": response_id, "object": "response", "deleted": True})
        return JSONResponse(await self._service.responses.get(caller, response_id))

    async def detokenize(self, request: Request) -> Response:
        await self._service.admit(caller_of(request))
        return await unless_left(request, self._detokenize(request, await read_body(request)))

    async def _detokenize(self, request: Request, raw: bytes) -> Response:
        caller, threads = caller_of(request), self._service.threads

        def read() -> DetokenizeBody:
            body = parse_body(DetokenizeBody, raw)
            check_count("tokens", body.tokens, DETOKENIZE_TOKENS_MAX)
            return body

        body = await unless_small(threads, caller, raw, read)
        tokenizer, _ = self._service.catalog.tokenizer_of(body.model, caller)
        await unless_small(threads, caller, raw, partial(_check_token_ids, body.tokens, tokenizer.vocab_size))
        decode = self._service.preparation.decode
        text = await decode(body.tokens, tokenizer, Origin(caller), skip_special_tokens=False)
        return JSONResponse({"prompt": text})


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidRequest("tokens", f"token ids must lie between 0 and {vocab_size - 1}")


def _target_weights(targets: Iterable[WorkerRecord]) -> list[dict[str, Any]]:
    """Counts live targets by weights and numerics: a sequence moves only between targets of one entry."""
    counts = Counter((each.model_name, each.weights_fingerprint, each.numerics) for each in targets)
    return [
        {"model": model, "weights_fingerprint": weights, "numerics": numerics, "num_target_workers": count}
        for (model, weights, numerics), count in sorted(counts.items())
    ]
