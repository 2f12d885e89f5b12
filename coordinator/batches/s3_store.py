"""Files in a bucket of S3, or of a server that talks its protocol, through `obstore`.

The address is `s3://BUCKET/PREFIX`. Credentials, region and endpoint come from the variables that AWS's own tools read:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT (with AWS_ALLOW_HTTP=true for one without TLS), or
from the machine's role.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

from coordinator.batches.file_store import PIECE_BYTES, check_name
from outrider.errors import ConfigurationError, NotFound, Unavailable

SCHEME: Final = "s3://"
_PART_BYTES: Final = 8 << 20  # of an upload; S3 takes parts from 5 MiB
_TIMEOUT: Final = timedelta(seconds=30)  # of one call
_RETRIES: Final = 3


class S3Store:
    """Files in a bucket."""

    def __init__(self, url: str) -> None:
        """Raises ConfigurationError for an address without a bucket, or without the package `obstore`."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise ConfigurationError(f"--batch-files {url} is no address of a bucket; write s3://BUCKET/PREFIX")
        try:
            self._obstore: Any = importlib.import_module("obstore")
            store: Any = importlib.import_module("obstore.store")
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"--batch-files {url} needs the package obstore; install it with `pip install 'outrider[s3]'`"
            ) from error
        self._errors: Any = importlib.import_module("obstore.exceptions")
        try:
            self._store = store.S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                # Options given here replace the variable of AWS's tools.
                client_options={"timeout": _TIMEOUT, "allow_http": os.environ.get("AWS_ALLOW_HTTP") == "true"},
                retry_config={"max_retries": _RETRIES, "retry_timeout": _TIMEOUT},
            )
        except self._errors.BaseError as error:
            raise ConfigurationError(f"--batch-files {url} cannot be used: {error}") from error

    async def write(self, name: str, content: AsyncIterator[bytes]) -> int:
        path, num_bytes = check_name(name), 0
        try:
            async with self._obstore.open_writer_async(self._store, path, buffer_size=_PART_BYTES) as writer:
                async for piece in content:
                    await writer.write(piece)
                    num_bytes += len(piece)
        except BaseException as error:
            await self._discard(path)  # closing the writer has published what had come
            if isinstance(error, (self._errors.BaseError, OSError)):
                raise _failed(error) from error
            raise
        return num_bytes

    async def _discard(self, path: str) -> None:
        with contextlib.suppress(Exception):
            await self._obstore.delete_async(self._store, path)

    async def read(self, name: str, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        try:
            return bytes(await self._obstore.get_range_async(self._store, check_name(name), start=start, end=end))
        except (self._errors.NotFoundError, FileNotFoundError):
            raise NotFound("the content of the file is gone") from None
        except self._errors.BaseError as error:
            raise _failed(error) from error

    async def pieces(self, name: str) -> AsyncIterator[bytes]:
        try:
            found = await self._obstore.get_async(self._store, check_name(name))
            async for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)
        except (self._errors.NotFoundError, FileNotFoundError):
            raise NotFound("the content of the file is gone") from None
        except self._errors.BaseError as error:
            raise _failed(error) from error

    async def delete(self, name: str) -> None:
        try:
            await self._obstore.delete_async(self._store, check_name(name))
        except (self._errors.NotFoundError, FileNotFoundError):
            return
        except self._errors.BaseError as error:
            raise _failed(error) from error


def _failed(error: Exception) -> Unavailable:
    return Unavailable(f"S3 does not take the call: {str(error)[:300]}", 10.0)
