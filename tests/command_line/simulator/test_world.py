"""The simulator against what is known without it: queues, rates, closed forms, and that nothing gets lost."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from command_line.load.summary import percentile
from command_line.simulator.fleet import DraftPool, Fleet, Network, RequestKind, TargetPool, Traffic
from command_line.simulator.world import Outcome, World

AT_ONCE = Network(worker_ms=0.0, coordinator_ms=0.0, jitter=0.0)
FREE = {"fixed_ms": 0.01, "token_ms": 0.0, "sequence_ms": 0.0}
STEP = {"fixed_ms": 20.0, "token_ms": 0.0, "sequence_ms": 0.0, "hinted_sequence_ms": 0.0}


def small(**changes: object) -> Fleet:
    """Two targets and a draft worker with room for some, mixed requests."""
    settings: dict[str, object] = {
        "target": TargetPool(count=2, max_num_seqs=6, max_num_waiting=4),
        "draft": DraftPool(count=1, max_num_seqs=5),
        "traffic": Traffic(concurrency=10, warmup_s=1.0, seconds=2.0),
        "kinds": (
            RequestKind(prompt_tokens=(1, 600), output_tokens=(1, 60), acceptance=0.9),
            RequestKind(share=0.5, output_tokens=(30, 40), acceptance=0.05, alternatives=0.1),
            RequestKind(share=0.5, prompt_tokens=(200, 210), shared_prefix=128, streaks=0.5, certainty=0.7),
        ),
    }
    return Fleet(**(settings | changes))  # type: ignore[arg-type]


def figures(outcome: Outcome) -> Outcome:
    return replace(outcome, wall_s=0.0)


def test_a_seed_decides_everything() -> None:
    first, again, other = (World(small(seed=seed)).run() for seed in (1, 1, 2))
    assert figures(first) == figures(again)
    assert figures(first) != figures(other)


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(concurrency=10, warmup_s=1.0, seconds=2.0),
        Traffic(concurrency=40, warmup_s=1.0, seconds=2.0),  # more than there are places
        Traffic(rate=60.0, warmup_s=0.0, seconds=2.0),  # more than can be served
    ],
    ids=["closed", "crowded", "flooded"],
)
@pytest.mark.parametrize("coordinators", [1, 3])
def test_every_request_ends_with_its_own_text_or_is_refused(traffic: Traffic, coordinators: int) -> None:
    # That a text is the one that the target's model says is asserted for every request as it ends.
    world = World(small(traffic=traffic, network=Network(coordinators=coordinators, max_queue_wait_s=0.2)))
    outcome = world.run(drains=True)
    assert world.num_asked == world.num_ended + world.num_refused
    assert world.num_under_way == 0
    assert world.num_ended > 20
    assert (world.num_refused > 0) == (traffic.concurrency != 10)
    assert outcome.num_ended <= world.num_ended
    for target in world.targets.values():
        assert target.scheduler.num_running == target.scheduler.num_waiting == 0
        assert target.scheduler.kv_usage == 0.0
    for draft in world.drafts.values():
        assert draft.scheduler.num_sessions == 0


def test_a_lone_plain_stream_takes_a_step_a_token() -> None:
    fleet = Fleet(
        target=TargetPool(count=1, **STEP),  # type: ignore[arg-type]
        draft=DraftPool(count=0),
        network=Network(worker_ms=0.0, coordinator_ms=3.0, jitter=0.0),
        traffic=Traffic(concurrency=1, warmup_s=0.0, seconds=20.0),
        kinds=(RequestKind(prompt_tokens=(100, 100), output_tokens=(50, 50)),),
    )
    outcome = World(fleet).run()
    assert outcome.ttft_ms is not None
    assert outcome.tpot_ms is not None
    assert outcome.e2el_ms is not None
    assert outcome.ttft_ms.p99 == pytest.approx(3.0 + 20.0 + 3.0)
    assert outcome.tpot_ms.p99 == pytest.approx(20.0)
    assert outcome.e2el_ms.p99 == pytest.approx(3.0 + 50 * 20.0 + 3.0)
    assert outcome.draft_utilisation is None
    assert outcome.mean_acceptance_length == 1.0


def test_plain_throughput_is_the_batch_over_the_step() -> None:
    num_streams, fixed_ms, token_ms = 24, 10.0, 0.5
    fleet = Fleet(
        target=TargetPool(count=1, fixed_ms=fixed_ms, token_ms=token_ms, sequence_ms=0.0),
        draft=DraftPool(count=0),
        network=AT_ONCE,
        traffic=Traffic(concurrency=num_streams, warmup_s=10.0, seconds=20.0),
        kinds=(RequestKind(prompt_tokens=(1, 1), output_tokens=(200, 400)),),
    )
    outcome = World(fleet).run()
    step_ms = fixed_ms + token_ms * num_streams
    assert outcome.tokens_per_s == pytest.approx(num_streams / step_ms * 1e3, rel=0.01)
    assert outcome.mean_batch == pytest.approx(num_streams, rel=0.01)
    assert outcome.target_utilisation == pytest.approx(1.0, abs=0.01)


def busy_coordinator(coordinators: int) -> Outcome:
    """100 streams whose steps take 20 ms, and 150 µs of a coordinator for each: 75 % of one replica's time."""
    fleet = Fleet(
        target=TargetPool(count=2, max_num_seqs=50, **STEP),  # type: ignore[arg-type]
        draft=DraftPool(count=0),
        network=replace(AT_ONCE, step_us=150.0, coordinators=coordinators),
        traffic=Traffic(concurrency=100, warmup_s=5.0, seconds=5.0),
        kinds=(RequestKind(prompt_tokens=(1, 1), output_tokens=(200, 200)),),
    )
    return World(fleet).run()


