"""Parses a streamed answer into events and measurements. Pure: the caller passes arrival times.

Invariant: an event's time is the arrival of the bytes that completed its line, taken before any parsing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

LINE_BYTES_MAX: Final = 16 << 20  # longer than any event; a body without line ends must not fill the memory
_DETAIL_CHARS: Final = 300
# Fields of a chat delta that contain output, under the names that servers use.
_DELTA_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


class RequestError(Exception):
    """A request failed. `cause` is what failures are counted by, `detail` is about this one."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause
        self.detail = detail[:_DETAIL_CHARS]


class EventSplitter:
    """Splits a body into the data of its server-sent events, wherever the network split it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the lines that `received` completed. Raises RequestError for a line without an end."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_BYTES_MAX:
            raise RequestError("malformed stream", f"a line of more than {LINE_BYTES_MAX} bytes")
        # Comments, event names, ids and the blank lines between events have no meaning here.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(slots=True)
class Observation:
    """Measurements of one answer. Times are in seconds on the clock of `sent_s`."""

    sent_s: float
    text_s: list[float] = field(default_factory=list)  # arrival of every chunk with output
    finish_s: float | None = None  # arrival of the finish reason, which includes a last token without text
    num_usage_tokens: int | None = None  # output tokens by the server's count
    mean_acceptance_length: float | None = None
    num_spec_steps: int | None = None
    num_events: int = 0
    is_done: bool = False  # [DONE] was read

    def absorb(self, data: bytes, arrived_s: float) -> None:
        """Adds one event. Raises RequestError for an error inside the stream and for an invalid chunk."""
        self.num_events += 1
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError("malformed stream", f"{error} in {_shown(data)}") from error
        if not isinstance(chunk, dict):
            raise RequestError("malformed stream", f"no object: {_shown(data)}")
        if chunk.get("error") is not None or chunk.get("object") == "error":
            raise RequestError("error in stream", _message(chunk))
        try:
            self._absorb_chunk(chunk, arrived_s)
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError("malformed stream", f"{error} in {_shown(data)}") from error

    def _absorb_chunk(self, chunk: dict[str, Any], arrived_s: float) -> None:
        for choice in chunk.get("choices") or ():
            if choice.get("text") or _has_text(choice.get("delta")):
                self.text_s.append(arrived_s)
            if choice.get("finish_reason") is not None:
                self.finish_s = arrived_s
        usage = chunk.get("usage")
        if usage and usage.get("completion_tokens") is not None:
            self.num_usage_tokens = int(usage["completion_tokens"])
        metrics = chunk.get("metrics")
        statistics = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(statistics, dict) and statistics.get("mean_acceptance_length") is not None:
            self.num_spec_steps = statistics.get("num_spec_steps")
            if self.num_spec_steps != 0:  # otherwise nothing was verified, and the mean is 1 by convention
                self.mean_acceptance_length = float(statistics["mean_acceptance_length"])

    def check_complete(self) -> None:
        """Raises RequestError if the stream ended before the answer did."""
        if not self.num_events:
            raise RequestError("not an event stream", "no line of the answer begins with data:")
        if not self.is_done and self.finish_s is None:
            raise RequestError("stream cut", "it ended without a finish reason or [DONE]")
        if self.e2el_s is None:
            raise RequestError("empty answer", "neither text nor a finish reason")

    @property
    def num_output_tokens(self) -> int:
        """Output tokens by the server's count, else one per chunk, which is too few if chunks contain several."""
        return len(self.text_s) if self.num_usage_tokens is None else self.num_usage_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first output; to the finish if no token has text; None without a token."""
        if self.text_s:
            return self.text_s[0] - self.sent_s
        if self.finish_s is not None and self.num_output_tokens > 0:
            return self.finish_s - self.sent_s
        return None

    @property
    def e2el_s(self) -> float | None:
        """Time from sending to the last output or the finish reason, whichever came last; None if neither came."""
        ends = [*self.text_s[-1:], *([] if self.finish_s is None else [self.finish_s])]
        return max(ends) - self.sent_s if ends else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between chunks with output. Chunks that arrived together have a gap of 0."""
        return tuple(later - earlier for earlier, later in pairwise(self.text_s))


def _has_text(delta: dict[str, Any] | None) -> bool:
    return delta is not None and any(delta.get(name) for name in _DELTA_TEXTS)


def _shown(data: bytes) -> str:
    return repr(data[:80].decode(errors="replace"))


def _message(chunk: dict[str, Any]) -> str:
    error = chunk.get("error") or chunk
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
