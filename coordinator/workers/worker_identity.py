"""Verifies that a worker is the one its record names: its certificate is checked before it gets a first request.

A worker's password for Redis allows it to write any record. Records are believed about load and address; the server at
the address shows a certificate, and one that names worker ids is valid for these only. So a compromised worker cannot
draw requests under many names.

The check is a TLS handshake of its own, for gRPC does not tell which certificate a server showed. It fixes the name
that channels to the worker then require, so that a server with another certificate later gets no calls.

Invariant: with certificates, a worker that has not been checked gets no request.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from outrider.addresses import split_address
from outrider.concurrency.background import end_tasks, keep_going
from outrider.registry.worker_record import Snapshot, WorkerRecord
from outrider.security.tls import Role, TlsFiles, names_of_certificate, worker_name, workers_named

LOOK_EVERY_S: Final = 0.25  # for new workers
AGAIN_AFTER_S: Final = 60.0  # for a worker that was in order
RETRY_S: Final = 1.0, 32.0  # for one that was not: from the first, doubled each time, to the second
HANDSHAKE_TIMEOUT_S: Final = 2.0
_AT_ONCE: Final = 64
"""Handshakes at once, for they take time of the event loop. Of more workers some are chosen at random: anybody who can
write records can write thousands, and must neither keep the replica busy nor delay the checks of others."""
_NOT_SEEN: Final = "its certificate has not been seen yet"

_Key = tuple[str, str, str, str]  # pool, worker id, incarnation, address
_Endpoint = tuple[str, str]  # pool, address


@dataclass(frozen=True, slots=True)
class _Finding:
    """Result of one check."""

    reason: str | None  # against using the worker
    again_at_s: float
    num_refusals: int = 0  # in a row


def judge(worker: WorkerRecord, names: frozenset[str], *, requires_ids: bool) -> str | None:
    """Checks a certificate's DNS names against a worker's record; returns the reason against the worker, or None."""
    role = Role[worker.pool.upper()]
    if role not in names:
        return f"its certificate names {', '.join(sorted(names)) or 'nobody'}, and not {role}"
    named = workers_named(names, role)
    if worker_name(role, worker.worker_id) in named:
        return None
    if named:
        return f"its certificate is of {', '.join(sorted(named))}, and of no worker {worker.worker_id}"
    if requires_ids:
        return "its certificate names no worker id, and --require-worker-ids asks for one"
    return None


class WorkerIdentities:
    """One replica's findings about all registered workers. Without certificates there is nothing to check."""

    def __init__(self, files: TlsFiles | None, now_s: Callable[[], float], *, requires_ids: bool = False) -> None:
        self._files = files
        self._now_s = now_s
        self._requires_ids = requires_ids
        self._findings: dict[_Key, _Finding] = {}
        self._owners: dict[_Endpoint, tuple[str, str]] = {}  # the worker's id, and the required name
        self._snapshot: Callable[[], Snapshot] = Snapshot
        self._task: asyncio.Task[None] | None = None

    def watch(self, snapshot: Callable[[], Snapshot]) -> Self:
        """Sets the source of workers to check once the context is open."""
        self._snapshot = snapshot
        return self

    async def __aenter__(self) -> Self:
        if self._files is not None:
            await self.look()
            self._task = asyncio.create_task(
                keep_going(self._keep, "looking at workers' certificates"), name="identities of workers"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    def reason_against(self, worker: WorkerRecord) -> str | None:
        """The reason not to use the worker; None if its identity is verified."""
        if self._files is None:
            return None
        finding = self._findings.get(_key(worker))
        return _NOT_SEEN if finding is None else finding.reason

    def name_at(self, address: str, role: Role) -> str:
        """The name required of a certificate shown at this address by a server of this role."""
        _, name = self._owners.get((role.name.lower(), address), ("", role.value))
        return name

    async def look(self) -> None:
        """Checks all workers that are due, and forgets those that are gone."""
        snapshot, now_s = self._snapshot(), self._now_s()
        workers = {_key(each): each for each in (*snapshot.targets, *snapshot.drafts)}
        self._findings = {key: found for key, found in self._findings.items() if key in workers}
        ids = {(pool, address, worker_id) for pool, worker_id, _, address in workers}
        self._owners = {endpoint: owner for endpoint, owner in self._owners.items() if (*endpoint, owner[0]) in ids}
        due = [
            worker
            for key, worker in workers.items()
            if key not in self._findings or self._findings[key].again_at_s <= now_s
        ]
        await asyncio.gather(*map(self._look_at, random.sample(due, min(len(due), _AT_ONCE))))

    async def _look_at(self, worker: WorkerRecord) -> None:
        self._take(worker, *await self._names_at(worker))

    def _take(self, worker: WorkerRecord, names: frozenset[str] | None, failure: str) -> None:
        key, role, now_s = _key(worker), Role[worker.pool.upper()], self._now_s()
        before = self._findings.get(key)
        if names is None:
            if before is None or before.reason is not None:
                self._refuse(key, f"its certificate cannot be seen: {failure}")
            else:  # calls will show whether it answers
                self._findings[key] = _Finding(None, now_s + AGAIN_AFTER_S)
            return
        reason = judge(worker, names, requires_ids=self._requires_ids)
        endpoint = worker.pool, worker.address
        owner, _ = self._owners.get(endpoint, (worker.worker_id, ""))
        if owner != worker.worker_id:
            reason = reason or f"its address is that of {owner}"
        elif reason is not None:
            self._owners.pop(endpoint, None)
        else:
            own = worker_name(role, worker.worker_id)
            self._owners[endpoint] = worker.worker_id, own if own in names else role.value
        if reason is None:
            self._findings[key] = _Finding(None, now_s + AGAIN_AFTER_S)
        else:
            self._refuse(key, reason)

    def _refuse(self, key: _Key, reason: str) -> None:
        before = self._findings.get(key)
        num_before = before.num_refusals if before is not None else 0
        first_s, most_s = RETRY_S
        again_at_s = self._now_s() + min(first_s * 2 ** min(num_before, 10), most_s)
        self._findings[key] = _Finding(reason, again_at_s, num_before + 1)

    async def _names_at(self, worker: WorkerRecord) -> tuple[frozenset[str] | None, str]:
        """DNS names of the certificate shown at the worker's address; None and the reason if none could be seen."""
        assert self._files is not None
        try:
            host, port = split_address(worker.address)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(
                    host,
                    port,
                    ssl=self._files.client_context(),
                    server_hostname=Role[worker.pool.upper()].value,
                )
        except ssl.SSLError as error:
            return None, getattr(error, "verify_message", "") or error.reason or "no TLS"
        except (OSError, TimeoutError, ValueError, OverflowError) as error:
            return None, str(error) or type(error).__name__
        try:
            return names_of_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True)), ""
        except ValueError as error:
            return None, str(error)
        finally:
            writer.transport.abort()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()


def _key(worker: WorkerRecord) -> _Key:
    return worker.pool, worker.worker_id, worker.incarnation, worker.address
