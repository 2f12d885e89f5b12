"""Which target decides and which draft worker rides ahead.

Pure: a snapshot, the clock's reading and a source of chance come in with each call. The router remembers only
what the snapshot cannot know yet: the sessions this replica has open at a worker, and workers that just
failed it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from outrider.worker_record import Snapshot, WorkerRecord

WorkerKey = tuple[str, str, str]  # pool, worker id, incarnation: a restarted worker starts with a clean sheet


QUARANTINE_DOUBLINGS_MAX: Final = 4
FAILURES_KEPT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A registered worker that was passed over, and why; operators read it at /health."""

    worker_id: str
    pool: str
    reason: str


def key_of(worker: WorkerRecord) -> WorkerKey:
    """What identifies one run of one worker."""
    return worker.pool, worker.worker_id, worker.incarnation


class Router:
    """Picks workers for one replica of the coordinator.

    A target must serve the model under the name asked for and mean the same tokens as the coordinator. A
    draft worker only has to mean the same tokens: its own model's name says nothing about what it can hint
    at.
    """

    def __init__(
        self,
        fingerprint: str,
        served_model_names: Collection[str],
        chance: random.Random,
        quarantine_s: float,
    ) -> None:
        """`served_model_names`: the only names served; empty serves whatever the targets are called."""
        self._fingerprint = fingerprint
        self._served = frozenset(served_model_names)
        self._chance = chance
        self._quarantine_s = quarantine_s
        self._num_open: Counter[WorkerKey] = Counter()
        self._passed_over_until_s: dict[WorkerKey, float] = {}
        self._num_failures: dict[WorkerKey, int] = {}  # of draft workers, in a row

    def usable(
        self, workers: Iterable[WorkerRecord], now_s: float
    ) -> tuple[list[WorkerRecord], list[Exclusion]]:
        """Splits workers into those that may be picked and those that may not."""
        chosen, excluded = [], []
        for worker in workers:
            reason = self._reason_against(worker, now_s)
            if reason is None:
                chosen.append(worker)
            else:
                excluded.append(Exclusion(worker.worker_id, worker.pool, reason))
        return chosen, excluded

    def models(self, snapshot: Snapshot, now_s: float) -> dict[str, list[WorkerRecord]]:
        """Usable targets by the model name they serve, in order of the names."""
        found: dict[str, list[WorkerRecord]] = {}
        for worker in sorted(self.usable(snapshot.targets, now_s)[0], key=lambda worker: worker.model_name):
            found.setdefault(worker.model_name, []).append(worker)
        return found

    def rank_targets(
        self,
        snapshot: Snapshot,
        now_s: float,
        *,
        model: str,
        num_tokens: int,
        excluded: Collection[WorkerKey],
    ) -> list[WorkerRecord]:
        """Targets of `model` for a context of `num_tokens`, prompt and output, the one to take first."""
        usable, _ = self.usable(snapshot.targets, now_s)
        return self._ranked(
            [
                worker
                for worker in usable
                if worker.model_name == model
                and worker.max_model_len >= num_tokens
                and key_of(worker) not in excluded
            ],
            snapshot,
        )

    def rank_drafts(
        self, snapshot: Snapshot, now_s: float, *, num_tokens: int, excluded: Collection[WorkerKey]
    ) -> list[WorkerRecord]:
        """Draft workers with a free slot that can hold `num_tokens`, the one to take first."""
        usable, _ = self.usable(snapshot.drafts, now_s)
        return self._ranked(
            [
                worker
                for worker in usable
                if worker.max_model_len >= num_tokens
                and self.has_room(worker)
                and key_of(worker) not in excluded
            ],
            snapshot,
        )

    def has_room(self, worker: WorkerRecord) -> bool:
        """Whether the worker has a place that is not taken, as far as is known here."""
        return self._load(worker) < 1

    def open_session(self, worker: WorkerRecord) -> None:
        """Counts a session at the worker, until `close_session`."""
        self._num_open[key_of(worker)] += 1

    def close_session(self, worker: WorkerRecord) -> None:
        """Reverses one `open_session`."""
        key = key_of(worker)
        assert self._num_open[key] > 0, "closed more sessions than were opened"
        self._num_open[key] -= 1
        if not self._num_open[key]:
            del self._num_open[key]

    def pass_over(self, worker: WorkerRecord, now_s: float) -> None:
        """Leaves a worker that did not answer alone for a while; its lease may take seconds to run out.

        A draft worker is left alone for twice as long each time, until it has been of use (`has_served`): doing without
        costs speed only, and trying it costs a request its hints. Failures that meet it meanwhile are the same one.
        """
        key = key_of(worker)
        if self._passed_over_until_s.get(key, now_s) > now_s:
            return
        self._forget_old(now_s)
        factor = 1
        if worker.pool == "draft":
            factor = 2 ** min(self._num_failures.get(key, 0), QUARANTINE_DOUBLINGS_MAX)
            self._num_failures[key] = self._num_failures.get(key, 0) + 1
        self._passed_over_until_s[key] = now_s + self._quarantine_s * factor

    def has_served(self, worker: WorkerRecord) -> None:
        """It did what it is there for."""
        self._num_failures.pop(key_of(worker), None)

    def _forget_old(self, now_s: float) -> None:
        """Of workers that have not failed for long; the memory is bounded by failures within that time."""
        for key, until_s in list(self._passed_over_until_s.items()):
            if until_s + FAILURES_KEPT_S <= now_s:
                del self._passed_over_until_s[key]
                self._num_failures.pop(key, None)

    def _reason_against(self, worker: WorkerRecord, now_s: float) -> str | None:
        if worker.tokenizer_fingerprint != self._fingerprint:
            return f"tokenizer fingerprint {worker.tokenizer_fingerprint}, ours is {self._fingerprint}"
        if worker.pool == "target" and self._served and worker.model_name not in self._served:
            return f"serves {worker.model_name!r}, this coordinator serves {', '.join(sorted(self._served))}"
        if worker.state != "ready":
            return worker.state
        if self._passed_over_until_s.get(key_of(worker), now_s) > now_s:
            return "did not answer a moment ago"
        return None

    def _ranked(self, candidates: list[WorkerRecord], snapshot: Snapshot) -> list[WorkerRecord]:
        """The less loaded of two first, then the others by their load.

        Two at random, not the best of all: replicas that share a snapshot would all run to the same worker.
        """
        shuffled = self._chance.sample(candidates, len(candidates))

        def load(worker: WorkerRecord) -> float:
            return self._load(worker, snapshot.num_reserved.get(worker.incarnation, 0))

        return sorted(shuffled[:2], key=load) + sorted(shuffled[2:], key=load)

    def _load(self, worker: WorkerRecord, num_reserved: int = 0) -> float:
        """Sessions per place. The worker's own count is up to a heartbeat old, reservations up to a refresh."""
        num_known = max(worker.num_running + worker.num_waiting, num_reserved)
        return max(num_known, self._num_open[key_of(worker)]) / worker.max_num_seqs
