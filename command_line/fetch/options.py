"""Settings of `outrider fetch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.settings import REQUIRED, check, setting

_HOW = "How to fetch"
_RESULT = "What to make of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Settings of `outrider fetch`. Raises SettingError."""

    source: str = setting(
        REQUIRED, "where the model is: hf://ORG/NAME@REVISION, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or a folder",
        flag=None,
    )  # fmt: skip
    folder: Path = setting(
        REQUIRED, "folder that shall hold the model; the same as SOURCE: check that folder and leave it as it is",
        flag=None,
    )  # fmt: skip
    replace: bool = setting(
        False, "if FOLDER holds another model, another version of it, or a damaged one: replace it once the new one is "
        "complete", _HOW,
    )  # fmt: skip
    verify: bool = setting(False, "compare the checksums of a folder that is already there, not only sizes", _HOW)
    at_once: int = setting(8, "files that are fetched at the same time", _HOW, "files", at_least=1, at_most=32)
    wait_only: bool = setting(
        False,
        "fetch nothing: wait until another process has fetched SOURCE into FOLDER, as a pod waits for its Job",
        _HOW,
    )
    max_wait_s: float = setting(
        7200.0, "longest wait for another process that fetches the same folder", _HOW, "seconds", above=0,
        at_most=604_800,
    )  # fmt: skip
    json: Path | None = setting(None, "write the result as one JSON object; - prints it", _RESULT, "file|-")

    def __post_init__(self) -> None:
        check(self)
