"""Files of a folder of this machine, such as a volume that somebody filled by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from command_line.fetch.record import RECORD, RECORD_BYTES_MAX, recorded_digests
from command_line.fetch.sources import CHUNK_BYTES, FILES_MAX, Digest, Listing, SourceFile
from outrider.errors import ConfigurationError, Unavailable


class FolderSource:
    """A folder. Its own record, if it has one, states checksums."""

    def __init__(self, address: str) -> None:
        """Raises ConfigurationError if there is no such folder."""
        self._folder = Path(address).resolve()
        self.address = self.name = str(self._folder)
        self.commit: str | None = None
        if not self._folder.is_dir():
            raise ConfigurationError(
                f"{address} is no folder; name one, or hf://ORG/NAME@REVISION, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            )

    def list_files(self) -> Listing:
        try:
            recorded = recorded_digests(self._record())
            paths = [path for pattern in ("*", "*/*") for path in self._folder.glob(pattern) if path.is_file()]
            if len(paths) > FILES_MAX:
                raise ConfigurationError(f"{self.address} has {len(paths)} files; name the folder of one model")
            return Listing(None, tuple(self._file(path, recorded) for path in sorted(paths)))
        except OSError as error:
            raise ConfigurationError(f"{self.address} cannot be read: {error}") from error

    def read(self, listing: Listing, file: SourceFile, start: int) -> Iterator[bytes]:
        try:
            with (self._folder / file.path).open("rb") as opened:
                opened.seek(start)
                while chunk := opened.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:  # of a network file system, it may pass
            raise Unavailable(f"{self._folder / file.path}: {error.strerror}") from error

    def close(self) -> None:
        pass

    def _record(self) -> bytes:
        path = self._folder / RECORD
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(RECORD_BYTES_MAX)

    def _file(self, path: Path, recorded: dict[str, str]) -> SourceFile:
        name, found = path.relative_to(self._folder).as_posix(), path.stat()
        digest = Digest("sha256", recorded[name]) if name in recorded else None
        identity = f"{path} {found.st_size} {found.st_mtime_ns}" if digest is None else f"sha256:{digest.value}"
        return SourceFile(name, found.st_size, identity, digest)
