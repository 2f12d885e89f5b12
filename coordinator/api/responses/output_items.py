"""The output items of a response while it is generated, and the events that tell of them. Pure.

An item is a message, a reasoning or a call of a function. Items come one after the other: the next one ends the last.

    output_item.added
        content_part.added  output_text.delta ...  output_text.done  content_part.done          of a message
        content_part.added  reasoning_text.delta ...  reasoning_text.done  content_part.done    of a reasoning
        function_call_arguments.delta ...  function_call_arguments.done                         of a call
    output_item.done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

Event = dict[str, Any]

_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS: Final = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class OutputItems:
    """The items of one response. Each method returns events, without their sequence numbers."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._items: list[dict[str, Any]] = []
        self._deltas: list[str] = []  # of the open item
        self._logprobs: list[Any] = []  # of the open message
        self._is_open = False

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items that have ended."""
        return self._items[: len(self._items) - self._is_open]

    @property
    def has_any(self) -> bool:
        """Whether an item has begun."""
        return bool(self._items)

    def add_text(self, text: str, logprobs: Sequence[Any]) -> list[Event]:
        """Adds to the message that is open, or begins one."""
        events = self._begin("message")
        self._logprobs += logprobs
        return [*events, self._delta(text, {"content_index": 0, "logprobs": [*logprobs]})]

    def add_reasoning(self, text: str) -> list[Event]:
        """Adds to the reasoning that is open, or begins one."""
        return [*self._begin("reasoning"), self._delta(text, {"content_index": 0})]

    def begin_call(self, call_id: str, name: str) -> list[Event]:
        """Begins the call of a function."""
        return [*self.end(), *self._begin("function_call", call_id=call_id, name=name)]

    def add_arguments(self, text: str) -> list[Event]:
        """Adds to the arguments of the call that is open."""
        return [self._delta(text, {})]

    def end(self, status: str = "completed") -> list[Event]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return []
        item, text = self._items[-1], "".join(self._deltas)
        self._is_open, item["status"] = False, status
        name = _EVENTS[item["type"]]
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event(f"{name}.done", {"name": item["name"], "arguments": text})]
        else:
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            about = {"content_index": 0, "text": text}
            about |= {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events = [
                self._event(f"{name}.done", about),
                self._event("content_part.done", {"content_index": 0, "part": part}),
            ]
        return [*events, self._item_event("output_item.done")]

    def _begin(self, kind: str, **values: str) -> list[Event]:
        if self._is_open and self._items[-1]["type"] == kind and not values:
            return []
        events = self.end()
        self._deltas, self._logprobs, self._is_open = [], [], True
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{self._request_id}_{len(self._items)}",
            "type": kind,
            "status": "in_progress",
            **values,
        }
        if kind == "function_call":
            item["arguments"] = ""
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._items.append(item)
        events.append(self._item_event("output_item.added"))
        if kind != "function_call":
            events.append(self._event("content_part.added", {"content_index": 0, "part": _part(kind, "", [])}))
        return events

    def _delta(self, text: str, about: dict[str, Any]) -> Event:
        self._deltas.append(text)
        return self._event(f"{_EVENTS[self._items[-1]['type']]}.delta", {**about, "delta": text})

    def _item_event(self, name: str) -> Event:
        return {"type": f"response.{name}", "output_index": len(self._items) - 1, "item": dict(self._items[-1])}

    def _event(self, name: str, about: dict[str, Any]) -> Event:
        index = len(self._items) - 1
        return {"type": f"response.{name}", "item_id": self._items[-1]["id"], "output_index": index, **about}


def _part(kind: str, text: str, logprobs: Sequence[Any]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
