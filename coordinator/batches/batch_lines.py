"""The lines of a batch: requests as clients write them, and results as OpenAI's output files have them. Pure.

A part holds the results of a few lines, before all parts are joined: one line each, whose first byte tells the output
(`o`) from the errors (`e`).
"""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.batches.batch import LineCounts
from coordinator.intake.json_size import check_json_size
from outrider.errors import InvalidRequest

LINES_MAX: Final = 50_000
"""Most lines of a file, as at OpenAI."""
LINE_BYTES_MAX: Final = 8 << 20
"""Most bytes of a line: those of a body of one request."""
CUSTOM_ID_CHARS_MAX: Final = 512
_OUTPUT: Final = b"o"
_ERROR: Final = b"e"
_FIELDS: Final = ("custom_id", "method", "url", "body")
_PARAMETER_CHARS_MAX: Final = 100
_MESSAGE_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    body: bytes  # JSON, as a client would send it


@dataclass(frozen=True, slots=True)
class LineResult:
    """The end of one request: an answer, or the reason why there is none."""

    status: int  # of HTTP; 0: the request never ran
    request_id: str
    body: Any  # the answer or OpenAI's error body; for a request that never ran, `code` and `message`

    @property
    def is_error(self) -> bool:
        return self.status != 200

    def counts(self) -> LineCounts:
        """Computes the result's share of its batch's sums. The API that was called says how its body names tokens."""
        if self.is_error:
            return LineCounts(num_failed=1)
        usage = self.body.get("usage") or {}
        given, made = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
        return LineCounts(
            num_completed=1,
            num_input_tokens=usage.get(f"{given}_tokens", 0),
            num_cached_tokens=(usage.get(f"{given}_tokens_details") or {}).get("cached_tokens", 0),
            num_output_tokens=usage.get(f"{made}_tokens", 0),
            num_reasoning_tokens=(usage.get(f"{made}_tokens_details") or {}).get("reasoning_tokens", 0),
        )


def read_line(raw: bytes) -> BatchLine:
    """Reads one line. Raises InvalidRequest that names the field.

    The longest line takes 0.1 s, so call this in a thread for one that is not short.
    """
    if len(raw) > LINE_BYTES_MAX:
        raise InvalidRequest(None, f"the line has {len(raw)} bytes; permitted: {LINE_BYTES_MAX}")
    check_json_size(raw, None, "the line")
    try:
        content = json.loads(raw.removeprefix(codecs.BOM_UTF8).decode())
        if not isinstance(content, dict):
            raise InvalidRequest(None, "the line must be a JSON object")
        if b"\\ud" in raw.lower():
            _check_surrogates(content)
        body = json.dumps(content.get("body"), ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply
        raise InvalidRequest(None, f"the line is not valid JSON: {error}") from error
    if unknown := [name for name in content if name not in _FIELDS]:
        raise InvalidRequest(unknown[0], f"unknown field {unknown[0][:100]!r}; a line has {', '.join(_FIELDS)}")
    custom_id, url = content.get("custom_id"), content.get("url")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        raise InvalidRequest("custom_id", f"custom_id must be a text of 1 to {CUSTOM_ID_CHARS_MAX} characters")
    if content.get("method") != "POST":
        raise InvalidRequest("method", "method must be POST")
    if not isinstance(url, str):
        raise InvalidRequest("url", "url must be a text, such as /v1/chat/completions")
    if not isinstance(content.get("body"), dict):
        raise InvalidRequest("body", "body must be a JSON object, the body of one request")
    return BatchLine(custom_id, url, body)


def _check_surrogates(content: Mapping[str, Any]) -> None:
    """Refuses a text with half of a character, which JSON can escape and UTF-8 cannot hold. Raises InvalidRequest."""
    for name, value in content.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            field = name if name in _FIELDS else None
            raise InvalidRequest(
                field,
                f"{field or 'the name or the value of a field'} has an unpaired surrogate "
                f"(\\u{ord(error.object[error.start]):04x}), half of a character: send the whole character, or none",
            ) from error


def result_line(batch_id: str, line: int, custom_id: str, result: LineResult) -> bytes:
    """Writes a result as a line of an output file, without its newline."""
    response, error = None, None
    if result.status:
        response = {"status_code": result.status, "request_id": result.request_id, "body": result.body}
    else:
        error = result.body
    content = {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{line}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can escape
        return json.dumps(content, separators=(",", ":")).encode()


def part_line(line: bytes, *, is_error: bool) -> bytes:
    """Writes a result as a line of a part, with its newline."""
    return (_ERROR if is_error else _OUTPUT) + line + b"\n"


def lines_of_part(part: bytes, *, errors: bool) -> bytes:
    """The lines of the output, or of the errors, that a part holds."""
    marker = _ERROR if errors else _OUTPUT
    chosen = [each[1:] for each in part.split(b"\n") if each.startswith(marker)]
    return b"".join(each + b"\n" for each in chosen)


def join_part(lines: Iterable[bytes]) -> bytes:
    """Joins lines of `part_line` to a part."""
    return b"".join(lines)


@dataclass(frozen=True, slots=True)
class LineIndex:
    """The places of a file's lines, so that each can be read by itself: line `i` is `[starts[i], ends[i])` in bytes."""

    starts: Sequence[int]
    ends: Sequence[int]

    def __len__(self) -> int:
        return len(self.starts)

    def to_bytes(self) -> bytes:
        """The index as a file has it."""
        return array("Q", (*self.starts, *self.ends)).tobytes()

    @classmethod
    def from_bytes(cls, raw: bytes) -> LineIndex:
        """Reads an index. Raises ValueError if it is damaged."""
        if len(raw) % 16:
            raise ValueError("the index of a batch's lines is damaged")
        numbers = array("Q")
        numbers.frombytes(raw)
        half = len(numbers) // 2
        return cls(numbers[:half], numbers[half:])


def never_ran(code: str, message: str) -> LineResult:
    """The result of a request that did not run."""
    return LineResult(0, "", {"code": code, "message": message})


def told_error(parameter: str | None, code: str, message: str, line: int | None) -> Mapping[str, Any]:
    """An error of the check of a file, in OpenAI's form; lines are counted from 1. What it quotes is cut: it may be as
    long as a line."""
    return {
        "code": code,
        "message": message[:_MESSAGE_CHARS_MAX],
        "param": None if parameter is None else parameter[:_PARAMETER_CHARS_MAX],
        "line": line,
    }
