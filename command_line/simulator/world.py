"""A whole fleet under load in virtual time, and its outcome.

The measurement is a stretch of time after a warm-up: tokens that arrive in it, requests that end in it, and the share
of it in which workers compute. (If a fleet keeps up, the requests that end in a stretch resemble those that begin in
it.)
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from command_line.load.summary import Percentiles, percentiles_ms
from command_line.simulator.clock import Clock, Link, Processor
from command_line.simulator.coordinator import REFRESH_S, Coordinator
from command_line.simulator.fleet import MS_PER_S, Fleet
from command_line.simulator.streams import Reservations, Stream, record
from command_line.simulator.traffic import Text, draw
from command_line.simulator.workers import DraftWorker, TargetWorker
from draft_worker.messages import Action as DraftAction
from target_worker.messages import Action

_US_PER_S: Final = 1e6
RETRY_S: Final = 1.0
"""Delay after which a refused client of a closed loop tries again."""
_NUM_PARTS: Final = 200  # of a run, between two reports of progress
OnProgress = Callable[[float], None]
"""Callback for progress: the share of a run that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predicted figures. Times are at the coordinator; shares are from 0 to 1; None: nothing to measure."""

    num_targets: int
    num_drafts: int
    tokens_per_s: float  # output
    requests_per_s: float  # that ended
    num_ended: int
    num_refused: int
    num_under_way: tuple[int, int]  # at the start and at the end of the measurement
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2el_ms: Percentiles | None
    queue_ms: Percentiles | None  # wait for a slot as targets report it: from the end of the step in which it came
    mean_e2el_ms: float | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None  # over all steps, plain ones too
    target_utilisation: float
    draft_utilisation: float | None
    coordinator_steps_per_s: float  # of all streams and replicas
    coordinator_utilisation: float | None  # of the busiest replica; None where steps take it no time
    mean_batch: float | None  # sessions in a target step
    mean_step_ms: float | None  # of the targets
    num_events: int
    wall_s: float  # wall time of the simulation


@dataclass(slots=True)
class _Tally:
    """Sums over the measured requests."""

    num_refused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float | None] = field(default_factory=list)
    e2el_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, stream: Stream) -> None:
        if stream.is_refused:
            self.num_refused += 1
            return
        times, counts = stream.output.times, stream.output.counts
        assert times.first_token_s is not None
        assert times.end_s is not None
        num_gaps = len(stream.output.token_ids) - 1
        self.ttft_s.append(times.first_token_s - stream.arrived_s)
        self.e2el_s.append(times.end_s - stream.arrived_s)
        self.tpot_s.append(times.decode_ms / MS_PER_S / num_gaps if num_gaps else None)
        self.queue_s.append((times.queue_ms or 0.0) / MS_PER_S)
        self.num_steps += counts.num_steps
        self.num_drafted += counts.num_draft_tokens
        self.num_accepted += counts.num_accepted_draft_tokens


class World:
    """One fleet: create it, `run` it once, drop it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.clock = fleet, Clock()
        self.num_asked = self.num_ended = self.num_refused = 0
        self._chance = random.Random(f"{fleet.seed}/world")
        self._texts: dict[str, Text] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._tally = _Tally()
        self._is_over = False
        traffic, network = fleet.traffic, fleet.network
        self._since_s, self._until_s = traffic.warmup_s, traffic.warmup_s + traffic.seconds
        # A future outlives its session until every process has heard of the end.
        self._grace_s = 10.0 + 20.0 * (network.worker_ms + network.coordinator_ms) / MS_PER_S
        self.targets = {f"target:{number}": self._target(number) for number in range(fleet.target.count)}
        self.drafts = {f"draft:{number}": self._draft(number) for number in range(fleet.draft.count)}
        for target in self.targets.values():
            target.drafts = list(self.drafts.values())
        limits, longest = fleet.target, fleet.target.max_model_len
        self._reservations = Reservations(
            tuple(
                record("target", number, limits.max_num_seqs, limits.max_num_waiting, longest)
                for number in range(len(self.targets))
            ),
            tuple(record("draft", number, fleet.draft.max_num_seqs, 0, longest) for number in range(len(self.drafts))),
        )
        self._replicas = [self._replica(number) for number in range(network.coordinators)]
        self._processors = [
            Processor(self.clock, network.step_us / _US_PER_S, self._since_s, self._until_s) for _ in self._replicas
        ]

    def _target(self, number: int) -> TargetWorker:
        address = f"target:{number}"
        return TargetWorker(
            self.clock,
            self._since_s,
            self._until_s,
            address=address,
            fleet=self.fleet,
            texts=self._texts,
            publish=partial(self._publish, address),
            link_to_draft=lambda draft: self._link(address, f"draft:{draft}"),
        )

    def _draft(self, number: int) -> DraftWorker:
        address = f"draft:{number}"
        return DraftWorker(
            self.clock,
            self._since_s,
            self._until_s,
            number=number,
            fleet=self.fleet,
            texts=self._texts,
            report=partial(self._report, address),
            link_to_target=lambda target: self._link(address, target),
            target_at=self.targets,
        )

    def _replica(self, number: int) -> Coordinator:
        return Coordinator(
            self.clock,
            random.Random(f"{self.fleet.seed}/replica/{number}"),
            self._reservations,
            self.targets,
            self.drafts,
            lambda worker: self._link(f"replica:{number}", worker),
            self._end,
            self.fleet.network.max_queue_wait_s,
        )

    def _link(self, sender: str, receiver: str) -> Link:
        link = self._links.get((sender, receiver))
        if link is None:
            network = self.fleet.network
            is_near = sender.startswith("replica") or receiver.startswith("replica")
            delay_ms = network.coordinator_ms if is_near else network.worker_ms
            link = self._links[sender, receiver] = Link(self.clock, self._chance, delay_ms, network.jitter)
        return link

    # Messages to the coordinator's replicas, each of which gets those of its own sessions.

    def _publish(self, sender: str, actions: list[Action]) -> None:
        by_replica: dict[int, list[Action]] = {}
        for action in actions:
            by_replica.setdefault(self._replica_of(action.session_id), []).append(action)
        for replica, own in by_replica.items():
            take = partial(self._processors[replica].take, self._replicas[replica].on_target_actions)
            self._link(sender, f"replica:{replica}").send(take, own)

    def _report(self, sender: str, action: DraftAction) -> None:
        replica = self._replica_of(action.session_id)
        self._link(sender, f"replica:{replica}").send(self._replicas[replica].on_draft_action, action)

    def _replica_of(self, session_id: str) -> int:
        return int(session_id) % len(self._replicas)

    # Load.

    def _ask(self) -> None:
        if self._is_over:
            return
        request = draw(self.fleet, self.num_asked)
        self.num_asked += 1
        self._texts[str(request.number)] = request.text
        self._replicas[request.number % len(self._replicas)].take(Stream(request, self.clock.now_s))

    def _ask_and_go_on(self, rate: float) -> None:
        self._ask()
        if not self._is_over:
            self.clock.at(self.clock.now_s + self._chance.expovariate(rate), self._ask_and_go_on, rate)

    def _end(self, stream: Stream) -> None:
        now_s, number = self.clock.now_s, str(stream.request.number)
        assert stream.is_refused or stream.output.token_ids == stream.request.text.token_ids, "another text"
        self.num_refused += stream.is_refused
        self.num_ended += not stream.is_refused
        if self._since_s < now_s <= self._until_s:
            self._tally.add(stream)
        self.clock.at(now_s + self._grace_s, self._forget, number)
        if self.fleet.traffic.rate is None:
            self.clock.at(now_s + RETRY_S * stream.is_refused, self._ask)

    def _forget(self, number: str) -> None:
        del self._texts[number]

    def _begin_load(self) -> None:
        traffic = self.fleet.traffic
        if traffic.rate is not None:
            self.clock.at(self._chance.expovariate(traffic.rate), self._ask_and_go_on, traffic.rate)
            return
        # Spread, so that the prompts do not come all at once.
        num_streams = self.fleet.concurrency
        for number in range(num_streams):
            self.clock.at(number / num_streams * traffic.warmup_s / 2.0, self._ask)

    def _refresh(self) -> None:
        self._reservations.refresh()
        if not self._is_over:
            self.clock.at(self.clock.now_s + REFRESH_S, self._refresh)

    # The run.

    @property
    def num_under_way(self) -> int:
        return self.num_asked - self.num_ended - self.num_refused

    def run(self, on_progress: OnProgress = lambda share: None, *, drains: bool = False) -> Outcome:
        """Runs the simulation. `drains`: continue without new requests until the last one has ended."""
        started = time.perf_counter()
        with _no_collections():
            self._refresh()
            self._begin_load()
            self._advance(self._since_s, on_progress)
            num_before, num_tokens_before = self.num_under_way, self._num_tokens
            self._advance(self._until_s, on_progress)
            num_under_way = num_before, self.num_under_way
            num_tokens = self._num_tokens - num_tokens_before
            self._is_over = True
            if drains:
                self.clock.run(float("inf"))
        return self._outcome(num_tokens, num_under_way, time.perf_counter() - started)

    def _advance(self, until_s: float, on_progress: OnProgress) -> None:
        part_s = self._until_s / _NUM_PARTS
        while self.clock.now_s < until_s:
            stop_s = min(self.clock.now_s + part_s, until_s)
            self.clock.run(stop_s)
            on_progress(stop_s / self._until_s)

    @property
    def _num_tokens(self) -> int:
        return sum(replica.num_tokens for replica in self._replicas)

    def _outcome(self, num_tokens: int, num_under_way: tuple[int, int], wall_s: float) -> Outcome:
        fleet, tally, seconds = self.fleet, self._tally, self.fleet.traffic.seconds
        targets, drafts = self.targets.values(), self.drafts.values()
        num_steps = sum(target.num_steps for target in targets)
        busy_s = sum(target.busy_s for target in targets)
        return Outcome(
            num_targets=fleet.target.count,
            num_drafts=fleet.draft.count,
            tokens_per_s=num_tokens / seconds,
            requests_per_s=len(tally.e2el_s) / seconds,
            num_ended=len(tally.e2el_s),
            num_refused=tally.num_refused,
            num_under_way=num_under_way,
            ttft_ms=percentiles_ms(tally.ttft_s),
            tpot_ms=percentiles_ms(tally.tpot_s),
            e2el_ms=percentiles_ms(tally.e2el_s),
            queue_ms=percentiles_ms(tally.queue_s),
            mean_e2el_ms=MS_PER_S * sum(tally.e2el_s) / len(tally.e2el_s) if tally.e2el_s else None,
            draft_acceptance_rate=tally.num_accepted / tally.num_drafted if tally.num_drafted else None,
            mean_acceptance_length=1.0 + tally.num_accepted / tally.num_steps if tally.num_steps else None,
            target_utilisation=busy_s / seconds / len(targets),
            draft_utilisation=sum(draft.busy_s for draft in drafts) / seconds / len(drafts) if drafts else None,
            coordinator_steps_per_s=sum(processor.num_items for processor in self._processors) / seconds,
            coordinator_utilisation=(
                max(processor.busy_s for processor in self._processors) / seconds if fleet.network.step_us else None
            ),
            mean_batch=sum(target.num_items for target in targets) / num_steps if num_steps else None,
            mean_step_ms=busy_s * MS_PER_S / num_steps if num_steps else None,
            num_events=self.clock.num_events,
            wall_s=wall_s,
        )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turns garbage collection off. Nothing here is cyclic, and the search takes 10 % of a run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
