"""Changes that each feature makes to a run that was drawn without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from outrider.sampling_params import SpeculationSettings
from tests.simulation import features
from tests.simulation.features import Feature, draw_features
from tests.simulation.models import NO_LETTER_TWICE, SLOW_TO_COMPILE
from tests.simulation.redis_process import REDIS
from tests.simulation.scenario import SPAN_S, Fault, FaultKind, Request, Scenario, draw_ordinary, draw_request

_ROOM: Final = 8
"""Sequences that a replica serves at once where lines of a batch have as many."""


def draw(seed: int, enabled: frozenset[Feature] | None = None) -> Scenario:
    """The scenario of a seed. enabled: features that it may have; those of `features.ENABLED` unless given."""
    scenario = draw_ordinary(seed)
    drawn = draw_features(seed, features.ENABLED if enabled is None else enabled)
    chance = random.Random(f"{seed}/dress")
    return dress(replace(scenario, features=drawn), chance)


def dress(scenario: Scenario, chance: random.Random) -> Scenario:
    """The scenario with the additions of its features, one after the other."""
    for feature, add in _ADDITIONS.items():
        if feature in scenario.features:
            scenario = add(scenario, chance)
    return scenario


def _change(
    scenario: Scenario,
    chance: random.Random,
    change: Callable[[Request], Request],
    share: float,
    is_fit: Callable[[Request], bool] = lambda request: True,
) -> Scenario:
    """The scenario with a share of its fit requests changed, at least one of them if there is one."""
    fit = [request.number for request in scenario.requests if is_fit(request)]
    chosen = {number for number in fit if chance.random() < share} or set(fit[:1])
    changed = (change(each) if each.number in chosen else each for each in scenario.requests)
    return replace(scenario, requests=tuple(changed))


def _with_faults(scenario: Scenario, faults: Iterable[Fault]) -> Scenario:
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.process))))


def _is_plain(request: Request) -> bool:
    """Whether nothing is peculiar about it yet."""
    return not (
        request.is_seed_drawn
        or request.request_id
        or request.is_liar
        or request.poisons_after
        or request.stalls_after
        or request.leaves_after_s is not None
    )


def _own_prompt(number: int) -> tuple[int, ...]:
    """One that no other request has."""
    return 3, 3, number // 16 % 4, number // 4 % 4, number % 4


def _add_rush(scenario: Scenario, chance: random.Random) -> Scenario:
    first = scenario.requests[-1].number + 1
    at_s = chance.uniform(0.0, 2.0)
    more = []
    for number in range(first, first + chance.randint(6, 12)):
        request = draw_request(chance, number, is_crowded=True)
        is_heavy = number > first + 2  # one tenant comes first and with most
        at = at_s + (0.0 if is_heavy else 0.3) + chance.uniform(0.0, 0.1)
        more.append(
            replace(
                request,
                at_s=at,
                tenant=int(not is_heavy),
                priority=0,
                prompt=_own_prompt(number),
                deadline_s=300.0,
                leaves_after_s=None,
            )
        )
    return replace(scenario, requests=(*scenario.requests, *more))


def _add_keys(scenario: Scenario, chance: random.Random) -> Scenario:
    limit = chance.choice((None, 30.0) if len(scenario.requests) > 5 else (None, 2.0))
    return replace(scenario, requests_per_minute=limit)


def _add_one_way(scenario: Scenario, chance: random.Random) -> Scenario:
    faults = []
    for fault in scenario.faults:
        if fault.kind is FaultKind.CUT:
            one, other = chance.sample((fault.process, fault.other), 2)
            fault = replace(fault, kind=FaultKind.CUT_ONE_WAY, process=one, other=other)
        faults.append(fault)
    everybody = [f"{letter}{i}" for letter, count in _counts(scenario) for i in range(count)]
    one, other = chance.sample((*everybody, REDIS), 2)
    at_s, duration_s = chance.uniform(0.0, SPAN_S), chance.choice((0.3, 2.0, 7.0))
    return _with_faults(scenario, (*faults, Fault(at_s, FaultKind.CUT_ONE_WAY, one, duration_s, other)))


def _counts(scenario: Scenario) -> tuple[tuple[str, int], ...]:
    return ("t", scenario.num_targets), ("d", scenario.num_drafts), ("c", scenario.num_coordinators)


def _add_choices(scenario: Scenario, chance: random.Random) -> Scenario:
    num = chance.choice((2, 2, 3))
    return _change(scenario, chance, lambda each: replace(each, num_choices=num), 0.4)


def _add_logprobs(scenario: Scenario, chance: random.Random) -> Scenario:
    return _change(scenario, chance, lambda each: replace(each, has_logprobs=True), 0.4)


def _add_grammar(scenario: Scenario, chance: random.Random) -> Scenario:
    return _change(scenario, chance, lambda each: replace(each, grammar=NO_LETTER_TWICE.text), 0.4)


def _add_slow_grammar(scenario: Scenario, chance: random.Random) -> Scenario:
    changed = lambda each: replace(each, grammar=SLOW_TO_COMPILE.text, deadline_s=300.0)  # noqa: E731
    return _change(scenario, chance, changed, 0.0)


def _add_journal_loss(scenario: Scenario, chance: random.Random) -> Scenario:
    faults = [Fault(chance.uniform(0.0, SPAN_S), FaultKind.EMPTY, REDIS, 0.0)]
    faults += [_draw_death(scenario, chance) for _ in range(chance.randint(0, 2))]
    small = replace(scenario, journal_bytes_max=chance.choice((None, 0, 60)))
    return _with_faults(small, (*scenario.faults, *faults))


def _draw_death(scenario: Scenario, chance: random.Random) -> Fault:
    """A fault that kills a coordinator, so that its clients have to reconnect."""
    name = f"c{chance.randrange(scenario.num_coordinators)}"
    return Fault(chance.uniform(0.0, SPAN_S), FaultKind.KILL, name, chance.choice((0.3, 2.0)))


def _end_coordinators_during(scenario: Scenario, chance: random.Random, request: Request) -> Scenario:
    """Kills all coordinators soon after a long request has arrived; in half of all cases Redis has lost its data."""
    at_s = request.at_s + chance.choice((0.1, 0.4, 1.0, 2.0))
    faults = [
        Fault(at_s + chance.uniform(0.0, 0.1), FaultKind.KILL, f"c{i}", 0.3) for i in range(scenario.num_coordinators)
    ]
    if chance.random() < 0.5:
        faults.append(Fault(at_s - 0.05, FaultKind.EMPTY, REDIS, 0.0))
    return _with_faults(scenario, (*scenario.faults, *faults))


def _add_drawn_seeds(scenario: Scenario, chance: random.Random) -> Scenario:
    def sampled(each: Request) -> Request:
        return replace(each, is_seed_drawn=True, seed=0)

    changed = _change(scenario, chance, sampled, 0.6, _is_plain)
    drawn = [each for each in changed.requests if each.is_seed_drawn]
    return _end_coordinators_during(changed, chance, chance.choice(drawn)) if drawn else changed


def _add_reused_id(scenario: Scenario, chance: random.Random) -> Scenario:
    """Another request under an id that a first one has: at once, soon, or when that has ended. Each of them goes on
    under its own steam, so both may be lost and come back."""
    fit = [each for each in scenario.requests if _is_plain(each)]
    if not fit:
        return scenario
    first = chance.choice(fit)
    number = scenario.requests[-1].number + 1
    at_s = first.at_s + chance.choice((0.0, 0.1, 0.5, 2.0, 5.0))
    tenant = first.number % 2 if first.tenant < 0 or chance.random() < 0.7 else 1 - first.number % 2
    first_again = replace(first, request_id=first.name, tenant=first.number % 2, priority=first.rank)
    second = replace(first_again, number=number, at_s=at_s, tenant=tenant)
    if chance.random() < 0.7:
        second = replace(
            second,
            prompt=_own_prompt(number),
            seed=chance.choice((0, 7)),
            max_tokens=chance.choice((10, 40, 78)),
        )
    # Both send their body each time that they come: nobody can tell apart two who only give the id.
    requests = [replace(each, request_id=first.name) if each is first else each for each in scenario.requests]
    again = replace(scenario, requests=(*requests, second))
    if chance.random() < 0.3:
        return _cut_off_from_redis_during(again, chance, second)
    return _end_coordinators_during(again, chance, chance.choice((first, second)))


def _cut_off_from_redis_during(scenario: Scenario, chance: random.Random, second: Request) -> Scenario:
    """One of two coordinators, perhaps the one that has the first request, for longer than it waits for an answer."""
    requests = tuple(
        replace(each, max_tokens=78, ignore_eos=True, stop="", deadline_s=300.0)
        if each.name == second.name and each is not second
        else each
        for each in scenario.requests
    )
    cut = Fault(second.at_s, FaultKind.CUT, chance.choice(("c0", "c1")), chance.choice((2.5, 4.0)), REDIS)
    slow = replace(scenario.shape, step_s=0.2)
    changed = replace(scenario, requests=requests, num_coordinators=2, shape=slow)
    return _with_faults(changed, (*(fault for fault in scenario.faults if chance.random() < 0.3), cut))


def _add_liar(scenario: Scenario, chance: random.Random) -> Scenario:
    def lying(each: Request) -> Request:
        return replace(
            each, prompt=_own_prompt(each.number), is_liar=True, num_choices=1, max_tokens=40, stop="",
            ignore_eos=True,
        )  # fmt: skip

    return _change(scenario, chance, lying, 0.0, _is_plain)


def _add_weights(scenario: Scenario, chance: random.Random) -> Scenario:
    # What a coordinator knows of a stream, it knows from Redis; without it nobody can tell which weights it had.
    lasting = [
        fault
        for fault in scenario.faults
        if fault.process != REDIS or fault.kind not in (FaultKind.KILL, FaultKind.LOSE_MACHINE, FaultKind.EMPTY)
    ]
    targets = [f"t{i}" for i in range(scenario.num_targets)]
    lasting += [
        Fault(chance.uniform(0.5, SPAN_S), FaultKind.KILL, chance.choice(targets), chance.choice((0.3, 2.0)))
        for _ in range(chance.randint(1, 2))
    ]
    weights = tuple(chance.randrange(2) for _ in targets)
    changed = replace(scenario, weights=weights, change_of_weights=chance.choice((0, 1, 2)))
    return _with_faults(changed, lasting)


def _add_stalled_reader(scenario: Scenario, chance: random.Random) -> Scenario:
    def stalled(each: Request) -> Request:
        return replace(
            each, prompt=_own_prompt(each.number), max_tokens=78, ignore_eos=True, stop="", num_choices=1,
            speculation=SpeculationSettings(enabled=False), deadline_s=chance.choice((4.0, 300.0)),
            stalls_after=chance.choice((1, 2, 5)), stalls_s=chance.choice((0.5, 5.0, 30.0, 30.0)),
        )  # fmt: skip

    return replace(_change(scenario, chance, stalled, 0.0, _is_plain), window=chance.choice((2, 4)))


def _add_poison(scenario: Scenario, chance: random.Random) -> Scenario:
    """Half of the clients leave, or run into their deadline, while targets are lost to them, and come back."""
    leaving = random.Random(f"{scenario.seed}/leaving")  # its own, so that what is added later stays as it was

    def poisonous(each: Request) -> Request:
        changed = replace(
            each, prompt=_own_prompt(each.number), max_tokens=78, ignore_eos=True, stop="", num_choices=1,
            poisons_after=chance.choice((1, 1, 3)), deadline_s=300.0,
        )  # fmt: skip
        within_s = leaving.uniform(0.1, 3.0)
        match leaving.choice(("stays", "stays", "leaves", "is late")):
            case "leaves":
                return replace(changed, comes_back=True, stays_s=within_s)
            case "is late":
                return replace(changed, comes_back=True, deadline_s=within_s)
            case _:
                return changed

    return _change(scenario, chance, poisonous, 0.0, _is_plain)


def _add_long_stop(scenario: Scenario, chance: random.Random) -> Scenario:
    """Freezes a coordinator for 6 s or 7 s while its requests take long."""
    name = f"c{chance.randrange(scenario.num_coordinators)}"
    stop = Fault(chance.uniform(0.5, 4.0), FaultKind.FREEZE, name, chance.choice((6.0, 7.0)))
    slow = replace(scenario, shape=replace(scenario.shape, step_s=0.2))
    calm = [fault for fault in scenario.faults if chance.random() < 0.3]
    return _with_faults(slow, (*calm, stop))


def _add_skewed_clocks(scenario: Scenario, chance: random.Random) -> Scenario:
    """Replaces a target: skewed clocks matter where two processes have lived under one id."""
    name = f"t{chance.randrange(scenario.num_targets)}"
    replaced = Fault(chance.uniform(0.5, SPAN_S / 2), FaultKind.REPLACE, name, chance.choice((2.0, 7.0, 9.0)))
    return _with_faults(scenario, (*scenario.faults, replaced))


def _add_full_journal(scenario: Scenario, chance: random.Random) -> Scenario:
    return replace(_add_rush(scenario, chance), journal_bytes_max=chance.choice((4000, 8000)))


def _add_batch(scenario: Scenario, chance: random.Random) -> Scenario:
    """Lines come early and take long, so that others find the slots taken."""

    def in_background(each: Request) -> Request:
        return replace(each, is_background=True, at_s=chance.uniform(0.0, 0.5), max_tokens=78, deadline_s=300.0)

    return _change(scenario, chance, in_background, 0.4, _is_plain)


def _add_batch_of_many(scenario: Scenario, chance: random.Random) -> Scenario:
    """Lines fill a replica's room, were they to count as other requests do."""
    first, more = scenario.requests[-1].number + 1, []
    for number in range(first, first + 2):
        line = replace(
            draw_request(chance, number, is_crowded=False), prompt=_own_prompt(number), is_background=True,
            num_choices=_ROOM, at_s=chance.uniform(0.0, 0.3), max_tokens=10, deadline_s=300.0, leaves_after_s=None,
        )  # fmt: skip
        more.append(line)
    return replace(scenario, requests=(*scenario.requests, *more), requests_max=_ROOM)