def test_a_coordinator_takes_its_time_for_every_step_and_replicas_share_it() -> None:
    one, two = busy_coordinator(1), busy_coordinator(2)
    assert one.coordinator_utilisation == pytest.approx(0.75, rel=0.02)
    assert two.coordinator_utilisation == pytest.approx(0.375, rel=0.05)
    assert one.tpot_ms is not None
    assert one.tpot_ms.p50 == pytest.approx(20.0, rel=0.01), "steps are late by the same time, so gaps are as long"
    assert one.ttft_ms is not None
    assert two.ttft_ms is not None
    assert one.ttft_ms.p50 > two.ttft_ms.p50 + 1.0
    assert World(lone_stream(0.0, 1)).run().coordinator_utilisation is None


def one_place(load: float, seconds: float) -> Fleet:
    """Poisson arrivals, one place, every service one step of 20 ms."""
    return Fleet(
        target=TargetPool(count=1, max_num_seqs=1, max_num_waiting=10_000, **STEP),  # type: ignore[arg-type]
        draft=DraftPool(count=0),
        network=AT_ONCE,
        traffic=Traffic(rate=load / 0.020, warmup_s=0.0, seconds=seconds),
        kinds=(RequestKind(prompt_tokens=(8, 8), output_tokens=(1, 1)),),
    )


@pytest.mark.parametrize("load", [0.5, 0.9, 1.1])
def test_a_queue_is_worked_off_one_after_the_other(load: float) -> None:
    """Lindley's recursion over the very same arrivals gives the very same times."""
    fleet = one_place(load, seconds=60.0)
    chance = random.Random(f"{fleet.seed}/world")
    assert fleet.traffic.rate is not None
    arrived_s = free_s = 0.0
    expected_s = []
    while (arrived_s := arrived_s + chance.expovariate(fleet.traffic.rate)) <= 60.0:
        free_s = max(free_s, arrived_s) + 0.020
        if free_s <= 60.0:
            expected_s.append(free_s - arrived_s)
    outcome = World(fleet).run()
    assert outcome.num_ended == len(expected_s)
    assert outcome.mean_e2el_ms == pytest.approx(1e3 * sum(expected_s) / len(expected_s), rel=1e-6)
    assert outcome.e2el_ms is not None
    assert outcome.e2el_ms.p99 == pytest.approx(percentile(sorted(expected_s), 0.99) * 1e3, rel=1e-6)


def test_a_queue_is_as_long_as_theory_says() -> None:
    """M/D/1, Pollaczek and Khinchine: W = ρD / 2(1 - ρ)."""
    load, service_s = 0.5, 0.020
    outcome = World(one_place(load, seconds=400.0)).run()
    assert outcome.mean_e2el_ms is not None
    waited_s = outcome.mean_e2el_ms / 1e3 - service_s
    assert waited_s == pytest.approx(load * service_s / (2.0 * (1.0 - load)), rel=0.07)
    assert outcome.target_utilisation == pytest.approx(load, rel=0.03)


def lone_stream(acceptance: float, num_hints: int, seed: int = 0) -> Fleet:
    """One stream whose draft costs next to nothing and whose steps cost the same whatever they feed."""
    return Fleet(
        target=TargetPool(count=1, num_speculative_tokens=num_hints, always_listen=True, **STEP),  # type: ignore[arg-type]
        draft=DraftPool(count=1, max_nodes_per_step=1, max_chain_nodes=64, max_alternatives=0, **FREE),  # type: ignore[arg-type]
        network=AT_ONCE,
        traffic=Traffic(concurrency=1, warmup_s=3.0, seconds=50.0),
        kinds=(RequestKind(prompt_tokens=(8, 8), output_tokens=(900, 900), acceptance=acceptance, alternatives=0.0),),
        seed=seed,
    )


