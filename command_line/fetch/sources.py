"""The interface of a source of files: it lists them, and reads one from any byte on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from outrider.errors import ConfigurationError

CHUNK_BYTES: Final = 1 << 20
"""Bytes that are read, hashed and written at once."""
FILES_MAX: Final = 20_000
"""Most files of a source. A model has a few hundred at most; more is the address of something else."""
_SECRETS: Final = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BEARER_TOKEN"),
)
_SIGNED: Final = re.compile(r"(https?://[^\s?\"'<>]*)\?[^\s\"'<>]*")  # the query of an address carries signatures
_SHOWN_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum that the source states."""

    kind: str  # sha256, git-sha1 or md5
    value: str  # hexadecimal


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source."""

    path: str  # relative, with /
    size: int  # bytes
    identity: str  # differs where the content may: a checksum, or whatever the source has instead
    digest: Digest | None = None
    tag: str | None = None  # the source's own mark of a version, for reading just that one

    def with_digest(self, digest: Digest | None) -> SourceFile:
        """The same file with another checksum."""
        return replace(self, digest=digest)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source at one moment."""

    revision: str | None  # the commit, where the source has commits
    files: tuple[SourceFile, ...]

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a path that leads out of the folder into which files are fetched."""
        for file in self.files:
            if file.path.startswith("/") or ".." in file.path.split("/") or "\0" in file.path:
                raise ConfigurationError(f"the source lists {file.path[:100]!r}, which is no file inside of it")

    def named(self, path: str) -> SourceFile | None:
        """The file of this path, if there is one."""
        return next((file for file in self.files if file.path == path), None)


class Source(Protocol):
    """A place that files come from.

    All calls raise Unavailable for what a later try may change, and ConfigurationError for what the operator must.
    """

    address: str
    """The whole address."""
    name: str
    """The address without a revision: two sources of one name are versions of one model."""
    commit: str | None
    """The commit that the address itself names; then nothing can change behind it."""

    def list_files(self) -> Listing:
        """All files, in one request where that is possible."""
        ...

    def read(self, listing: Listing, file: SourceFile, start: int) -> Iterator[bytes]:
        """The content from `start` on, at least a byte; it may end before the file does."""
        ...

    def close(self) -> None:
        """Closes connections."""
        ...


def without_secrets(error: Any) -> str:
    """The text of an error, short, without credentials and signatures."""
    text = _SIGNED.sub(r"\1?…", str(error) or type(error).__name__)
    for name in _SECRETS:
        if value := os.environ.get(name, "").strip():
            text = text.replace(value, f"<{name}>")
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
