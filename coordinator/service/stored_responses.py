"""Responses that clients may refer to: kept in Redis for a while, with the conversations that led to them.

A client of the Responses API refers to an earlier response by its id, or to an item of its output by the item's. Both
contain the id of the request, under which the response is kept:

    or:response:TENANT:REQUEST   hash; TENANT is a digest, of nobody without keys
        response   the response as JSON, without its output
        output     its items, without log probabilities
        input      the items of the conversation before them

Storing is best effort. A response that is too long, or that Redis does not take, is not kept. Where a replica's
responses take up its share of memory, its oldest ones are deleted, first those of a tenant with more than its share.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from coordinator.access.api_keys import Caller
from outrider.errors import InvalidRequest, NotFound, RegistryUnavailable
from outrider.security.tenants import tenant_digest

_log = logging.getLogger(__name__)

RESPONSE_BYTES_MAX: Final = 256 << 10
"""Bytes of one response with its conversation. A longer one is not kept."""
REPLICA_BYTES_MAX: Final = 64 << 20
"""Bytes of all responses that a replica keeps: Redis needs room for leases too."""
TENANT_SHARE: Final = 0.25
"""Share of these bytes for one tenant, if keys distinguish tenants."""
REFERENCES_MAX: Final = 512
"""Most responses that one request may refer to."""
READ_BYTES_MAX: Final = 1 << 20
"""Most bytes of items that one request may refer to: as many as a prompt may have."""
_RESPONSE_ID: Final = re.compile(r"resp_(.+)")
_ITEM_ID: Final = re.compile(r"(?:msg|rs|fc)_(.+)_\d+")

Item = dict[str, Any]


class ResponseStore(Protocol):
    """The part of the registry that stores responses."""

    async def write_response(self, name: str, fields: Mapping[str, str], life_s: float) -> None: ...
    async def read_response(self, name: str, *fields: str) -> list[str | None]: ...
    async def delete_responses(self, names: Sequence[str]) -> int: ...


@dataclass(frozen=True, slots=True)
class References:
    """The references of a request, by the ids that the client sent."""

    previous_id: str | None = None  # the response that it goes on from
    item_ids: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.previous_id is not None or bool(self.item_ids)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The stored parts of a conversation that a request refers to."""

    before: Sequence[Item] = ()  # the conversation up to the previous response, with its output
    items: Mapping[str, Item] = field(default_factory=dict)  # by id


NOTHING_REMEMBERED: Final = Remembered()


