"""The judge of the tenants' suite: planted harm is noticed, equal loads pass, and the list is what it says."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outrider.observability.telemetry import show_loop_lag
from tests.e2e.fuzz.lag import OWN, Histogram
from tests.e2e.tenants import attempts, connections, grammars, work  # noqa: F401 - each fills the list
from tests.e2e.tenants.__main__ import SHORT_LIMITS, parse, plans
from tests.e2e.tenants.attacker import Tally
from tests.e2e.tenants.judge import (
    ERROR_RATE,
    KEPT_ONCE_BYTES,
    PEAK_MORE_BYTES,
    Lag,
    Limits,
    Row,
    answer_faults,
    compare,
    compare_all,
    confidence_ranks,
    has_settled,
    memory_faults,
    table,
)
from tests.e2e.tenants.neighbour import Sample
from tests.e2e.tenants.scenario import ORDINARY_CLIENTS_MAX, ORDINARY_TOKENS_MAX, SCENARIOS, Load

NUM_SAMPLES = 180
MIB = 1 << 20


def latencies(rng: random.Random, times: float = 1.0, count: int = NUM_SAMPLES) -> list[float]:
    """As requests of several kinds have them: from 0.1 s, with a long tail."""
    return [0.1 * times * rng.lognormvariate(0.5, 0.7) for _ in range(count)]


def samples(seconds: list[float], kind: str = "chat") -> list[Sample]:
    return [Sample(kind, each) for each in seconds]


def num_exceeded(times: float, num_runs: int = 300) -> int:
    """The number of runs in which a load that takes `times` as long is judged to be too slow by either quantile."""
    rng = random.Random(55)
    found = 0
    for _ in range(num_runs):
        compared = compare_all(samples(latencies(rng)), samples(latencies(rng, times)), Limits())
        found += any(each.is_exceeded for each in compared)
    return found


class TestLatencies:
    def test_equal_loads_pass(self) -> None:
        assert num_exceeded(1.0) == 0

    def test_a_load_at_the_limit_is_hardly_ever_too_slow(self) -> None:
        # Each of two quantiles is wrong at most at twice the rate; 300 runs have 6 on average, and 16 once in 5,000.
        assert num_exceeded(2.0) <= 300 * 2 * 2 * ERROR_RATE + 10

    def test_a_load_that_takes_four_times_as_long_is_noticed(self) -> None:
        assert num_exceeded(4.0) >= 290

    def test_a_few_requests_that_stand_still_are_noticed_by_the_p99(self) -> None:
        rng = random.Random(1)
        attacked = [*latencies(rng)[:-12], *[30.0] * 12]
        exceeded = [each.quantile for each in compare_all(samples(latencies(rng)), samples(attacked), Limits())
                    if each.is_exceeded]  # fmt: skip
        assert exceeded == [0.99]

    def test_times_that_nobody_notices_are_no_harm(self) -> None:
        assert not compare("calls", [0.001] * 100, [0.04] * 100, 0.5, 2.0).is_exceeded
        assert compare("calls", [0.001] * 100, [0.2] * 100, 0.5, 2.0).is_exceeded

    def test_kinds_are_compared_with_their_own(self) -> None:
        ordinary = samples([0.5] * 100) + samples([0.06] * 100, "models")
        attacked = samples([0.5] * 100) + samples([0.4] * 100, "models")
        exceeded = {each.group for each in compare_all(ordinary, attacked, Limits()) if each.is_exceeded}
        assert exceeded == {"calls"}

    def test_the_short_form_notices_what_stops_a_neighbour(self) -> None:
        rng = random.Random(2)
        ordinary, slowed, stopped = (samples(latencies(rng, times, 23)) for times in (1.0, 2.0, 80.0))
        assert not any(each.is_exceeded for each in compare_all(ordinary, slowed, SHORT_LIMITS))
        assert any(each.is_exceeded for each in compare_all(ordinary, stopped, SHORT_LIMITS))
        assert answer_faults([Sample("chat", 32.0)], SHORT_LIMITS)

    @pytest.mark.parametrize(("count", "quantile"), [(30, 0.5), (180, 0.5), (600, 0.99), (2000, 0.99)])
    def test_a_quantile_is_outside_of_its_ranks_as_rarely_as_they_say(self, count: int, quantile: float) -> None:
        lower, upper = confidence_ranks(count, quantile)
        rng, num_runs, outside = random.Random(count), 2000, 0
        for _ in range(num_runs):
            number_below = sum(rng.random() < quantile for _ in range(count))
            outside += number_below <= lower or number_below > upper
        # 20 of 2,000 on average, where both ranks are as wrong as they may be; 40 once in 20,000.
        assert outside < 2 * ERROR_RATE * num_runs + 20


def test_errors_of_the_neighbours_own_are_told() -> None:
    failing = [Sample("chat", 0.1, "429: full")] * 3 + [Sample("probe", 0.1, "ReadError")]
    assert answer_faults(failing + samples([0.1]), Limits()) == ["3 × chat: 429: full", "1 × probe: ReadError"]
    assert not answer_faults(samples([0.1] * 5), Limits())


class TestMemory:
    def test_that_comes_back_is_no_harm(self) -> None:
        before, after = {"target-0": 600 * MIB}, {"target-0": 650 * MIB}
        assert not memory_faults(before, [after, after], {"target-0": 700 * MIB})
        assert has_settled(before, after)

    def test_an_allocator_that_warms_up_is_no_harm_and_a_leak_is(self) -> None:
        before, first = {"coordinator-0": 200 * MIB}, {"coordinator-0": 260 * MIB}
        assert not memory_faults(before, [first, {"coordinator-0": 270 * MIB}], {})
        assert memory_faults(before, [first, {"coordinator-0": 320 * MIB}], {})

    def test_that_is_kept_at_once_is_told(self) -> None:
        before = {"coordinator-0": 200 * MIB}
        kept = {"coordinator-0": 221 * MIB + KEPT_ONCE_BYTES}
        assert memory_faults(before, [kept, kept], {})

    def test_that_was_taken_for_a_moment_is_told(self) -> None:
        before = {"coordinator-0": 264 * MIB}
        peaks = {"coordinator-0": 265 * MIB + PEAK_MORE_BYTES}
        assert "at once" in memory_faults(before, [before, before], peaks)[0]


class TestEventLoops:
    @staticmethod
    def lag(*late_s: float, num_ticks: int = 200) -> Lag:
        registry = CollectorRegistry()
        observe = show_loop_lag(registry, "a")
        observe(0.001, 0.001)
        before = Histogram.parse(generate_latest(registry).decode(), OWN)
        for own_s in [*late_s, *[0.002] * (num_ticks - len(late_s))]:
            observe(own_s, own_s)
        return Lag.between(before, Histogram.parse(generate_latest(registry).decode(), OWN))

    def test_a_loop_that_is_late_now_and_then_is_no_harm(self) -> None:
        assert self.lag(0.2, 0.09).fault("target-0") is None

    def test_a_loop_that_stands_still_once_is_told(self) -> None:
        assert "stood still" in str(self.lag(12.0).fault("target-0"))

    def test_a_loop_that_is_often_late_is_told(self) -> None:
        assert "3 times of 200" in str(self.lag(0.2, 0.2, 0.3).fault("target-0"))


class TestOrdinaryLoads:
    def test_have_as_many_requests_and_tokens(self) -> None:
        assert Load.like(Tally(num_loads=40, num_bytes=400, num_tokens=320), 8) == Load(40, 8, 8)

    def test_leave_out_requests_that_had_no_answer(self) -> None:
        tally = Tally(num_requests=40)
        tally.load(100, 8)
        assert Load.like(tally, 8) == Load(1, 8, 8)

    def test_have_as_many_bytes(self) -> None:
        assert Load.like(Tally(num_loads=1, num_bytes=1 << 20), 1) == Load(2097, 1, 1)

    def test_are_requests_of_ordinary_size_by_an_ordinary_number_of_clients(self) -> None:
        load = Load.like(Tally(num_loads=4000, num_tokens=4000 * 500), 4000)
        assert (load.num_tokens, load.num_clients) == (ORDINARY_TOKENS_MAX, ORDINARY_CLIENTS_MAX)


class TestTheList:
    def test_every_attack_says_what_it_does(self) -> None:
        assert all(each.text.endswith((".", ":")) and len(each.text) > 20 for each in SCENARIOS.values())

    def test_both_forms_run_every_kind(self) -> None:
        short, (plain, ray) = plans(parse(["--short"])), plans(parse([]))
        assert len(short) == 1
        assert {each.point for each in short[0].scenarios} >= {1, 3, 4, 5, 6, 7, 10, 13, 18}
        assert plain.hosting != ray.hosting
        assert len(plain.scenarios) == len(ray.scenarios) == len(SCENARIOS)

    @pytest.mark.parametrize("words", [["--scenario", "earthquake"], ["--seconds", "0"], ["--hosting", "cloud"]])
    def test_what_cannot_be_done_is_refused_before_anything_starts(self, words: list[str]) -> None:
        with pytest.raises(SystemExit) as refused:
            parse(words)
        assert refused.value.code == 2


def test_the_table_has_a_line_for_each_attack() -> None:
    comparison = compare("generation", [0.1] * 50, [0.9] * 50, 0.5, 2.0)
    row = Row("a", 7, "An attack.", 12, Counter({"200": 12}), comparisons=[comparison], faults=["slow | late"])
    row.memory_mib = {"target-0": (600, 700, 610)}
    lines = table([row, Row("b", 0, "Another one.")]).splitlines()
    assert (
        lines[2] == "| a | 7 | 12 (200 12) | 9.0 / – | – / – | – / – | – / – | target-0 600 → 700 → 610 | slow ¦ late |"
    )
    assert lines[3].endswith("| holds |")
