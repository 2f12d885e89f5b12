"""Batches in Redis, and the leases on their lines, by which any process may die and each line still ends once.

    {or:batch:ID}:batch      hash: the batch (`Batch.from_fields`); `next`: the first line that nobody has claimed;
                             `task`: the fence of the process that checks or finalizes it
    {or:batch:ID}:leases     sorted set: claimed lines by the end of their lease
    {or:batch:ID}:owners     hash: claimed lines, each with the fence of its last claim
    {or:batch:ID}:attempts   hash: claimed lines, each with how often it was claimed
    {or:batch:ID}:parts      list: names of stored parts, each with the results of a few lines
    or:batches:of:TENANT     sorted set: a tenant's batches by their creation; TENANT is a digest
    or:batches:open:TENANT   sorted set: those of them that are not over
    or:batches:active        sorted set: batches of all tenants that are not over, in the order in which they may run:
                             each tenant's first one, by their creation, then each one's second, and so on

Invariant: a line is unclaimed (`next` and above), claimed (in `owners`), or ended: its result is in exactly one of
`parts`. A commit takes all lines of a part out of `owners` and adds the part, in one script, and only if each line has
the fence under which it ran. So a process that has lost its lease, or repeats a commit, changes nothing.

All of it expires. Every method raises RegistryUnavailable if Redis does not answer, and may then be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from redis.commands.core import AsyncScript

from coordinator.access.api_keys import Caller
from coordinator.batches import journal_scripts as scripts
from coordinator.batches.batch import Batch, BatchState, LineCounts, sources_of
from outrider.errors import Overloaded
from outrider.registry.registry import Registry
from outrider.security.tenants import tenant_digest

LEASE_S: Final = 15.0
RECORD_S: Final = 32 * 86400.0
"""Life of a batch's record in Redis: its window and the usual life of its output, and some more."""
OPEN_MAX: Final = 64
"""Most batches of a tenant that are not over."""
KEPT_MAX: Final = 1000
"""Most batches of a tenant that are kept; beyond them its oldest ones that are over are forgotten."""
ACTIVE_MAX: Final = 64
"""Most batches that runners look at, in turn by tenant; the others wait."""
_ACTIVE: Final = "or:batches:active"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed line of a batch."""

    line: int  # from 0
    fence: str
    num_attempts: int  # this one included


class Fenced(Exception):
    """Another process has the task of the batch, or the batch has moved on without this one."""


class LineJournal:
    """Batches and their lines in Redis."""

    def __init__(self, registry: Registry, lease_s: float = LEASE_S) -> None:
        self._registry = registry
        self._lease_ms = int(lease_s * 1000)
        self.lease_s = lease_s
        register = registry.register_script
        self._create, self._move = register(scripts.CREATE), register(scripts.MOVE)
        self._take_task, self._claim = register(scripts.TAKE_TASK), register(scripts.CLAIM)
        self._renew, self._commit = register(scripts.RENEW), register(scripts.COMMIT)
        self._release, self._close = register(scripts.RELEASE), register(scripts.CLOSE)
        self._retire, self._read = register(scripts.RETIRE), register(scripts.READ)
        self._first, self._page = register(scripts.FIRST), register(scripts.PAGE)
        self._read_list = register(scripts.READ_LIST)

    async def create(self, batch: Batch) -> None:
        """Adds a batch. Raises Overloaded if its tenant has too many that are not over."""
        fields = [part for pair in batch.to_fields().items() for part in pair]
        keys = [_key(batch.batch_id, "batch"), _list_of(batch.tenant), _open_of(batch.tenant), _ACTIVE]
        arguments: list[str | int] = [batch.batch_id, int(RECORD_S * 1000), OPEN_MAX, KEPT_MAX, *fields]
        if not int(await self._ask(self._create, keys, arguments)):
            raise Overloaded(
                f"there are {OPEN_MAX} batches of yours that are not over, the most that may be; create this one when "
                "one of them has ended, or cancel one",
                60.0,
            )

    async def get(self, batch_id: str) -> Batch | None:
        """Reads a batch, of whichever tenant; None if there is none, or its record is damaged."""
        found = await self._ask(self._read, [_key(batch_id, "batch")], [])
        stored = dict(zip(found[::2], found[1::2], strict=True))
        try:
            return Batch.from_fields(stored) if stored else None
        except ValueError:
            return None

    async def has_record(self, batch_id: str) -> bool:
        """Whether a batch has a record, readable or not."""
        return bool(await self._ask(self._read, [_key(batch_id, "batch")], []))

    async def next_line(self, batch_id: str) -> int:
        """The first line that nobody has claimed."""
        found = await self._ask(self._read, [_key(batch_id, "batch")], [])
        return int(dict(zip(found[::2], found[1::2], strict=True)).get("next", 0))

    async def page(self, caller: Caller, after: str, limit: int) -> Sequence[str] | None:
        """Ids of a tenant's batches, the newest first; None if there is no batch `after`."""
        found = await self._ask(self._page, [_list_of(caller.tenant)], [after, limit, 0])
        return None if found is None else list(found)

    async def now_s(self) -> float:
        """The time by which batches are created and end: Redis', as leases', not this host's."""
        return await self._registry.now_s()

    async def active(self) -> list[str]:
        """Ids of batches that are not over, in the order in which they may run."""
        return list(await self._ask(self._first, [_ACTIVE], [ACTIVE_MAX]))

    async def move(
        self, batch_id: str, state: BatchState, fields: Mapping[str, str | int] | None = None, *, fence: str = ""
    ) -> None:
        """Changes a batch's state, if it may follow the present one. A repeated change is no error.

        With a `fence` only the holder of the batch's task may. Raises Fenced if the state stays another.
        """
        before = sources_of(state)
        told: list[str | int] = [part for pair in (fields or {}).items() for part in pair]
        arguments: list[str | int] = [fence, state, len(before), *before, *told]
        found = await self._ask(self._move, [_key(batch_id, "batch")], arguments)
        if found != state:
            raise Fenced(f"batch {batch_id} does not become {state}: {found}")

    async def take_task(self, batch_id: str, fence: str, state: BatchState) -> bool:
        """Takes or renews the task that a batch needs in this state, for the time of a lease. False if another process
        has it, or the batch has moved on."""
        return bool(int(await self._ask(self._take_task, [_key(batch_id, "batch")], [fence, self._lease_ms, state])))

    async def claim(self, batch_id: str, fence: str, num: int) -> list[Claim]:
        """Claims up to `num` lines for the time of a lease. `fence` is new for each call."""
        keys = [_key(batch_id, name) for name in ("batch", "leases", "owners", "attempts")]
        found = await self._ask(self._claim, keys, [fence, self._lease_ms, num, int(RECORD_S * 1000)])
        return [Claim(int(line), fence, int(count)) for line, count in zip(found[::2], found[1::2], strict=True)]

    async def renew(self, batch_id: str, claims: Sequence[Claim]) -> set[int]:
        """Renews leases; returns the lines that have been lost."""
        keys = [_key(batch_id, name) for name in ("batch", "leases", "owners")]
        return set(map(int, await self._ask(self._renew, keys, [self._lease_ms, *_pairs(claims)])))

    async def release(self, batch_id: str, claims: Sequence[Claim]) -> None:
        """Gives lines back at once."""
        keys = [_key(batch_id, name) for name in ("leases", "owners", "attempts")]
        await self._ask(self._release, keys, _pairs(claims))

    async def commit(self, batch_id: str, part: str, claims: Sequence[Claim], total: LineCounts) -> set[int]:
        """Ends the lines of a stored part. If some of them have been lost, nothing changes and these are returned."""
        keys = [_key(batch_id, name) for name in ("batch", "leases", "owners", "attempts", "parts")]
        sums = asdict(total)
        added = [part for pair in sums.items() for part in pair]
        arguments = [part, int(RECORD_S * 1000), len(sums), *added, *_pairs(claims)]
        return set(map(int, await self._ask(self._commit, keys, arguments)))

    async def has_claimed_lines(self, batch_id: str) -> bool:
        """Whether lines have been claimed and not ended."""
        return bool(await self._ask(self._read, [_key(batch_id, "owners")], []))

    async def close(self, batch_id: str) -> set[int]:
        """Ends all leases of a batch in whose state no line begins; returns the claimed lines that have not ended."""
        keys = [_key(batch_id, name) for name in ("batch", "leases", "owners")]
        return set(map(int, await self._ask(self._close, keys, [])))

    async def parts(self, batch_id: str) -> list[str]:
        """Names of the stored parts."""
        return list(await self._ask(self._read_list, [_key(batch_id, "parts")], []))

    async def retire(self, batch_id: str, tenant: str | None) -> None:
        """Removes what a batch that is over does not need any more."""
        own = [_key(batch_id, name) for name in ("leases", "owners", "attempts", "parts")]
        await self._ask(self._retire, [_key(batch_id, "batch"), _ACTIVE, _open_of(tenant), *own], [batch_id])

    async def _ask(self, script: AsyncScript, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        return await self._registry.ask(script(keys=list(keys), args=list(arguments)))


def _pairs(claims: Sequence[Claim]) -> list[str | int]:
    return [part for claim in claims for part in (claim.line, claim.fence)]


def _key(batch_id: str, name: str) -> str:
    return f"{{or:batch:{batch_id}}}:{name}"


def _list_of(tenant: str | None) -> str:
    return f"or:batches:of:{digest_of_tenant(tenant)}"


def _open_of(tenant: str | None) -> str:
    return f"or:batches:open:{digest_of_tenant(tenant)}"


def digest_of_tenant(tenant: str | None) -> str:
    """The name of a tenant in keys of Redis; empty if API keys are not in use."""
    return tenant_digest(tenant) if tenant else ""