class StoredResponses:
    """The responses that this replica stores, and the lookup of those of all replicas."""

    def __init__(
        self,
        store: ResponseStore | None,
        now_s: Callable[[], float],
        life_s: float,
        bytes_max: int = REPLICA_BYTES_MAX,
    ) -> None:
        """`store` is None without a registry, and nothing is kept then, as with a `life_s` of 0."""
        self._store = store if life_s else None
        self._now_s = now_s
        self._life_s = life_s
        self._bytes_max = bytes_max
        # By name, the oldest first: when it expires, the tenant, its bytes.
        self._kept: dict[str, tuple[float, str | None, int]] = {}
        self._num_bytes: Counter[str | None] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether responses are kept at all."""
        return self._store is not None

    async def keep(self, caller: Caller, request_id: str, response: Item, before: Sequence[Mapping[str, Any]]) -> bool:
        """Stores a response that was answered, and the conversation `before` it. Returns whether it is kept."""
        about = {name: value for name, value in response.items() if name != "output"}
        output = [_without_logprobs(item) for item in response["output"]]
        fields = {"response": _dumped(about), "output": _dumped(output), "input": _dumped(before)}
        num_bytes = sum(len(text.encode()) for text in fields.values())
        if self._store is None or num_bytes > RESPONSE_BYTES_MAX:
            return False
        name = _name(caller, request_id)
        self._forget(name)
        self._kept[name] = self._now_s() + self._life_s, caller.tenant, num_bytes
        self._num_bytes[caller.tenant] += num_bytes
        try:
            if excess := self._excess(caller.tenant):
                await self._store.delete_responses(excess)
            await self._store.write_response(name, fields, self._life_s)
        except RegistryUnavailable as error:
            _log.warning("response %s is not kept: %s", request_id, error.message)
            self._forget(name)
            return False
        return True

    async def look_up(self, caller: Caller, references: References) -> Remembered:
        """Finds what a request refers to. Raises InvalidRequest for what is not kept, RegistryUnavailable."""
        before: list[Item] = []
        if references.previous_id is not None:
            found = await self._read(caller, references.previous_id, "input", "output")
            if found is None:
                raise InvalidRequest("previous_response_id", self._missing(f"response {references.previous_id!r}"))
            before = [*found[0], *found[1]]
        wanted = {each: match[1] for each in references.item_ids if (match := _ITEM_ID.fullmatch(each))}
        names = dict.fromkeys(wanted.values())
        if len(names) > REFERENCES_MAX:
            raise InvalidRequest("input", f"input refers to {len(names)} responses; permitted: {REFERENCES_MAX}")
        items: dict[str, Item] = {}
        num_bytes = 0
        for name in names:
            texts = await self._texts(caller, name, "output")
            num_bytes += sum(map(len, texts))
            if num_bytes > READ_BYTES_MAX:
                raise InvalidRequest("input", f"input refers to more than {READ_BYTES_MAX} bytes of stored items")
            items |= {item["id"]: item for text in texts for item in json.loads(text)}
        missing = [each for each in references.item_ids if each not in items]
        if missing:
            raise InvalidRequest("input", self._missing(f"item {missing[0]!r}"))
        return Remembered(before, items)

    async def get(self, caller: Caller, response_id: str) -> dict[str, Any]:
        """Returns a response as it was answered. Raises NotFound, RegistryUnavailable."""
        found = await self._read(caller, response_id, "response", "output")
        if found is None:
            raise NotFound(self._missing(f"response {response_id!r}"), "response_id")
        return {**found[0], "output": found[1]}

    async def delete(self, caller: Caller, response_id: str) -> None:
        """Deletes a response. Raises NotFound, RegistryUnavailable."""
        match, num_deleted = _RESPONSE_ID.fullmatch(response_id), 0
        if self._store is not None and match is not None and await self._texts(caller, match[1], "response"):
            name = _name(caller, match[1])
            self._forget(name)
            num_deleted = await self._store.delete_responses([name])
        if not num_deleted:
            raise NotFound(self._missing(f"response {response_id!r}"), "response_id")

    async def _read(self, caller: Caller, response_id: str, *fields: str) -> list[Any] | None:
        match = _RESPONSE_ID.fullmatch(response_id)
        texts = [] if match is None else await self._texts(caller, match[1], *fields)
        return [json.loads(text) for text in texts] or None

    async def _texts(self, caller: Caller, request_id: str, *fields: str) -> list[str]:
        """These fields of a response; none of one that is not kept, or whose model does not exist for the caller."""
        if self._store is None:
            return []
        about, *texts = await self._store.read_response(_name(caller, request_id), "response", *fields)
        if about is None or None in texts:
            return []
        if caller.models is not None and not caller.may_use(json.loads(about).get("model", "")):
            return []
        return [text for text in texts if text is not None]

    def _missing(self, what: str) -> str:
        why = f"responses are kept for {self._life_s:g} s, except long ones and those with store: false"
        if self._store is None:
            why = "this server keeps no responses"
        return f"{what} is not stored: {why}; send the items of the conversation themselves as input"

    def _excess(self, tenant: str | None) -> list[str]:
        """Forgets what has expired, then the oldest that there is no room for. Returns the names of the latter."""
        excess: list[str] = []
        now_s = self._now_s()
        while self._kept and self._kept[first := next(iter(self._kept))][0] <= now_s:
            self._forget(first)
        share = self._bytes_max if tenant is None else int(self._bytes_max * TENANT_SHARE)
        while self._num_bytes[tenant] > share:
            excess.append(next(name for name, (_, whose, _) in self._kept.items() if whose == tenant))
            self._forget(excess[-1])
        while self._num_bytes.total() > self._bytes_max:
            excess.append(next(iter(self._kept)))
            self._forget(excess[-1])
        return excess

    def _forget(self, name: str) -> None:
        _, tenant, num_bytes = self._kept.pop(name, (0.0, None, 0))
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]


def _name(caller: Caller, request_id: str) -> str:
    return f"{tenant_digest(caller.tenant) if caller.tenant else ''}:{request_id}"


def _without_logprobs(item: Item) -> Item:
    """Copies an item of output without the log probabilities, which may take up many times its text."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
