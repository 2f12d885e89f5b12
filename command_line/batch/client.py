"""Client of a server's files and batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from command_line.batch.options import ServerOptions
from command_line.client import ApiError, error_text, look_for, new_client
from outrider.errors import InvalidRequest

DIGEST: Final = "outrider_file_sha256"
"""Key of a batch's metadata by which the batch of a file is found again."""
_WINDOW: Final = "24h"
_PAGES_MAX: Final = 10
_BUSY: Final = (408, 429)  # and everything from 500 on
_PAGE: Final = 100
_LINE_BYTES_MAX: Final = 8 << 20
_LOST: Final = ("failed", "cancelled", "expired")  # a repetition runs these files again


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A file of requests on this machine."""

    path: Path
    endpoint: str  # that of its first request
    digest: str

    @classmethod
    def read(cls, path: Path) -> RequestFile:
        """Reads a file. Raises OSError, and InvalidRequest if its first line names no endpoint."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            first = file.readline(_LINE_BYTES_MAX)
            while first and not first.strip():
                first = file.readline(_LINE_BYTES_MAX)
        try:
            url = json.loads(first)["url"]
        except (ValueError, KeyError, TypeError):
            url = None
        if not isinstance(url, str):
            raise InvalidRequest(
                None,
                'its first line is no request; a line is {"custom_id": "1", "method": "POST", "url": '
                '"/v1/chat/completions", "body": {"messages": [...]}}',
            )
        return cls(path, url, digest)


class ServerBusy(ApiError):
    """The server could not answer now, and may later."""


class BatchClient:
    """Calls of one server. All raise ApiError with the server's own message, and httpx.HTTPError."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def at(cls, options: ServerOptions, url: str) -> AsyncIterator[BatchClient]:
        """Opens a client. Raises ConfigurationError for a server that is missing, or wants a key."""
        async with new_client(url, options.api_key) as client:
            await look_for(client, url, "OUTRIDER_API_KEY")
            yield cls(client)

    async def find(self, file: RequestFile, *, takes_partial: bool = False) -> dict[str, Any] | None:
        """Finds the newest batch of a file that runs or is complete; with `takes_partial` also one whose time was up
        after it had answered lines."""
        after = ""
        for _ in range(_PAGES_MAX):
            params = {"limit": str(_PAGE)} | ({"after": after} if after else {})
            page = await self._call("GET", "/v1/batches", params=params)
            for batch in page["data"]:
                is_partial = takes_partial and batch["status"] == "expired" and batch["output_file_id"] is not None
                is_of_file = (batch.get("metadata") or {}).get(DIGEST) == file.digest
                if is_of_file and (is_partial or batch["status"] not in _LOST):
                    return dict(batch)
            if not page["has_more"]:
                break
            after = page["last_id"]
        return None

    async def create(self, file: RequestFile) -> dict[str, Any]:
        """Uploads a file and creates its batch."""
        with file.path.open("rb") as content:
            files = {"file": (file.path.name, content, "application/jsonl")}
            uploaded = await self._call("POST", "/v1/files", data={"purpose": "batch"}, files=files)
        body = {
            "input_file_id": uploaded["id"],
            "endpoint": file.endpoint,
            "completion_window": _WINDOW,
            "metadata": {DIGEST: file.digest, "file": file.path.name[:512]},
        }
        return await self._call("POST", "/v1/batches", json=body)

    async def get(self, batch_id: str) -> dict[str, Any]:
        """Returns a batch."""
        return await self._call("GET", f"/v1/batches/{batch_id}")

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancels a batch."""
        return await self._call("POST", f"/v1/batches/{batch_id}/cancel")

    async def has_results(self, batch: dict[str, Any]) -> bool:
        """Whether the files of a batch are there, if it has ended."""
        for file_id in _results(batch):
            response = await self._client.get(f"/v1/files/{file_id}")
            if response.status_code == httpx.codes.NOT_FOUND:
                return False
        return True

    async def delete_files(self, batch: dict[str, Any]) -> None:
        """Deletes the file of a batch, and its results."""
        for file_id in (batch["input_file_id"], *_results(batch)):
            response = await self._client.delete(f"/v1/files/{file_id}")
            if response.status_code != httpx.codes.NOT_FOUND:  # by an earlier run
                _check(response)

    async def download(self, file_id: str, path: Path) -> int:
        """Writes the content of a file, which is there as a whole or not at all; returns how many lines it has."""
        temporary = path.with_name(f".{path.name}.part")
        num_lines = 0
        try:
            with temporary.open("wb") as file:
                async with self._client.stream("GET", f"/v1/files/{file_id}/content") as response:
                    if response.status_code != httpx.codes.OK:
                        raise ApiError(f"{response.status_code}: {error_text(await response.aread())}")
                    async for piece in response.aiter_bytes():
                        file.write(piece)
                        num_lines += piece.count(b"\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return num_lines

    async def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        response = await self._client.request(method, path, **arguments)
        _check(response)
        found: dict[str, Any] = response.json()
        return found


def _results(batch: dict[str, Any]) -> list[str]:
    return [file_id for name in ("output", "error") if (file_id := batch[f"{name}_file_id"]) is not None]


def _check(response: httpx.Response) -> None:
    """Raises ApiError unless the answer is one."""
    status, request = response.status_code, response.request
    if status != httpx.codes.OK:
        kind = ServerBusy if status >= 500 or status in _BUSY else ApiError
        raise kind(f"{request.method} {request.url.path}: {status}: {error_text(response.content)}")
