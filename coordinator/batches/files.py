"""Clients' files: their records in Redis by tenant, their content in a `FileStore`.

    or:file:TENANT:ID       hash: a file (`StoredFile`); TENANT is a digest, of nobody without keys
    or:files:of:TENANT      sorted set: a tenant's files by their creation
    or:files:sizes:TENANT   hash: their bytes, which are limited together, and the end of their life: "BYTES MS"
    or:files:stored         sorted set: names of all stored content by when it is to be deleted

Content is announced in the last one before it is written, for a few hours, and then for as long as something refers to
it: so a process that dies leaves little, and not for long. A record ends with its content. All times are Redis'.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from redis.commands.core import AsyncScript

from coordinator.access.api_keys import Caller
from coordinator.batches import journal_scripts as scripts
from coordinator.batches.file_store import FileStore
from coordinator.batches.line_journal import digest_of_tenant
from outrider.errors import InvalidRequest, NotFound, Unavailable
from outrider.registry.registry import Registry

FILE_BYTES_MAX: Final = 200 << 20
"""Most bytes of an uploaded file, as at OpenAI for batches."""
FILES_MAX: Final = 1000
"""Most files of a tenant."""
LIFE_S: Final = 30 * 86400
"""Life of a file for which nothing else is asked, as at OpenAI for batches."""
LIFE_MIN_S: Final = 3600
LIFE_MAX_S: Final = LIFE_S
"""Bounds of `expires_after.seconds`, as at OpenAI."""
_WRITING_S: Final = 6 * 3600.0  # after which content is deleted that nothing refers to: what wrote it has died
_DUE_MAX: Final = 100  # deleted at once
_STORED: Final = "or:files:stored"
_NO_LIMIT: Final = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file as Redis keeps it. Times are in seconds since 1970."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int
    content: str  # name in the store


class Files:
    """The files of all tenants."""

    def __init__(self, registry: Registry, store: FileStore, bytes_max: int) -> None:
        """`bytes_max`: most bytes of a tenant's files together."""
        self.store = store
        self._registry = registry
        self._bytes_max = bytes_max
        register = registry.register_script
        self._add, self._drop = register(scripts.ADD_FILE), register(scripts.DROP_FILE)
        self._read = register(scripts.READ)
        self._page, self._due = register(scripts.PAGE), register(scripts.DUE)
        self._announce, self._forget = register(scripts.ANNOUNCE), register(scripts.FORGET)

    async def upload(
        self, caller: Caller, filename: str, purpose: str, content: AsyncIterator[bytes], life_s: int = LIFE_S
    ) -> StoredFile:
        """Stores a client's file. Raises InvalidRequest if the tenant's files are too many or too large together."""
        file_id = f"file-{uuid.uuid4().hex}"
        name = f"files/{file_id}"
        await self.announce(name)
        num_bytes = await self.store.write(name, content)
        now_s = int(await self._registry.now_s())
        file = StoredFile(
            file_id=file_id,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now_s,
            expires_at=now_s + life_s,
            content=name,
        )
        full = await self.record(caller.tenant, file, files_max=FILES_MAX, bytes_max=self._bytes_max)
        if full is not None:
            await self.delete_content(name)
            raise InvalidRequest("file", full)
        return file

    async def record(
        self, tenant: str | None, file: StoredFile, *, files_max: int = _NO_LIMIT, bytes_max: int = _NO_LIMIT
    ) -> str | None:
        """Records a file whose content is stored, in place of an earlier record of its id, whose content is deleted.
        Returns why it was not."""
        arguments: list[str | int] = [file.file_id, file.expires_at * 1000, file.num_bytes, files_max, bytes_max]
        arguments += ["about", json.dumps(asdict(file))]
        answer, earlier = await self._ask(self._add, _keys(tenant, file.file_id), arguments)
        if answer == "files":
            return f"there are {files_max} files of yours, the most that may be; delete some (DELETE /v1/files/ID)"
        if answer == "bytes":
            return (
                f"your files would have more than {bytes_max} bytes together; delete some (DELETE /v1/files/ID), or "
                "let the operator set a higher --batch-bytes-max"
            )
        await self.announce(file.content, file.expires_at)
        # What is not deleted here is deleted when its time comes.
        with suppress(Unavailable, ValueError, TypeError, KeyError):  # the earlier record may be damaged
            if earlier and (before := json.loads(earlier)["content"]) != file.content:
                await self.delete_content(before)
        return None

    async def get(self, tenant: str | None, file_id: str, parameter: str = "file_id") -> StoredFile:
        """Reads the record of a file. Raises NotFound."""
        found = await self._ask(self._read, _keys(tenant, file_id)[:1], [])
        if not found:
            raise NotFound(f"there is no file {file_id[:100]!r}; it may have been deleted, or have expired", parameter)
        return StoredFile(**json.loads(dict(zip(found[::2], found[1::2], strict=True))["about"]))

    async def page(self, caller: Caller, after: str, limit: int, *, oldest_first: bool) -> Sequence[StoredFile]:
        """A tenant's files after one of them. Raises NotFound if there is no such file."""
        keys = _keys(caller.tenant, "")
        ids = await self._ask(self._page, keys[1:2], [after, limit, int(oldest_first)])
        if ids is None:
            raise NotFound(f"there is no file {after[:100]!r}", "after")
        files = []
        for file_id in ids:
            try:
                files.append(await self.get(caller.tenant, file_id))
            except NotFound:  # it expired
                await self._ask(self._drop, _keys(caller.tenant, file_id), [file_id])
        return files

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Deletes a file. Raises NotFound."""
        file = await self.get(caller.tenant, file_id)
        await self._ask(self._drop, _keys(caller.tenant, file_id), [file_id])
        await self.delete_content(file.content)

    async def announce(self, name: str, until_s: float | None = None) -> None:
        """Says that content will be stored, and when it is to be deleted, in seconds since 1970; None: soon, unless it
        is announced again because something refers to it."""
        if until_s is None:
            until_s = await self._registry.now_s() + _WRITING_S
        await self._ask(self._announce, [_STORED], [name, int(until_s * 1000)])

    async def delete_content(self, name: str) -> None:
        """Deletes stored content."""
        await self.store.delete(name)
        await self._ask(self._forget, [_STORED], [name])

    async def delete_due(self) -> int:
        """Deletes content whose time has come; returns how many names that were, at most a hundred."""
        names = await self._ask(self._due, [_STORED], [_DUE_MAX])
        for name in names:
            await self.delete_content(name)
        return len(names)

    async def _ask(self, script: AsyncScript, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        return await self._registry.ask(script(keys=list(keys), args=list(arguments)))


def check_life(seconds: int) -> int:
    """Returns a life of a file. Raises InvalidRequest if it is out of bounds."""
    if not LIFE_MIN_S <= seconds <= LIFE_MAX_S:
        raise InvalidRequest(
            "expires_after.seconds", f"expires_after.seconds must be {LIFE_MIN_S} to {LIFE_MAX_S}, and is {seconds}"
        )
    return seconds


def _keys(tenant: str | None, file_id: str) -> list[str]:
    digest = digest_of_tenant(tenant)
    return [f"or:file:{digest}:{file_id}", f"or:files:of:{digest}", f"or:files:sizes:{digest}"]
