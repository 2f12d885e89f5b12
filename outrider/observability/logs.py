"""Logging of a process: lines for people, or one JSON object per line.

_log.warning("leaves its target: %s", reason, extra={"request_id": ..., "worker_id": ...})

Fields named here become JSON fields of their own, beside the message. Prompts and outputs never get into a log.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TextIO

from outrider.local.private_files import open_private
from outrider.visible_text import visible

FIELDS: Final = (
    "request_id", "session_id", "worker_id", "tenant", "model", "status", "finish_reason", "num_prompt_tokens",
    "num_output_tokens", "time_to_first_token_ms", "generation_time_ms", "num_draft_tokens",
    "num_accepted_draft_tokens", "trace_id",
)  # fmt: skip
_log = logging.getLogger(__name__)


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line; unknown fields are left out."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return visible(json.dumps(line, ensure_ascii=False, default=str), is_one_line=True)


class TextFormatter(logging.Formatter):
    """Formats lines for people. A message is one line, whatever it quotes: nobody can write lines into a log."""

    def __init__(self, origin: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {origin}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record), is_one_line=True)

    def formatException(self, ei: Any) -> str:
        return visible(super().formatException(ei))


def configure(form: LogFormat, *, level: int = logging.INFO, path: Path | None = None, origin: str = "") -> None:
    """Makes all loggers of this process write to standard error, or append to the file `path` if it can be opened.

    `origin` tells lines for people apart from those of other processes. A new file is its owner's alone.
    """
    stream: TextIO = sys.stderr
    failure = ""
    if path is not None:
        try:
            stream = os.fdopen(open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", 1, encoding="utf-8")
        except OSError as error:
            # Under systemd another process' standard error is a socket, which /proc names but nobody can open.
            failure = str(error)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter(origin))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if failure:
        _log.warning("logs go to this process' own standard error: %s", failure)
