"""The check of a file of requests, all or nothing: no line runs unless every line may. Pure.

Each line is read by the same code as a request that a client sends by itself. All lines have the batch's endpoint as
their url, and no two the same `custom_id`. The file is read in pieces, and only digests of the ids stay in memory. A
piece may have thousands of lines, so they are checked in slices.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from coordinator.batches.batch_lines import LINE_BYTES_MAX, LINES_MAX, LineIndex, read_line, told_error
from outrider.errors import InvalidRequest, OutriderError

ERRORS_MAX: Final = 100
"""Most errors that are reported; the check ends with the last of them."""
CheckBody = Callable[[str, bytes], None]
"""Checks the body of a request to a path. Raises an OutriderError that names the parameter."""


class FileCheck:
    """Checks a file that comes in pieces: `feed` each, `check_some` until it returns False, and in the end `end`."""

    def __init__(self, endpoint: str, check_body: CheckBody) -> None:
        self._endpoint = endpoint
        self._check_body = check_body
        self._rest = bytearray()  # of a line that has not ended
        self._lines: deque[bytes] = deque()  # that have ended, and are not checked
        self._place = 0  # of the rest in the file, in bytes
        self._number = 0  # of the last line, from 1, empty ones included
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._seen: set[bytes] = set()  # digests of ids
        self.errors: list[Mapping[str, Any]] = []
        """The errors found, with the numbers of their lines."""
        self.is_over = False
        """Whether the rest of the file would change nothing."""

    def feed(self, piece: bytes) -> None:
        """Takes the next piece; the one before has been checked."""
        if self.is_over:
            return
        self._rest += piece
        if b"\n" in piece:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._lines.extend(lines)
            self._rest = bytearray(rest)

    def check_some(self, is_time_up: Callable[[], bool]) -> bool:
        """Checks lines that have ended, at least one if there is one, until the time is up; returns whether some are
        left."""
        while self._lines and not self.is_over:
            line = self._lines.popleft()
            self._take(line)
            self._place += len(line) + 1
            if self._lines and is_time_up():
                return not self.is_over
        if len(self._rest) > LINE_BYTES_MAX and not self.is_over:
            self._number += 1
            self._refuse("line_too_long", None, f"the line is longer than {LINE_BYTES_MAX} bytes")
            self.is_over = True
        return False

    def end(self) -> LineIndex:
        """Checks the last line, and returns the places of all lines, which are good only without errors."""
        if self._rest and not self.is_over:
            self._take(bytes(self._rest))
        if not self._starts and not self.errors:
            message = "the file has no requests; each line is one, as a JSON object"
            self.errors.append(told_error(None, "empty_file", message, None))
        return LineIndex(self._starts, self._ends)

    def _take(self, raw: bytes) -> None:
        """Checks one line; empty ones are left out."""
        self._number += 1
        if self.is_over or not raw.strip():
            return
        if len(self._starts) == LINES_MAX:
            self._refuse("too_many_lines", None, f"the file has more than {LINES_MAX} requests; send several files")
            self.is_over = True
            return
        self._starts.append(self._place)
        self._ends.append(self._place + len(raw))
        try:
            self._check(raw)
        except OutriderError as error:
            parameter = error.parameter if isinstance(error, InvalidRequest) else None
            self._refuse(error.code or "invalid_request", parameter, error.told)

    def _check(self, raw: bytes) -> None:
        line = read_line(raw)
        if line.url != self._endpoint:
            raise InvalidRequest(
                "url", f"url is {line.url[:100]!r}, and the batch's endpoint is {self._endpoint}; a file has one url"
            )
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise InvalidRequest("custom_id", f"custom_id {line.custom_id!r} is that of an earlier line, too")
        self._seen.add(digest)
        self._check_body(line.url, line.body)

    def _refuse(self, code: str, parameter: str | None, message: str) -> None:
        self.errors.append(told_error(parameter, code, message, self._number))
        self.is_over |= len(self.errors) >= ERRORS_MAX