_ADDITIONS: Final[dict[Feature, Callable[[Scenario, random.Random], Scenario]]] = {
    Feature.RUSH: _add_rush,
    Feature.SHARES: _add_rush,
    Feature.FULL_JOURNAL: _add_full_journal,
    Feature.KEYS: _add_keys,
    Feature.ONE_WAY: _add_one_way,
    Feature.NARROW: lambda scenario, chance: replace(scenario, window=chance.choice((2, 4, 16))),
    Feature.CHOICES: _add_choices,
    Feature.LOGPROBS: _add_logprobs,
    Feature.GRAMMAR: _add_grammar,
    Feature.SLOW_GRAMMAR: _add_slow_grammar,
    Feature.JOURNAL_LOSS: _add_journal_loss,
    Feature.DRAWN_SEEDS: _add_drawn_seeds,
    Feature.REUSED_ID: _add_reused_id,
    Feature.LIAR: _add_liar,
    Feature.STALLED_READER: _add_stalled_reader,
    Feature.POISON: _add_poison,
    Feature.LONG_STOP: _add_long_stop,
    Feature.WEIGHTS: _add_weights,
    Feature.SKEWED_CLOCKS: _add_skewed_clocks,
    Feature.BATCH: _add_batch,
    Feature.BATCH_OF_MANY: _add_batch_of_many,
}
"""In the order in which they are added: what adds requests before what chooses by their number."""
