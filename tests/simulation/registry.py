"""A model of the registry's scripts in plain Python, which the simulated Redis runs.

`test_registry_model` compares it with the scripts on a real Redis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.registry.registry import (
    LEASE_S,
    LOSSES_MAX,
    LOSSES_S,
    RESERVATION_S,
    JournalUpdate,
    JournalWrite,
    JournalWriter,
    PoolView,
)
from outrider.registry.worker_record import WorkerRecord


def write_journal(
    stored: dict[str, dict[str, str]], request_id: str, update: JournalUpdate, now_s: float
) -> JournalWrite:
    """As the script of `Registry.write_journal`, but for the time that an entry lasts."""
    there, writer = stored.get(request_id), update.writer
    if update.age_s is not None:
        now_ms = int(now_s * 1000)
        begun_ms = now_ms - int(update.age_s * 1000)
        before = writer_of(there)
        if before and before.replica == writer.replica:
            if before.number > writer.number:
                return JournalWrite.SUPERSEDED
        elif there and min(int(there["begun_ms"]), now_ms) > begun_ms:
            return JournalWrite.SUPERSEDED
        written_by = {"replica": writer.replica, "number": str(writer.number)}
        stored[request_id] = {**written_by, "begun_ms": str(begun_ms)}
    elif there is None:
        return JournalWrite.GONE
    elif writer_of(there) != writer:
        return JournalWrite.SUPERSEDED
    stored[request_id] |= update.fields
    return JournalWrite.WRITTEN


def exchange_losses(
    stored: dict[str, float], once: Sequence[str], anew: Sequence[str], now_s: float
) -> dict[str, float]:
    """As `Registry.exchange_losses`; `stored` has the moment of each fact."""
    for fact in [fact for fact, at_s in stored.items() if abs(now_s - at_s) > LOSSES_S]:
        del stored[fact]
    for facts, num_max in ((once, LOSSES_MAX), (anew, 2 * LOSSES_MAX)):
        for fact in facts:
            if (facts is anew) if fact in stored else len(stored) < num_max:
                stored[fact] = now_s
    return {fact: max(now_s - at_s, 0.0) for fact, at_s in stored.items()}


def writer_of(stored: Mapping[str, str] | None) -> JournalWriter | None:
    """None where nothing is stored."""
    return JournalWriter(stored["replica"], int(stored["number"])) if stored else None


@dataclass
class PoolModel:
    """One pool. Times are Redis' own clock's, seconds."""

    lease_s: float = LEASE_S
    reservation_s: float = RESERVATION_S
    records: dict[str, WorkerRecord] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)  # by worker: when it ends
    events: list[tuple[str, str, str]] = field(default_factory=list)  # kind, worker id, incarnation
    reservations: dict[str, dict[str, float]] = field(default_factory=dict)  # by incarnation, by token: when it ends
    joined_at_us: dict[str, int] = field(default_factory=dict)  # by worker: of the run that its record is of
    last_joined_at_us: int = 0

    def join(self, now_s: float) -> int:
        self.last_joined_at_us = max(round(now_s * 1e6), self.last_joined_at_us + 1)
        return self.last_joined_at_us

    def write(self, record: WorkerRecord, joined_at_us: int, now_s: float) -> bool:
        holder = self._live(record.worker_id, now_s)
        if self.is_later(holder, self.joined_at_us.get(record.worker_id, 0), record, joined_at_us):
            return False
        self.records[record.worker_id] = record
        self.joined_at_us[record.worker_id] = joined_at_us
        self.leases[record.worker_id] = now_s + self.lease_s
        self.last_joined_at_us = max(self.last_joined_at_us, joined_at_us)
        if holder is None or holder.incarnation != record.incarnation:
            self.events.append(("joined", record.worker_id, record.incarnation))
        elif holder.state != record.state:
            self.events.append((record.state, record.worker_id, record.incarnation))
        return True

    def remove(self, record: WorkerRecord, now_s: float) -> bool:
        self.reservations.pop(record.incarnation, None)
        holder = self._live(record.worker_id, now_s)
        if holder is None or holder.incarnation != record.incarnation:
            return False
        del self.records[record.worker_id], self.leases[record.worker_id]
        self.events.append(("left", record.worker_id, record.incarnation))
        return True

    def read(self, now_s: float) -> PoolView:
        for worker_id in sorted(self.leases, key=lambda each: (self.leases[each], each)):
            if self.leases[worker_id] <= now_s:
                del self.leases[worker_id], self.records[worker_id]
                self.events.append(("expired", worker_id, ""))
        workers = tuple(self.records[worker_id] for worker_id in sorted(self.records))
        num_reserved = tuple(self.num_reserved(worker.incarnation, now_s) for worker in workers)
        last_kind = self.events[-1][0] if self.events else ""
        return PoolView(workers, num_reserved, str(len(self.events)), last_kind, round(now_s * 1e3))

    def num_reserved(self, incarnation: str, now_s: float) -> int:
        return sum(until_s > now_s for until_s in self.reservations.get(incarnation, {}).values())

    def reserve(self, incarnations: Sequence[str], limits: Sequence[int], token: str, now_s: float) -> int | None:
        for index, (incarnation, limit) in enumerate(zip(incarnations, limits, strict=True)):
            held = self.reservations.get(incarnation, {})
            held = {each: until_s for each, until_s in held.items() if until_s > now_s}
            self.reservations[incarnation] = held
            if token in held or len(held) < limit:
                held[token] = now_s + self.reservation_s
                return index
        return None

    def renew(self, incarnation: str, tokens: Sequence[str], now_s: float) -> None:
        held = self.reservations.setdefault(incarnation, {})
        held.update(dict.fromkeys(tokens, now_s + self.reservation_s))

    def release(self, incarnation: str, token: str) -> None:
        self.reservations.get(incarnation, {}).pop(token, None)

    @staticmethod
    def is_later(holder: WorkerRecord | None, holders_us: int, record: WorkerRecord, joined_at_us: int) -> bool:
        """Whether the holder, which joined at `holders_us`, stands against writing the record."""
        return holder is not None and holder.incarnation != record.incarnation and holders_us >= joined_at_us

    def _live(self, worker_id: str, now_s: float) -> WorkerRecord | None:
        """The hash expires by itself, the lease goes with the next reading."""
        return self.records[worker_id] if self.leases.get(worker_id, 0.0) > now_s else None
