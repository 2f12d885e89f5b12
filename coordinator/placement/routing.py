"""Routing: which target worker serves a sequence, and which draft worker sends it hints.

Pure: each call takes a snapshot, the time and a source of chance. The router remembers only what the snapshot cannot
know yet: the sessions that this replica has open at a worker, and workers that just failed or refused it.

A target that probably has the KV of a prompt's beginning comes first, unless it is much busier than others: rendezvous
hashing with bounded loads (Thaler and Ravishankar 1998; Mirrokni et al., 1608.01350), so that replicas that know
nothing of each other agree. Otherwise the better of two random targets comes first (Mitzenmacher 2001), by predicted
wait, then by load. Draft workers are ranked by distance to the target and by spare capacity.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from outrider.canary.plan import ANY_DRAFT, DraftChoice
from outrider.registry.worker_record import MEMORY, Snapshot, WorkerRecord

WorkerKey = tuple[str, str, str]  # pool, worker id, incarnation: a restarted worker has no history


QUARANTINE_DOUBLINGS_MAX: Final = 4
FAILURES_KEPT_S: Final = 300.0
FULL_S: Final = 0.5
"""A worker that refused a sequence as full is not asked again for so long, even if there seems to be room."""
AHEAD_SHARE: Final = 1 / 8
"""Share of a target's slots by which more sequences may wait at it, so that it need not wait for the next one to be
sent. The others wait here, where any target's slot is theirs, ordered by priority and the tenants' shares."""
FREE_SHARE: Final = 1 / 8
"""Share of a worker's slots that background sequences leave free, so that not every request preempts one of them."""
PREFIX_BLOCK: Final = 16  # tokens, as in the targets' prefix caches
PREFIX_BLOCKS: Final = 2, 8
"""Fewest leading blocks of a prompt that make it worth finding their KV, and most that are compared: conversations and
documents differ early or not at all."""
LOAD_BOUND: Final = 1.25
"""A target takes prompts for their prefix up to this multiple of the mean load."""
BUSY: Final = 0.75
"""Load from which a draft worker is busy: an idle one further away sends hints sooner."""
FOLLOWED_MIN: Final = 32
"""Fewest tokens after those known that a draft worker must be able to follow, unless the whole sequence is shorter:
reading a prompt for fewer would cost it more than its hints are worth."""
NEAR_US: Final = 2_000, 10_000
"""Round trips between draft worker and target, microseconds: near up to the first, far beyond the second. A target's
step takes tens of milliseconds, and hints that are late for one are verified in the next."""


