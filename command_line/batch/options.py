"""Settings of `outrider batch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.settings import REQUIRED, check, setting

_ASKED = "Whom to ask"
_RESULT = "What to make of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Which server has the batches."""

    url: str = setting("http://127.0.0.1:8000", "address of the server, as `outrider serve` printed it", _ASKED)
    api_key: str | None = setting(None, "sent as a bearer token", _ASKED, variable="OUTRIDER_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions(ServerOptions):
    """Settings of the commands for one batch."""

    batch_id: str = setting(REQUIRED, "id of a batch, as `outrider batch run` printed it", flag=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ServerOptions):
    """Settings of `outrider batch run`. Raises SettingError."""

    file: Path = setting(REQUIRED, "requests, one JSON object per line", flag=None)
    output: Path | None = setting(
        None, "file for the answers; those that failed go beside it, with the ending .errors.jsonl",
        _RESULT, "file", shows="FILE with the ending .output.jsonl",
    )  # fmt: skip
    detach: bool = setting(False, "return as soon as the batch is created", _RESULT)
    new: bool = setting(False, "create another batch even if this file has one already", _RESULT)

    def __post_init__(self) -> None:
        check(self)
