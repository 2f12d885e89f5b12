"""The common part of writers whose answer is one sequence and whose events have names. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from coordinator.api.answer.answer_size import SMALL_ANSWER_VALUES, num_values, written_bytes
from coordinator.api.answer.choice_writer import AnswerFormat, ChoiceWriter
from coordinator.intake.generation_request import GenerationSpec
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.text.tokenizer import Tokenizer


class SingleAnswer:
    """Writes the answer to a request of one sequence; each API derives its own writer."""

    def __init__(
        self, spec: GenerationSpec, tokenizer: Tokenizer, request_id: str, new_call_id: Callable[[], str]
    ) -> None:
        """`request_id` is the client's; `new_call_id` draws the id of a tool call."""
        self.request_id = request_id
        self.answer: dict[str, Any] | None = None
        """The complete answer, where later requests may refer to it."""
        self._spec = spec
        self._tokenizer = tokenizer
        self._choice = ChoiceWriter(spec, AnswerFormat(is_chat=True), tokenizer, new_call_id)

    def num_values(self, item: ChoiceOutput) -> int:
        """Estimates the tokens and log probabilities that are written for an item."""
        return num_values(self._spec, item.item)

    def size_of(self, item: ChoiceOutput) -> int:
        """Estimates the peak bytes that a whole answer takes for an item, besides the item itself."""
        return written_bytes(self._spec, item.item, self._tokenizer, is_chat=True)

    def is_long(self, item: ChoiceOutput) -> bool:
        """Whether writing an item takes long enough to do it in a thread."""
        return self.num_values(item) > SMALL_ANSWER_VALUES


def num_cached_tokens(finished: RequestFinished) -> int:
    """Counts tokens of the prompt whose KV was there already."""
    return finished.candidates[0].num_cached_tokens or 0


def named_event(name: str, content: dict[str, Any]) -> str:
    """Writes a server-sent event with a name."""
    return f"event: {name}\ndata: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