class ModelKey(NamedTuple):
    """Name and tokenizer of the model that a target must serve."""

    name: str
    tokenizer_fingerprint: str

    def fits(self, target: WorkerRecord) -> bool:
        return (target.model_name, target.tokenizer_fingerprint) == self


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A registered worker that was passed over, and the reason; shown at /health."""

    worker_id: str
    pool: str
    reason: str


def key_of(worker: WorkerRecord) -> WorkerKey:
    """Identity of one run of one worker."""
    return worker.pool, worker.worker_id, worker.incarnation


def prefix_key(token_ids: Sequence[int], salt: str = "") -> int | None:
    """Key of a prompt's leading blocks and salt, equal where these are equal; None if the prompt is too short to gain
    anything."""
    fewest, most = PREFIX_BLOCKS
    num_blocks = min(len(token_ids) // PREFIX_BLOCK, most)
    if num_blocks < fewest:
        return None
    # In powers of two: a prompt that grows, as conversations do, rarely changes its key.
    length = PREFIX_BLOCK << (num_blocks.bit_length() - 1)
    return _digest(salt.encode() + b"".join(token_id.to_bytes(4, "little") for token_id in token_ids[:length]))


def background_slots(worker: WorkerRecord) -> int:
    """Most sequences at a worker, of all kinds, beside which one begins in the background."""
    return max(worker.max_num_seqs - math.ceil(worker.max_num_seqs * FREE_SHARE), 1)


class Router:
    """Picks workers for one replica of the coordinator.

    A target must serve the model under the name asked for, with the request's tokenizer. A draft worker needs the
    target's tokenizer, and with a draft head a target that keeps features for it; its model's name is a limit only
    where the served model, or a canary, names its draft models.
    """

    def __init__(
        self,
        unserved: Callable[[WorkerRecord], str | None],
        chance: random.Random,
        quarantine_s: float,
        objection: Callable[[WorkerRecord], str | None] = lambda worker: None,
    ) -> None:
        """`unserved`: why no model that is served now can use a worker (`coordinator.models`); sequences that have
        begun keep to the model that they began with. `objection`: reason not to use a worker, whatever its record says
        (`coordinator.workers.worker_identity`)."""
        self._unserved = unserved
        self._objection = objection
        self._chance = chance
        self._quarantine_s = quarantine_s
        self._num_open: Counter[WorkerKey] = Counter()
        self._passed_over_until_s: dict[WorkerKey, float] = {}
        self._full_until_s: dict[WorkerKey, float] = {}
        self._num_failures: dict[WorkerKey, int] = {}  # of draft workers, in a row

    def usable(self, workers: Iterable[WorkerRecord], now_s: float) -> tuple[list[WorkerRecord], list[Exclusion]]:
        """Splits workers into those that new requests may use and those that they may not."""
        chosen, excluded = [], []
        for worker in workers:
            reason = self._unserved(worker) or self._reason_against(worker, now_s)
            if reason is None:
                chosen.append(worker)
            else:
                excluded.append(Exclusion(worker.worker_id, worker.pool, reason))
        return chosen, excluded

    def models(self, snapshot: Snapshot, now_s: float) -> dict[str, list[WorkerRecord]]:
        """Usable targets of the served models by name, in order of the names. If all of a model did not answer a moment
        ago, it has these."""
        found: dict[str, list[WorkerRecord]] = {}
        for worker in sorted(snapshot.targets, key=lambda worker: worker.model_name):
            if self._unserved(worker) is None and self._unfitness(worker) is None:
                found.setdefault(worker.model_name, []).append(worker)
        return {name: self._answering(workers, now_s) for name, workers in found.items()}

    def targets_of(self, snapshot: Snapshot, now_s: float, model: ModelKey) -> list[WorkerRecord]:
        """The targets of one model, as `models` has them, whether it is still served or not."""
        fit = [each for each in snapshot.targets if model.fits(each) and self._unfitness(each) is None]
        return self._answering(fit, now_s)

    def _answering(self, workers: list[WorkerRecord], now_s: float) -> list[WorkerRecord]:
        return [each for each in workers if not self._is_passed_over(each, now_s)] or workers

    def rank_targets(
        self,
        snapshot: Snapshot,
        now_s: float,
        *,
        model: ModelKey,
        num_tokens: int,
        excluded: Collection[WorkerKey],
        prefix: int | None = None,
        accepts: Callable[[WorkerRecord], bool] = lambda _: True,
    ) -> list[WorkerRecord]:
        """Targets of `model` for a context of `num_tokens`, prompt and output; the one to take first in front.

        `prefix` is the prompt's `prefix_key`; `accepts` decides whether a target can continue the tokens generated so
        far.
        """
        candidates = [
            worker
            for worker in snapshot.targets
            if _can_take(worker, model, num_tokens, excluded)
            and self._reason_against(worker, now_s) is None
            and accepts(worker)
        ]
        loads = {
            worker.worker_id: self._load(worker, snapshot.num_reserved.get(worker.incarnation, 0))
            for worker in candidates
        }
        ranked = self._better_of_two(candidates, lambda worker: (worker.wait_ms, loads[worker.worker_id]))
        home = None if prefix is None else _home(prefix, candidates, loads)
        return ranked if home is None else [home, *(worker for worker in ranked if worker is not home)]

    def expects_target(
        self,
        snapshot: Snapshot,
        *,
        model: ModelKey,
        num_tokens: int,
        excluded: Collection[WorkerKey],
        accepts: Callable[[WorkerRecord], bool] = lambda _: True,
    ) -> bool:
        """Whether `rank_targets` would name a target if none were passed over."""
        return any(
            _can_take(worker, model, num_tokens, excluded) and self._unfitness(worker) is None and accepts(worker)
            for worker in snapshot.targets
        )

    def rank_drafts(
        self,
        snapshot: Snapshot,
        now_s: float,
        *,
        num_known: int,
        num_tokens: int,
        excluded: Collection[WorkerKey],
        target: WorkerRecord | None = None,
        admits: Callable[[WorkerRecord], bool] = lambda _: True,
        choice: DraftChoice = ANY_DRAFT,
        is_background: bool = False,
    ) -> list[WorkerRecord]:
        """Draft workers of this choice with a free slot and room for more than the `num_known` tokens so far, the one
        to take first in front: those with a model before memory workers, those with spare capacity before busy ones,
        those that can follow all `num_tokens`, prompt and output, before those that drop out at their own limit, then
        those near `target`. `admits`: whether a draft worker may send hints for the sequence."""
        groups: dict[tuple[bool, bool, bool, int], list[WorkerRecord]] = {}
        loads: dict[str, float] = {}
        for worker in snapshot.drafts:
            if (
                self._reason_against(worker, now_s) is None
                and admits(worker)
                and (target is None or worker.can_read(target))
                and choice.admits(worker.model_name)
                and worker.max_model_len >= min(num_tokens, num_known + FOLLOWED_MIN)
                and self.has_room(worker, is_background=is_background)
                and key_of(worker) not in excluded
                and not self._is_on_trial(worker)
            ):
                load = self._load(worker, snapshot.num_reserved.get(worker.incarnation, 0))
                distance = 0 if target is None else _distance(worker, target)
                is_short = worker.max_model_len < num_tokens
                groups.setdefault((worker.engine == MEMORY, load >= BUSY, is_short, distance), []).append(worker)
                loads[worker.worker_id] = load
        return [
            worker
            for key in sorted(groups)
            for worker in self._better_of_two(groups[key], lambda each: loads[each.worker_id])
        ]

    def has_room(self, worker: WorkerRecord, *, is_background: bool = False) -> bool:
        """Whether the worker has a slot for one more, as far as this replica knows."""
        if is_background:
            return self._num_sessions(worker) < background_slots(worker)
        return self._load(worker) < 1

    def slot_limit(self, worker: WorkerRecord, *, is_urgent: bool = False, is_background: bool = False) -> int:
        """Most sequences at the worker at once. One that has begun may also wait there: it is first in its queue. One
        that runs in the background leaves slots free, and makes room for others."""
        if is_background:
            return background_slots(worker)
        num_ahead = worker.max_num_waiting
        if not is_urgent:
            num_ahead = min(num_ahead, math.ceil(worker.max_num_seqs * AHEAD_SHARE))
        return worker.max_num_seqs + num_ahead + worker.num_background

    def may_ask(
        self, worker: WorkerRecord, now_s: float, *, is_urgent: bool = False, is_background: bool = False
    ) -> bool:
        """Whether this replica's own sequences leave a slot there, and the worker has not just refused one."""
        key = key_of(worker)
        if self._full_until_s.get(key, now_s) > now_s:
            return False
        return self._num_open[key] < self.slot_limit(worker, is_urgent=is_urgent, is_background=is_background)

    def note_full(self, worker: WorkerRecord, now_s: float) -> None:
        """Records that the worker refused a sequence because it was full."""
        for key, until_s in list(self._full_until_s.items()):
            if until_s <= now_s:
                del self._full_until_s[key]
        self._full_until_s[key_of(worker)] = now_s + FULL_S

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
        """Avoids a worker that did not answer, for a while; its lease may take seconds to run out.

        A draft worker is avoided twice as long each time, until it has been of use (`has_served`): doing without it
        costs speed only, trying it costs a request its hints. Failures during that time count as the same one.
        """
        key = key_of(worker)
        if self._is_passed_over(worker, now_s):
            return
        self._forget_old(now_s)
        factor = 1
        if worker.pool == "draft":
            factor = 2 ** min(self._num_failures.get(key, 0), QUARANTINE_DOUBLINGS_MAX)
            self._num_failures[key] = self._num_failures.get(key, 0) + 1
        self._passed_over_until_s[key] = now_s + self._quarantine_s * factor

    def has_served(self, worker: WorkerRecord) -> None:
        """Clears a draft worker's failures: it was of use."""
        self._num_failures.pop(key_of(worker), None)

    def _forget_old(self, now_s: float) -> None:
        """Forgets workers without recent failures; memory is bounded by the failures within FAILURES_KEPT_S."""
        for key, until_s in list(self._passed_over_until_s.items()):
            if until_s + FAILURES_KEPT_S <= now_s:
                del self._passed_over_until_s[key]
                self._num_failures.pop(key, None)

    def _reason_against(self, worker: WorkerRecord, now_s: float) -> str | None:
        unfitness = self._unfitness(worker)
        if unfitness is None and self._is_passed_over(worker, now_s):
            return "did not answer a moment ago"
        return unfitness

    def _unfitness(self, worker: WorkerRecord) -> str | None:
        """Why a worker may not be picked, now or once it is no longer passed over."""
        return self._objection(worker) or (None if worker.state == "ready" else worker.state)

    def _is_passed_over(self, worker: WorkerRecord, now_s: float) -> bool:
        return self._passed_over_until_s.get(key_of(worker), now_s) > now_s

    def _is_on_trial(self, worker: WorkerRecord) -> bool:
        """Whether a draft worker has failed, has been of no use since, and one session is already trying it."""
        key = key_of(worker)
        return key in self._num_failures and self._num_open[key] > 0

    def _better_of_two(
        self, candidates: list[WorkerRecord], cost: Callable[[WorkerRecord], float | tuple[float, float]]
    ) -> list[WorkerRecord]:
        """Sorts candidates: the cheaper of two random ones first, then the others by cost.

        Not the best of all: replicas that share a snapshot would all choose the same worker.
        """
        shuffled = self._chance.sample(candidates, len(candidates))
        return sorted(shuffled[:2], key=cost) + sorted(shuffled[2:], key=cost)

    def _load(self, worker: WorkerRecord, num_reserved: int = 0) -> float:
        """Sessions per slot, without those that make room."""
        num_sessions = self._num_sessions(worker, num_reserved) - worker.num_background
        return max(num_sessions, 0) / worker.max_num_seqs

    def _num_sessions(self, worker: WorkerRecord, num_reserved: int = 0) -> int:
        """Sessions at the worker. Its own count is up to a heartbeat old, reservations up to a refresh."""
        num_known = max(worker.num_running + worker.num_waiting, num_reserved)
        return max(num_known, self._num_open[key_of(worker)])


