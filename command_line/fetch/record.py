"""The record of a fetched folder: where its files come from, and what they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from outrider import __version__
from outrider.errors import ConfigurationError
from outrider.model_files import parse_json

RECORD: Final = "outrider-fetch.json"
"""Its name inside the folder."""
_VERSION: Final = 1
RECORD_BYTES_MAX: Final = 64 << 20
_PATH: Final = re.compile(r"(?:(?!\.\.?/)[^/\0]+/)?(?!\.\.?$)[^/\0]+")
"""A file of the folder, or of a folder in it."""


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """One file of the folder."""

    path: str
    size: int  # bytes
    sha256: str
    identity: str  # the source's own
    compared: str  # sha256, git-sha1, md5, or size where the source states no checksum


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a fetched folder, and their origin."""

    source: str
    name: str  # the source without its revision
    revision: str | None  # the commit, where the source has commits
    fetched_at: str  # ISO 8601, UTC
    files: tuple[RecordedFile, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"version": _VERSION, "outrider": __version__, "num_bytes": self.num_bytes, **asdict(self)}

    def write(self, folder: Path) -> None:
        """Writes it into a folder that is not in use yet."""
        (folder / RECORD).write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def made_now(cls, source: str, name: str, revision: str | None, files: list[RecordedFile]) -> Record:
        """The record of files that were just fetched."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(source, name, revision, at, tuple(sorted(files, key=lambda file: file.path)))

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record of a folder, if it has one. Raises ConfigurationError for one that cannot be read."""
        path = folder / RECORD
        try:
            if not path.is_file():
                return None
            if path.stat().st_size > RECORD_BYTES_MAX:
                raise ValueError("it is too long")
            return cls.parsed(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error

    @classmethod
    def parsed(cls, content: bytes) -> Record:
        """Reads its JSON. Raises ValueError, KeyError or TypeError."""
        found: Mapping[str, Any] = parse_json(content)
        if found["version"] != _VERSION:
            raise ValueError(f"it has version {found['version']!r}, and this release reads {_VERSION}")
        files = tuple(RecordedFile(**each) for each in found["files"])
        if any(not _PATH.fullmatch(file.path) for file in files):
            raise ValueError("it names a file that is not in the folder")
        return cls(found["source"], found["name"], found["revision"], found["fetched_at"], files)


def recorded_digests(content: bytes) -> dict[str, str]:
    """The sha256 of the files in a record that came with them; none if it is no record of ours."""
    try:
        return {file.path: file.sha256 for file in Record.parsed(content).files} if content else {}
    except (ValueError, KeyError, TypeError):
        return {}
