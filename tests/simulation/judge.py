"""Checks between processes and clients: invariants I9 and I10, limits and shares.

The judge knows the true state of all processes, which none of them does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from coordinator.access.api_keys import Caller, Scope, TenantLimits
from coordinator.api.http.line_calls import LINES_PREFIX
from coordinator.placement.fair_queue import URGENT, Ticket
from coordinator.recovery.poison import LOSSES_MAX, LOSSES_PER_OTHER
from coordinator.settings import CoordinatorSettings
from outrider.hint_service.session_names import session_id_of
from outrider.registry.worker_record import WorkerRecord
from protos.outrider.v1 import generation_pb2, target_pb2
from target_worker.scheduling.session import Session
from tests.simulation.actors import Target
from tests.simulation.calls import Call
from tests.simulation.client import Client
from tests.simulation.coordinators import Coordinator, Look
from tests.simulation.features import Feature
from tests.simulation.process import NOBODY, current_process
from tests.simulation.redis_process import REDIS
from tests.simulation.scenario import Fault, FaultKind, Request, Scenario

if TYPE_CHECKING:
    from tests.simulation.world import World

_SETTINGS: Final = {
    "tokenizer_dir": "letters",
    "redis_url": "none",
    "uses_priors": False,
    "target_silence_max_s": 5.0,
    "draft_silence_max_s": 1.5,
    "quarantine_s": 1.0,
}
_CLIENT_STALL_MAX_S: Final = 3.0
_STALL_GRACE_S: Final = 3.0
_DISTURBED_S: Final = 15.0
"""Time for which a fault may have effects after it is over: silence and keepalives, one after the other."""
_FIRST_WORD_S: Final = 90.0
_LOST_WORKERS_MAX: Final = 3
_RESTART_S: Final = 1.0
_BRIEF_S: Final = 8.0  # a target may be away for longer, and may come back with other weights

_HELD_UP_MAX_S: Final = 0.05
_JOURNAL_SHARE_MAX: Final = 0.25
"""The largest share of a coordinator's bytes in the journal for one tenant."""
_JOURNAL_OWN_BYTES: Final = 120
"""Bytes of each stream that do not count: names, checksums, the writer and the weights' digest."""

Prompt = tuple[int, ...]


def settings_of(scenario: Scenario) -> CoordinatorSettings:
    """The settings of each coordinator in the scenario."""
    settings: dict[str, Any] = dict(_SETTINGS)
    settings["seed_requests"] = Feature.DRAWN_SEEDS in scenario.features
    if scenario.weights:
        settings["target_wait_max_s"] = _BRIEF_S
    settings["client_stall_max_s"] = _CLIENT_STALL_MAX_S
    if scenario.requests_max is not None:
        settings["requests_max"] = scenario.requests_max
    return CoordinatorSettings(**settings)


def callers_of(scenario: Scenario) -> dict[str, Caller]:
    """The callers that have API keys, by key; empty if the scenario has no keys."""
    if not scenario.features & {Feature.KEYS, Feature.FULL_JOURNAL}:
        return {}
    limits = TenantLimits(requests_per_minute=scenario.requests_per_minute, priority_min=-1)
    names = ("tenant 0", "tenant 1")
    return {name: Caller(name, frozenset({Scope.GENERATE}), limits) for name in names}


