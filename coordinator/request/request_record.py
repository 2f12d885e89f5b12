"""Reports of a request while it runs and at its end: its gauges, its span and its line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

from coordinator.intake.generation_request import GenerationSpec
from coordinator.request.choices import ChoiceOutput, RequestFinished
from coordinator.request.environment import Environment
from outrider.errors import OutriderError
from outrider.observability.tracing import NO_SPAN, Span

_log = logging.getLogger("coordinator.requests")

_LEFT: Final = (asyncio.CancelledError, GeneratorExit)  # how a client's leaving appears here
_PLAIN_WORD: Final = re.compile(r"[A-Za-z0-9_.:/@+-]+")


class RequestRecord:
    """Report of one request; the context is open while it runs."""

    def __init__(self, environment: Environment, spec: GenerationSpec) -> None:
        self._environment = environment
        self._spec = spec
        self._gauge = environment.metrics.waiting(spec.model)
        self._finished: RequestFinished | None = None
        self._open_span: AbstractContextManager[Span] = environment.tracing.span(
            "generate",
            spec.request.origin.traceparent,
            {
                "gen_ai.operation.name": "chat" if spec.request.messages is not None else "text_completion",
                "gen_ai.request.model": spec.model,
                "gen_ai.request.max_tokens": spec.max_tokens,
                "gen_ai.usage.input_tokens": len(spec.prompt_token_ids),
                "outrider.request_id": spec.request.request_id,
                "outrider.tenant": spec.request.tenant,
            },
        )
        self.span: Span = NO_SPAN

    def __enter__(self) -> Self:
        self.span = self._open_span.__enter__()
        self._gauge.inc()
        return self

    def take(self, item: ChoiceOutput | RequestFinished) -> None:
        """Takes an output of the request; the first one is its first token."""
        running = self._environment.metrics.running(self._spec.model)
        if self._gauge is not running:
            self._gauge.dec()
            self._gauge = running
            self._gauge.inc()
            self.span.event("first token", {})
        if isinstance(item, RequestFinished):
            self._finished = item

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gauge.dec()
        if self._finished is not None and isinstance(error, _LEFT):
            kind = error = trace = None  # a client that has the end reads no further
        facts = self._facts()
        self.span.set({f"outrider.{name}": value for name, value in facts.items() if value is not None})
        if self._finished is not None:
            self.span.set({"gen_ai.usage.output_tokens": self._finished.num_output_tokens})
        if self._environment.settings.logs_requests:
            self._tell(facts, error)
        self._open_span.__exit__(kind, error, trace)

    def _facts(self) -> dict[str, Any]:
        """Figures of a request that ended, without any of its content; empty for others."""
        if self._finished is None:
            return {}
        counts, times = self._finished.counts, self._finished.times
        return {
            "finish_reason": self._finished.candidates[0].finish_reason,
            "num_output_tokens": self._finished.num_output_tokens,
            "time_to_first_token_ms": times.time_to_first_token_ms,
            "generation_time_ms": times.generation_ms,
            "num_draft_tokens": counts.num_draft_tokens,
            "num_accepted_draft_tokens": counts.num_accepted_draft_tokens,
        }

    def _tell(self, facts: dict[str, Any], error: BaseException | None) -> None:
        request = self._spec.request
        known = {
            "request_id": request.request_id,
            "tenant": request.tenant or None,
            "model": self._spec.model,
            "status": self._status(error),
            "num_prompt_tokens": len(self._spec.prompt_token_ids),
            "trace_id": self.span.traceparent.split("-")[1] if self.span.is_recorded else None,
            **facts,
        }
        shown = " ".join(f"{name}={_shown(value)}" for name, value in known.items() if value is not None)
        _log.info("%s", shown, extra=known)

    def _status(self, error: BaseException | None) -> str:
        """The name of a gRPC status, as failures are counted."""
        if isinstance(error, OutriderError):
            return error.grpc_code
        if isinstance(error, _LEFT):
            return "CANCELLED"
        return OutriderError.grpc_code if error is not None or self._finished is None else "OK"


def _shown(value: str | float) -> str:
    """Formats a field of a log line. Clients choose some values: a reader that splits a line at blanks and `=` must not
    find any made up by a client, so a value that is no plain word is a JSON string without either."""
    if not isinstance(value, str):
        return f"{value:.1f}" if isinstance(value, float) else str(value)
    if _PLAIN_WORD.fullmatch(value):
        return value
    return json.dumps(value).replace(" ", r"\u0020").replace("=", r"\u003d")
