"""Files below a prefix of a bucket of S3 or Google Cloud Storage.

Both through `obstore`, which the coordinator's image has for the files of batches: it finds a pod's credentials at
either provider, so nobody needs HMAC keys for Google's XML API.

Checksums: a bucket states none that can be relied on. The ETag of an object that was uploaded in one part is its MD5,
unless it is encrypted with a customer's key; whether that holds here is tried with config.json. An object in several
parts has no usable one. But a folder that `outrider fetch` made and somebody uploaded carries its record, whose sha256
are then compared. Without either sizes and headers are, and every read asks for just the version that was listed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from command_line.fetch.choice import CONFIG
from command_line.fetch.record import RECORD, recorded_digests
from command_line.fetch.sources import CHUNK_BYTES, FILES_MAX, Digest, Listing, SourceFile, without_secrets
from outrider.buckets import GCS, S3, open_bucket
from outrider.errors import ConfigurationError, Unavailable

SCHEMES: Final = (f"{S3}://", f"{GCS}://")
PIECE_BYTES: Final = 64 << 20
"""Bytes of one request, whose time is bounded as a whole."""
_TIMEOUT: Final = timedelta(minutes=5)
_SMALL_BYTES: Final = 16 << 20  # of config.json and the record
_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_METADATA: Final = ("169.254.169.254", "metadata.google.internal")  # asked for a role where there are no credentials
_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')


class BucketSource:
    """A prefix of a bucket."""

    def __init__(self, address: str) -> None:
        """Raises ConfigurationError."""
        self.address = self.name = address.rstrip("/")
        self.commit: str | None = None
        self._bucket = open_bucket(self.address, self.address, (S3, GCS), _TIMEOUT)

    def list_files(self) -> Listing:
        files: list[SourceFile] = []
        try:
            for page in self._bucket.obstore.list(self._bucket.store):
                files += (self._file(each) for each in page)
                if len(files) > FILES_MAX:
                    raise ConfigurationError(
                        f"{self.address} has more than {FILES_MAX} files; name the folder of one model"
                    )
        except (self._bucket.errors.BaseError, OSError) as error:
            raise self._failed(error, self.address) from error
        if not files:
            raise ConfigurationError(f"{self.address} has no files; are bucket and prefix right?")
        return Listing(None, tuple(self._with_digests(Listing(None, tuple(files)))))

    def read(self, listing: Listing, file: SourceFile, start: int) -> Iterator[bytes]:
        options: dict[str, Any] = {"range": (start, min(start + PIECE_BYTES, file.size))}
        if file.tag is not None:
            options["if_match"] = file.tag
        try:
            found = self._bucket.obstore.get(self._bucket.store, file.path, options=options)
            for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)
        except (self._bucket.errors.BaseError, OSError) as error:
            raise self._failed(error, f"{self.address}/{file.path}") from error

    def close(self) -> None:
        pass

    def _file(self, described: Any) -> SourceFile:
        path, size, tag = str(described["path"]), int(described["size"]), described["e_tag"]
        version = tag or described["last_modified"].isoformat()
        return SourceFile(path, size, f"{self.address}/{path} {version} {size}", None, tag)

    def _with_digests(self, listing: Listing) -> Iterator[SourceFile]:
        recorded = recorded_digests(self._small(listing, RECORD))
        config = listing.named(CONFIG)
        # Where this object's ETag is no MD5, others' are not either.
        has_md5 = config is not None and _md5_of(config) == hashlib.md5(self._small(listing, CONFIG)).hexdigest()
        for file in listing.files:
            if file.path in recorded:
                yield file.with_digest(Digest("sha256", recorded[file.path]))
            elif has_md5 and (value := _md5_of(file)):
                yield file.with_digest(Digest("md5", value))
            else:
                yield file

    def _small(self, listing: Listing, path: str) -> bytes:
        file = listing.named(path)
        if file is None or not 0 < file.size <= _SMALL_BYTES:
            return b""
        found = b""
        for chunk in self.read(listing, file, 0):
            found += chunk
            if len(found) > file.size:
                raise ConfigurationError(f"{self.address}/{path} has more than the {file.size} bytes that are listed")
        return found

    def _failed(self, error: Exception, what: str) -> Exception:
        errors = self._bucket.errors
        if isinstance(error, errors.PreconditionError):
            return ConfigurationError(f"{what} was changed while it was fetched; run the command again")
        text = str(error).partition("\n\nDebug source:")[0]
        # The client has no classes for refused listings.
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if isinstance(error, FileNotFoundError) or status == 404:
            return ConfigurationError(f"{what} does not exist; are bucket and prefix right?")
        if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)) or status in (401, 403):
            return ConfigurationError(
                f"{what} may not be read with these credentials: give this pod's role, or the keys in its environment, "
                f"the right to list and read it ({without_secrets(text)})"
            )
        if any(host in text for host in _METADATA):
            return ConfigurationError(
                f"{what} needs credentials, and there are none: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
                "GOOGLE_SERVICE_ACCOUNT, give the pod a role, or, for a public bucket, set AWS_SKIP_SIGNATURE=true or "
                "GOOGLE_SKIP_SIGNATURE=true"
            )
        if 300 <= status < 500 and status not in (408, 429):
            return ConfigurationError(f"{what}: {without_secrets(text)}")
        return Unavailable(f"{what}: {without_secrets(text)}", 2.0)


def _md5_of(file: SourceFile) -> str | None:
    found = _MD5.fullmatch(file.tag or "")
    return found[1] if found else None
