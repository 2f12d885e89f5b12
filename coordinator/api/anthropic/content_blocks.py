"""The content blocks of a message while it is generated, and the events that tell of them. Pure.

content_block_start  content_block_delta ...  content_block_stop        of each block, one after the other
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

Event = dict[str, Any]


class ContentBlocks:
    """The blocks of one message. Each method returns events."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        """The blocks; the last one is not complete before `end`."""
        self._deltas: list[str] = []  # of the open block
        self._is_open = False

    def add_text(self, text: str) -> list[Event]:
        """Adds to the text that is open, or begins one."""
        return [*self._begin("text", text=""), self._delta("text_delta", "text", text)]

    def add_thinking(self, text: str) -> list[Event]:
        """Adds to the thinking that is open, or begins one."""
        events = self._begin("thinking", thinking="", signature="")
        return [*events, self._delta("thinking_delta", "thinking", text)]

    def begin_call(self, call_id: str, name: str) -> list[Event]:
        """Begins the call of a tool."""
        return [*self.end(), *self._begin("tool_use", id=call_id, name=name, input={})]

    def add_arguments(self, text: str) -> list[Event]:
        """Adds to the arguments of the call that is open."""
        return [self._delta("input_json_delta", "partial_json", text)]

    def end(self) -> list[Event]:
        """Ends the open block, if there is one."""
        if not self._is_open:
            return []
        block, text = self.content[-1], "".join(self._deltas)
        self._is_open = False
        if block["type"] == "tool_use":
            # Arguments that were cut off are no object; the answer's `stop_reason` says that they were.
            with suppress(ValueError, RecursionError):
                block["input"] = json.loads(text or "{}")
        else:
            block[block["type"]] = text
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _begin(self, kind: str, **values: Any) -> list[Event]:
        if self._is_open and self.content[-1]["type"] == kind:
            return []
        events = self.end()
        self._deltas, self._is_open = [], True
        self.content.append({"type": kind, **values})
        start = {"index": len(self.content) - 1, "content_block": {"type": kind, **values}}
        return [*events, {"type": "content_block_start", **start}]

    def _delta(self, kind: str, name: str, text: str) -> Event:
        self._deltas.append(text)
        index = len(self.content) - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}
