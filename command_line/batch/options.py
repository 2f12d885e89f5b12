"""Settings of `outrider batch`."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.settings import REQUIRED, SettingError, check, setting

_ASKED = "Whom to ask"
_RESULT = "What to make of it"
_RAY = "Files of any size"


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

    file: str = setting(
        REQUIRED, "requests, one JSON object per line; with --ray also a folder, or a URL such as s3://BUCKET/FOLDER",
        flag=None,
    )  # fmt: skip
    output: str | None = setting(
        None, "file for the answers; those that failed go beside it, with the ending .errors.jsonl. With --ray: a "
        "folder, or a URL", _RESULT, "file", shows="FILE with the ending .output.jsonl",
    )  # fmt: skip
    detach: bool = setting(False, "return as soon as the batch is created", _RESULT)
    new: bool = setting(False, "create another batch even if this file has one already", _RESULT)
    ray: bool = setting(
        False, "for files of any size: Ray Data cuts them into pieces, of which each becomes a batch", _RAY
    )
    ray_address: str | None = setting(
        None, "cluster of Ray that runs the pieces", _RAY, "address", shows="RAY_ADDRESS, or a Ray on this machine"
    )
    at_once: int = setting(4, "pieces that run at the same time", _RAY, "pieces", at_least=1, at_most=32)

    def __post_init__(self) -> None:
        check(self)
        if self.ray and (self.detach or self.new):
            raise SettingError(
                "ray", "--ray follows its batches, and finds those of an earlier run: leave out --detach and --new"
            )
