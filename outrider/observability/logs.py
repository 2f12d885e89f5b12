"""Logging of a process: lines for people, or one JSON object per line.

_log.warning("leaves its target: %s", reason, extra={"request_id": ..., "worker_id": ...})

Fields named here become JSON fields of their own, beside the message. Prompts and outputs never get into a log.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Final, TextIO

FIELDS: Final = (
    "request_id", "session_id", "worker_id", "tenant", "model", "status", "finish_reason", "num_prompt_tokens",
    "num_output_tokens", "time_to_first_token_ms", "generation_time_ms", "num_draft_tokens",
    "num_accepted_draft_tokens", "trace_id",
)  # fmt: skip
_log = logging.getLogger(__name__)
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(form: LogFormat, *, level: int = logging.INFO, path: Path | None = None) -> None:
    """Makes all loggers of this process write to standard error, or append to the file `path` if it can be opened."""
    stream: TextIO = sys.stderr
    failure = ""
    if path is not None:
        try:
            stream = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            # Under systemd another process' standard error is a socket, which /proc names but nobody can open.
            failure = str(error)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    if failure:
        _log.warning("logs go to this process' own standard error: %s", failure)