def _can_take(worker: WorkerRecord, model: ModelKey, num_tokens: int, excluded: Collection[WorkerKey]) -> bool:
    return model.fits(worker) and worker.max_model_len >= num_tokens and key_of(worker) not in excluded


def _home(prefix: int, candidates: Sequence[WorkerRecord], loads: Mapping[str, float]) -> WorkerRecord | None:
    """The first target, in this prefix' own order of all targets, that is not much busier than the others."""
    if len(candidates) < 2:
        return None
    num_slots = sum(worker.max_num_seqs for worker in candidates)
    mean = sum(loads[worker.worker_id] * worker.max_num_seqs for worker in candidates) / num_slots
    fit = [
        worker
        for worker in candidates
        if worker.wait_ms == 0
        and loads[worker.worker_id] + 1 / worker.max_num_seqs <= min(1.0, LOAD_BOUND * mean + 1 / worker.max_num_seqs)
    ]
    return max(fit, key=lambda worker: _mixed(prefix ^ _digest_of_id(worker.worker_id)), default=None)


def _distance(draft: WorkerRecord, target: WorkerRecord) -> int:
    """Distance from 0, near, to 2, far: by measured round trip, else by zone."""
    round_trip_us = _round_trips(draft.round_trips).get(target.address)
    if round_trip_us is None:
        return int(bool(draft.zone) and bool(target.zone) and draft.zone != target.zone)
    return sum(round_trip_us > bound for bound in NEAR_US)


@functools.lru_cache(maxsize=4096)
def _round_trips(told: str) -> dict[str, int]:
    """Microseconds by target address; malformed entries are left out."""
    pairs = (each.rpartition("=") for each in told.split())
    return {address: int(number) for address, _, number in pairs if number.isascii() and number.isdigit()}


@functools.lru_cache(maxsize=4096)
def _digest_of_id(worker_id: str) -> int:
    return _digest(worker_id.encode())


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mixed(number: int) -> int:
    """SplitMix64's finalizer: spreads any number over all 64 bits."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)
