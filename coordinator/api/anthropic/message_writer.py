"""Writes the answer of Anthropic's Messages API, whole or as events. Pure.

message_start  (events of blocks)  message_delta  message_stop
... error                                               where an error ends the stream
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.api.answer.openai_response import metrics_json
from coordinator.api.answer.single_answer import SingleAnswer, named_event, num_cached_tokens
from coordinator.api.anthropic.content_blocks import ContentBlocks, Event
from coordinator.api.anthropic.errors import anthropic_error
from coordinator.intake.generation_request import GenerationSpec
from coordinator.recovery.resumption import ResumePoint
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.errors import OutriderError
from outrider.text.tokenizer import Tokenizer


class MessageWriter(SingleAnswer):
    """Writes one message."""

    end = ""  # the last event says that it is the last

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, *, new_call_id: Callable[[], str]) -> None:
        """`new_call_id` draws the id of a tool call."""
        super().__init__(spec, tokenizer, spec.request.request_id, new_call_id)
        self._blocks = ContentBlocks()
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def whole(self, collected: Sequence[ChoiceOutput], finished: RequestFinished) -> dict[str, Any]:
        """Builds the answer to a request that does not stream."""
        for item in collected:
            self._take(item)
        return self._message() | {"usage": self._usage(finished), "metrics": metrics_json(self._spec, finished)}

    def opening(self, points: Sequence[ResumePoint] | None = None) -> list[str]:
        """Writes the event before the first token."""
        usage = {"input_tokens": len(self._spec.prompt_token_ids), "output_tokens": 0, **_cache(0)}
        return [_written({"type": "message_start", "message": self._message() | {"usage": usage}})]

    def event(self, item: ChoiceOutput) -> str | None:
        """Writes an item as events; None if there is nothing to show."""
        return "".join(map(_written, self._take(item))) or None

    def closing(self, finished: RequestFinished) -> list[str]:
        """Writes the events after the last token."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        metrics = metrics_json(self._spec, finished)
        return [
            _written({"type": "message_delta", "delta": delta, "usage": self._usage(finished), "metrics": metrics}),
            _written({"type": "message_stop"}),
        ]

    def failure(self, error: OutriderError) -> str:
        """Writes the event of an error that ends the stream."""
        return _written(anthropic_error(error, self.request_id))

    def _take(self, item: ChoiceOutput) -> list[Event]:
        """Adds an item of output to the message, and returns the events that tell of it."""
        piece = self._choice.piece(item.item)
        events: list[Event] = []
        if piece.reasoning:
            events += self._blocks.add_thinking(piece.reasoning)
        if piece.text:
            events += self._blocks.add_text(piece.text)
        for delta in piece.tool_calls:
            if "id" in delta:
                events += self._blocks.begin_call(delta["id"], delta["function"]["name"])
            if delta["function"]["arguments"]:
                events += self._blocks.add_arguments(delta["function"]["arguments"])
        if piece.finish_reason is not None:
            events += self._blocks.end()
            self._stop(piece.finish_reason, piece.stop_reason)
        return events

    def _stop(self, finish_reason: str, stop_reason: str | int | None) -> None:
        asked = self._spec.request.max_tokens
        match finish_reason:
            case "tool_calls":
                self._stop_reason = "tool_use"
            case "length":
                is_cut = asked is not None and self._spec.max_tokens < asked
                self._stop_reason = "model_context_window_exceeded" if is_cut else "max_tokens"
            case _ if isinstance(stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", stop_reason
            case _:
                self._stop_reason = "end_turn"

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._spec.model,
            "content": self._blocks.content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
        }

    def _usage(self, finished: RequestFinished) -> dict[str, Any]:
        num_cached = num_cached_tokens(finished)
        return {
            "input_tokens": len(self._spec.prompt_token_ids) - num_cached,
            "output_tokens": finished.num_generated_tokens,
            **_cache(num_cached),
        }


def _cache(num_cached: int) -> dict[str, int]:
    return {"cache_creation_input_tokens": 0, "cache_read_input_tokens": num_cached}


def _written(event: Event) -> str:
    return named_event(event["type"], event)