class Judge:
    """Is notified of what happens, and reports violations to the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.wrong = world.wrong
        self.network, self._loop, self._scenario = world.network, world.loop, world.scenario
        self.clients: dict[int, Client] = {}
        self.begun: set[Prompt] = set()  # of which some target has generated tokens
        self._attempts: Counter[Prompt] = Counter()
        self._seeds: defaultdict[Prompt, dict[int, None]] = defaultdict(dict)
        self._open: defaultdict[tuple[Coordinator, Prompt], list[Call]] = defaultdict(list)
        self._disturbed_until_s: dict[str, float] = {}
        self._poisons = {each.prompt: each for each in self._scenario.requests if each.poisons_after}
        self._num_faults = 0
        self._num_kills: Counter[tuple[Coordinator, int]] = Counter()  # that it knows of, by request
        self._num_kills_in_all = 0
        self._num_given: dict[str, int] = {}  # tokens that each session came with
        # Calls of sessions that may be the end of their targets, and who made them.
        self._poisonous: dict[str, tuple[Coordinator, Call]] = {}
        self._admitted: Counter[tuple[Coordinator, str]] = Counter()
        self._weights = self._all_weights()
        self.has_tenants = bool(callers_of(self._scenario))
        self._tenants: dict[str, str] = {}  # of sessions, by their ids

    # What clients ask.

    def find_coordinator(self) -> str | None:
        return self._world.find_coordinator()

    def could_be_in_time(self, num_tokens: int, left_s: float) -> bool:
        scenario = self._scenario
        shape = scenario.shape
        num_steps = -(-num_tokens // (1 + shape.limits.num_speculative_tokens))
        is_alone = len(scenario.requests) == 1 and not scenario.features
        return is_alone and num_steps * shape.step_s / 2 < left_s

    def seeds_of(self, request: Request) -> Sequence[int]:
        return tuple(self._seeds[request.prompt])

    def weights_of(self, request: Request) -> Sequence[int]:
        return self._weights

    def num_attempts(self, request: Request) -> int:
        return self._attempts[request.prompt]

    def _all_weights(self) -> tuple[int, ...]:
        scenario = self._scenario
        if not scenario.weights:
            return (0,)
        return (0, 1) if scenario.change_of_weights else tuple(sorted(set(scenario.weights)))

    # What processes do.

    def note(self, fault: Fault) -> None:
        """Records a fault: from now on the processes concerned may be blamed."""
        self._num_faults += 1
        is_stop = fault.kind is FaultKind.FREEZE and fault.process.startswith("c")
        if is_stop and Feature.LONG_STOP in self._scenario.features:
            return  # which is nobody's fault but its own
        for name in {fault.process, fault.other}:
            self._disturb(name, fault.duration_s)
        if fault.kind is FaultKind.DRAIN:
            self._disturb(fault.process, fault.duration_s + self._scenario.shape.drain_grace_s)

    def _disturb(self, name: str, duration_s: float) -> None:
        until_s = self._loop.time() + duration_s + _DISTURBED_S
        self._disturbed_until_s[name] = max(self._disturbed_until_s.get(name, 0.0), until_s)

    def _is_disturbed(self, name: str) -> bool:
        return self._disturbed_until_s.get(name, 0.0) > self._loop.time()

    def on_blame(self, coordinator: Coordinator, worker: WorkerRecord) -> None:
        names = (coordinator.name, worker.worker_id)
        if worker.pool == "target" and coordinator.is_alive and not any(map(self._is_disturbed, names)):
            self.wrong(f"I10: {names[0]} blames {names[1]}, which is well")

    def on_generate(self, coordinator: Coordinator, request: target_pb2.GenerateRequest, call: Call) -> None:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        self._attempts[prompt] += 1
        self._seeds[prompt][request.sampling.seed] = None
        calls = self._open[coordinator, prompt]
        calls[:] = [each for each in calls if not each.is_over]
        if request.priority == URGENT and prompt not in self.begun:
            self.wrong(f"I9: {coordinator.name} puts {prompt} before all others, which nobody has begun")
        calls.append(call)
        if prompt in self._poisons:
            self._num_given[request.session_id] = len(request.token_ids)
            self._poisonous[request.session_id] = coordinator, call

    def on_session(self, session_id: str, tenant: str) -> None:
        self._tenants[session_id] = tenant.removeprefix(LINES_PREFIX)  # whose lines have a share of their own

    def tenant_of(self, session_id: str) -> str:
        return self._tenants[session_id]

    def on_journal(self, writer: str, num_bytes: int, num_streams: int) -> None:
        """Checks the size of one tenant's streams in Redis that one coordinator process has written."""
        bytes_max = self._scenario.journal_bytes_max
        if bytes_max and num_bytes > _JOURNAL_SHARE_MAX * bytes_max + _JOURNAL_OWN_BYTES * num_streams:
            self.wrong(f"I10: one tenant's streams take {num_bytes} of {bytes_max} bytes of {writer}'s journal")

    def on_slot(self, coordinator: Coordinator, ticket: Ticket, look: Look) -> None:
        """Nobody gets more than a share of the slots while others wait that have less, as things stood when the
        coordinator looked."""
        if Feature.SHARES not in self._scenario.features or ticket.priority == URGENT:
            return
        if any(map(self._is_disturbed, (coordinator.name, REDIS))) or len(set(self._scenario.weights)) > 1:
            return  # where targets differ, one tenant's sequences may fit where others' do not
        tenant, held = ticket.tenant, look.num_held
        sharing = {each.tenant for each in look.waiting if each.priority == ticket.priority}
        share = (sum(held[each] for each in sharing) + 1) / len(sharing)
        owed = [each for each in sorted(sharing) if each != tenant and held[each] + 1 <= share]
        if held[tenant] > share and owed:
            self.wrong(f"{tenant} gets a slot beside {held[tenant]} others at {coordinator.name}, and {owed[0]} waits")

    def first_word_within_s(self, request: Request) -> float:
        """A coordinator that is there queues for 30 s and tries several targets; whoever has the better priority may
        take a target's slots and blocks as long as it has work."""
        before = (each for each in self._scenario.requests if each.rank < request.rank)
        return _FIRST_WORD_S + self._scenario.work_s(before)

    @property
    def waits_briefly(self) -> bool:
        """Whether a sequence may be given up while its target is on its way back."""
        return bool(self._scenario.weights)

    def on_tokens(self, request: Request) -> None:
        """Its client has some: a sequence may have ended in its first step, and no target knows of it any more."""
        self.begun.add(request.prompt)

    def on_admitted(self, coordinator: Coordinator, request: generation_pb2.GenerationRequest) -> None:
        limit = self._scenario.requests_per_minute
        if limit is None or request.resume_from:
            return
        key = coordinator, request.tenant
        self._admitted[key] += 1
        elapsed_s = self._loop.time() - coordinator.started_s
        if self._admitted[key] > limit + limit * elapsed_s / 60 + 1e-6:
            self.wrong(f"{request.tenant} has had {self._admitted[key]} requests, its limit is {limit:g} a minute")

    def on_no_room(self, coordinator: Coordinator, num_asked: int, num_max: int) -> None:
        """A request is refused for lack of room: those of clients alone must have taken it."""
        if num_asked <= num_max:
            self.wrong(f"I10: {coordinator.name} refuses a request that it has room for: {num_asked} of {num_max}")

    def on_held_up(self, work_s: float) -> None:
        """A process computes on its event loop: no request may occupy that for long."""
        process = current_process()
        if work_s > _HELD_UP_MAX_S and process is not None:
            self.wrong(f"I10: {process.name} holds its event loop up for {work_s:g} s")

    def on_blocked(self, call: Call) -> None:
        """A coordinator waits for its client to read: neither its deadline nor a slot may wait for that."""
        if not isinstance(call.server, Coordinator):
            return
        request = self.clients[int(call.client.name.removeprefix("client "))].request
        if not request.stalls_after:
            return
        left_s = min(_CLIENT_STALL_MAX_S, request.deadline_s) + _STALL_GRACE_S
        waited_for = call.waits_for_reader
        check = partial(self._check_blocked, call, call.server, request, waited_for)
        self._loop.call_later(left_s, check, context=NOBODY)

    def _check_blocked(self, call: Call, coordinator: Coordinator, request: Request, waited_for: object) -> None:
        is_well = coordinator.is_alive and not self._is_disturbed(coordinator.name)
        if not is_well or call.is_over or call.waits_for_reader is not waited_for:
            return
        if any(not each.is_over for each in self._open[coordinator, request.prompt]):
            self.wrong(f"I10: {coordinator.name} keeps a slot for request {request.number}, which nobody reads")

    def on_step(self, target: Target, session: Session) -> None:
        """After a step: a session may be the end of its target."""
        if not self._poisons:
            return
        request = self._poisons.get(tuple(session.token_ids[: session.num_prompt_tokens]))
        if request is None:
            return
        session_id = session_id_of(session.session_id)
        num_before = self._num_given.get(session_id, len(session.token_ids))
        if len(session.token_ids) - num_before >= request.poisons_after:
            self._kill(target, request, session_id)

    def _kill(self, target: Target, request: Request, session_id: str) -> None:
        if target.is_doomed:
            return
        target.is_doomed = True
        self._disturb(target.name[:2], _RESTART_S)
        if target.is_draining:
            return  # it was leaving anyway: nobody can tell
        self._num_kills_in_all += 1
        self._world.tell(f"request {request.number} is the end of {target.name}")
        known = self._poisonous.get(session_id)
        if known is not None:
            coordinator, call = known
            call.on_loss = partial(self._on_kill, coordinator, call, request)
        self._loop.call_later(0.01, self.network.end, target, context=NOBODY)
        self._loop.call_later(_RESTART_S, self._world.start, target.name[:2], context=NOBODY)

    def _on_kill(self, coordinator: Coordinator, call: Call, request: Request) -> None:
        """A coordinator reads that the sequence has lost its target. Of one whose client has left before that, or whose
        connection broke earlier, nobody learns what it was the end of."""
        call.on_loss = lambda: None
        self._num_kills[coordinator, request.number] += 1
        num_kills = self._num_kills[coordinator, request.number]
        # One that was stopped, or could not be reached, may hear of the next try before the end of the last one.
        until_s = self._disturbed_until_s.get(coordinator.name, 0.0) - _DISTURBED_S
        num_tries = self.clients[request.number].num_tries if until_s > coordinator.started_s else 1
        # That may have been lost, at most. What a request was the end of after its client left is nobody's.
        num_others = self._num_faults + self._num_kills_in_all - num_kills
        num_max = min(_LOST_WORKERS_MAX + LOSSES_PER_OTHER * num_others, LOSSES_MAX)
        if num_kills > num_max * num_tries:
            self.wrong(f"request {request.number} has brought down {num_kills} targets of {coordinator.name}")
