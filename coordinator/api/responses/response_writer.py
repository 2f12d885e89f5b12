"""Writes the answer of the Responses API, whole or as events. Pure: the time of creation is passed in.

    response.created  response.in_progress  (events of items)  response.completed | response.incomplete
    ... error  response.failed                                  where an error ends the stream

Invariant: the whole answer is the response of the stream's last event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from coordinator.api.answer.json_text import finite
from coordinator.api.answer.openai_response import metrics_json
from coordinator.api.answer.single_answer import SingleAnswer, named_event, num_cached_tokens
from coordinator.api.responses.output_items import Event, OutputItems
from coordinator.api.responses.response_body import ResponseBody
from coordinator.intake.generation_request import GenerationSpec
from coordinator.recovery.resumption import ResumePoint
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.text.tokenizer import Tokenizer

_NO_FORMAT: Final = {"type": "text"}


class ResponsesWriter(SingleAnswer):
    """Writes one response."""

    end = ""  # the last event says that it is the last

    def __init__(
        self,
        spec: GenerationSpec,
        body: ResponseBody,
        tokenizer: Tokenizer,
        *,
        created_s: int,
        new_call_id: Callable[[], str],
        is_kept: bool,
    ) -> None:
        """`created_s` is Unix time; `new_call_id` draws the id of a tool call; `is_kept`: the answer will be stored."""
        super().__init__(spec, tokenizer, spec.request.request_id, new_call_id)
        self._body = body
        fields = {"tools", "tool_choice", "text", "reasoning"}
        self._sent = finite(body.model_dump(include=fields, by_alias=True, exclude_unset=True, exclude_none=True))
        self._is_kept = is_kept
        self._created_s = created_s
        self._items = OutputItems(self.request_id)
        self._held_logprobs: list[Any] = []  # of tokens whose text is held back
        self._num_events = 0
        self._finish_reason: str | None = None

    def whole(self, collected: Sequence[ChoiceOutput], finished: RequestFinished) -> dict[str, Any]:
        """Builds the answer to a request that does not stream."""
        for item in collected:
            self._take(item)
        return self._finished(finished)

    def opening(self, points: Sequence[ResumePoint] | None = None) -> list[str]:
        """Writes the events before the first token."""
        body = self._response("in_progress")
        return [self._written({"type": f"response.{name}", "response": body}) for name in ("created", "in_progress")]

    def event(self, item: ChoiceOutput) -> str | None:
        """Writes an item as events; None if there is nothing to show."""
        return "".join(map(self._written, self._take(item))) or None

    def closing(self, finished: RequestFinished) -> list[str]:
        """Writes the event after the last token."""
        body = self._finished(finished)
        return [self._written({"type": f"response.{body['status']}", "response": body})]

    def failure(self, error: OutriderError) -> str:
        """Writes the events of an error that ends the stream."""
        parameter = error.parameter if isinstance(error, InvalidRequest) else None
        about = {"code": error.code or error.error_type, "message": error.told}
        code = {InvalidRequest: "invalid_prompt", Overloaded: "rate_limit_exceeded"}.get(type(error), "server_error")
        body = self._response("failed") | {"error": {"code": code, "message": error.told}}
        return self._written({"type": "error", **about, "param": parameter}) + self._written(
            {"type": "response.failed", "response": body}
        )

    def _take(self, item: ChoiceOutput) -> list[Event]:
        """Adds an item of output to the response, and returns the events that tell of it."""
        piece = self._choice.piece(item.item)
        events: list[Event] = []
        self._held_logprobs += (piece.logprobs or {}).get("content") or ()
        if piece.reasoning:
            self._held_logprobs.clear()
            events += self._items.add_reasoning(piece.reasoning)
        if piece.text:
            events += self._items.add_text(piece.text, self._held_logprobs)
            self._held_logprobs.clear()
        for delta in piece.tool_calls:
            self._held_logprobs.clear()  # only text has log probabilities
            if "id" in delta:
                events += self._items.begin_call(delta["id"], delta["function"]["name"])
            if delta["function"]["arguments"]:
                events += self._items.add_arguments(delta["function"]["arguments"])
        if piece.finish_reason is not None:
            self._finish_reason = piece.finish_reason
            if not self._items.has_any:  # clients expect a message
                events += self._items.add_text("", self._held_logprobs)
            events += self._items.end("incomplete" if piece.finish_reason == "length" else "completed")
        return events

    def _finished(self, finished: RequestFinished) -> dict[str, Any]:
        num_input, num_output = len(self._spec.prompt_token_ids), finished.num_generated_tokens
        is_cut = self._finish_reason == "length"
        answer = self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": num_input,
                "input_tokens_details": {"cached_tokens": num_cached_tokens(finished), "cache_write_tokens": 0},
                "output_tokens": num_output,
                "output_tokens_details": {"reasoning_tokens": self._choice.num_reasoning_tokens},
                "total_tokens": num_input + num_output,
            },
            "metrics": metrics_json(self._spec, finished),
        }
        self.answer = answer
        return answer

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self._body, self._spec.request.sampling
        sent = self._sent
        text, reasoning = sent.get("text") or {}, sent.get("reasoning") or {}
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._spec.model,
            "output": self._items.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": self._is_kept,
            "temperature": sampling.temperature,
            "text": {"format": _NO_FORMAT, **text},
            "tool_choice": sent.get("tool_choice", "auto"),
            "tools": [tool for tool in sent.get("tools") or [] if tool["type"] == "function"],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _written(self, event: Event) -> str:
        numbered = {"type": event["type"], "sequence_number": self._num_events} | event
        self._num_events += 1
        return named_event(event["type"], numbered)