@pytest.mark.parametrize(("acceptance", "num_hints"), [(0.5, 2), (0.7, 4), (0.8, 8), (0.9, 8)])
def test_a_lone_stream_with_free_drafts_is_as_fast_as_the_closed_form(acceptance: float, num_hints: int) -> None:
    """Leviathan et al. 2211.17192, eq. 1: (1 - α^(γ+1)) / (1 - α) tokens a step."""
    outcome = World(lone_stream(acceptance, num_hints)).run()
    expected = (1.0 - acceptance ** (num_hints + 1)) / (1.0 - acceptance)
    assert outcome.mean_acceptance_length == pytest.approx(expected, rel=0.06)
    assert outcome.tokens_per_s * 0.020 == pytest.approx(expected, rel=0.07)


def test_a_branch_beside_a_wrong_hint_brings_its_token() -> None:
    """No more than if every hint were right where it or an alternative is."""
    acceptance, alternatives = 0.3, 0.5
    fleet = lone_stream(acceptance, 8)
    fleet = replace(
        fleet,
        draft=replace(fleet.draft, max_alternatives=4),
        kinds=(replace(fleet.kinds[0], alternatives=alternatives),),
    )
    path_alone = World(fleet).run().mean_acceptance_length
    with_branches = World(replace(fleet, target=replace(fleet.target, branches=True))).run().mean_acceptance_length
    right = acceptance + (1.0 - acceptance) * alternatives
    assert path_alone is not None
    assert with_branches is not None
    assert 1.3 * path_alone < with_branches < 1.03 * (1.0 - right**9) / (1.0 - right)


def test_a_useless_draft_costs_next_to_nothing() -> None:
    fleet = lone_stream(0.0, 8)
    fleet = replace(fleet, target=replace(fleet.target, always_listen=False))
    with_draft, plain = World(fleet).run(), World(fleet.with_pools(1, 0)).run()
    assert with_draft.tokens_per_s >= 0.97 * plain.tokens_per_s


def test_more_draft_workers_never_make_a_fleet_slower() -> None:
    fleet = replace(
        small(),
        target=TargetPool(count=2, max_num_seqs=8, token_ms=0.05),
        traffic=Traffic(concurrency=12, warmup_s=3.0, seconds=6.0),
        kinds=(RequestKind(prompt_tokens=(50, 50), output_tokens=(100, 100), acceptance=0.85),),
    )
    rates = [World(fleet.with_pools(2, num_drafts)).run().tokens_per_s for num_drafts in (0, 1, 2, 4)]
    # Within what two runs of the same differ by.
    assert all(more >= 0.97 * fewer for fewer, more in itertools.pairwise(rates)), rates
    assert rates[-1] > 1.4 * rates[0], rates


def test_slower_links_make_speculation_gain_less() -> None:
    fleet = lone_stream(0.8, 8)
    near, far = (
        World(replace(fleet, network=Network(worker_ms=ms, coordinator_ms=0.0, jitter=0.0))).run().tokens_per_s
        for ms in (0.1, 30.0)
    )
    assert far < 0.8 * near


def test_requests_that_begin_alike_are_prefilled_once() -> None:
    def ttft(shared: int) -> float:
        fleet = Fleet(
            target=TargetPool(count=1, token_ms=0.5),
            draft=DraftPool(count=0),
            traffic=Traffic(concurrency=2, warmup_s=3.0, seconds=10.0),
            kinds=(RequestKind(prompt_tokens=(480, 480), shared_prefix=shared, output_tokens=(10, 10)),),
        )
        found = World(fleet).run().ttft_ms
        assert found is not None
        return found.p50

    assert ttft(464) < 0.3 * ttft(0)


def test_the_coordinator_gives_up_on_hard_requests_and_keeps_the_draft_for_easy_ones() -> None:
    easy = RequestKind(prompt_tokens=(20, 20), output_tokens=(300, 300), acceptance=0.9)
    hard = replace(easy, acceptance=0.02, alternatives=0.0)
    fleet = replace(
        small(),
        target=TargetPool(count=1, max_num_seqs=16, always_listen=True),
        draft=DraftPool(count=1, max_num_seqs=16),
        traffic=Traffic(concurrency=8, warmup_s=5.0, seconds=20.0),
        kinds=(easy, hard),
    )
    outcome = World(fleet).run()
    assert outcome.draft_acceptance_rate is not None
    assert outcome.draft_acceptance_rate > 0.5, "hints of hard requests are hardly verified"
