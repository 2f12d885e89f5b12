"""Tests of priors: statistics of earlier requests that decide whether a new one begins with speculation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.intake.generation_request import GenerationInput, GenerationSpec
from coordinator.speculation import priors as priors_module
from coordinator.speculation.priors import (
    DOUBT_ABOVE,
    DOUBT_BELOW,
    EXPLORED_ONE_IN,
    HALF_LIFE_S,
    NOTHING,
    NUM_JUDGED_MIN,
    Evidence,
    PriorKey,
    PriorTable,
    StartingMode,
    key_for,
)
from outrider.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from tests.coordinator.fakes import served_model

KEY = PriorKey("demo", "text/free/greedy")
BAD, GOOD = Evidence(1, 1, 8, 9, 1), Evidence(1, 0, 50, 90, 60)

counts = st.floats(0, 1000)
evidences = st.builds(Evidence, counts, counts, counts, counts, counts)


def spec(**request: Any) -> GenerationSpec:
    sampling = request.pop("sampling", SamplingParams(max_tokens=8))
    return GenerationSpec(
        request=GenerationInput(request_id="r", **(request or {"text": "x"})),
        model="demo",
        prompt_token_ids=(1,),
        max_tokens=8,
        sampling=sampling,
        deadline_s=1.0,
        served=served_model(),
    )


def table(*lessons: tuple[Evidence, int], key: PriorKey = KEY) -> PriorTable:
    made = PriorTable()
    for evidence, count in lessons:
        for _ in range(count):
            made.record(key, evidence, 0.0)
    return made


def modes(made: PriorTable, count: int = 2000, key: PriorKey = KEY) -> list[StartingMode]:
    return [made.start(key, f"request-{number}", 0.0) for number in range(count)]


class TestEvidence:
    def test_half_is_left_after_a_half_life(self) -> None:
        assert Evidence(8, 4, 2, 1, 0).faded(HALF_LIFE_S) == Evidence(4, 2, 1, 0.5, 0)

    def test_a_clock_that_goes_back_adds_nothing(self) -> None:
        assert GOOD.faded(-1000) == GOOD

    @given(evidences, st.floats(0, 1000), st.floats(0, 1000))
    def test_fading_twice_is_fading_once_for_both(self, each: Evidence, first: float, second: float) -> None:
        assert each.faded(first).faded(second) == pytest.approx(each.faded(first + second))

    @given(evidences, evidences, st.floats(0, 1000))
    def test_fading_and_adding_commute(self, one: Evidence, other: Evidence, elapsed_s: float) -> None:
        assert one.plus(other) == other.plus(one)
        together = one.plus(other).faded(elapsed_s)
        assert together == pytest.approx(one.faded(elapsed_s).plus(other.faded(elapsed_s)))

    @given(st.lists(st.tuples(st.floats(0, 900), evidences, st.integers(0, 2)), max_size=12), st.randoms())
    def test_replicas_sum_to_the_same_whoever_wrote_first(
        self, lessons: Sequence[tuple[float, Evidence, int]], chance: random.Random
    ) -> None:
        replicas, alone = [PriorTable() for _ in range(3)], PriorTable()
        for at_s, evidence, replica in sorted(lessons, key=lambda lesson: lesson[0]):
            replicas[replica].record(KEY, evidence, at_s)
            alone.record(KEY, evidence, at_s)
        chance.shuffle(replicas)
        shared = NOTHING
        for each in replicas:
            shared = shared.plus(each.take(1000.0).get(KEY, NOTHING))
        assert shared == pytest.approx(alone.evidence(KEY, 1000.0))


class TestKeys:
    def test_the_route_tells_kind_form_and_decoding(self) -> None:
        sampled, seeded = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=1)
        grammar = GrammarSpec(GrammarKind.REGEX, "a+")
        greedy = SamplingParams(temperature=0.0, grammar=grammar)
        chat = [{"role": "user", "content": "hi"}]
        assert key_for(spec(sampling=sampled)).route == "text/free/rejection"
        assert key_for(spec(sampling=seeded)).route == "text/free/coupled"
        assert key_for(spec(sampling=greedy, messages=chat)).route == "chat/grammar/greedy"

    def test_a_tenant_is_known_by_a_digest_only(self) -> None:
        one, other = key_for(spec(), "sk-secret"), key_for(spec(), "sk-other")
        assert one != other
        assert one == key_for(spec(), "sk-secret")
        assert "secret" not in str(one)
        assert len(key_for(spec(), "x" * 100_000).tenant) == len(one.tenant)

    @pytest.mark.parametrize("key", [KEY, PriorKey("a|b|c", "chat/free/coupled", "0123")])
    def test_a_name_reads_back(self, key: PriorKey) -> None:
        assert PriorKey.parse(str(key)) == key

    def test_a_name_that_is_none_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unpack"):
            PriorKey.parse("nothing of ours")


class TestStart:
    def test_where_nothing_is_known_requests_speculate(self) -> None:
        assert set(modes(PriorTable())) == {StartingMode.SPECULATING}

    def test_a_few_bad_requests_are_no_reason(self) -> None:
        assert set(modes(table((BAD, int(NUM_JUDGED_MIN) - 1)))) == {StartingMode.SPECULATING}

    def test_where_speculation_pays_requests_speculate(self) -> None:
        assert set(modes(table((GOOD, 80), (BAD, 20)))) == {StartingMode.SPECULATING}

    def test_where_it_never_pays_requests_start_paused_and_one_in_sixteen_probes(self) -> None:
        found = modes(table((BAD, 40)), count=4000)
        num_probing = found.count(StartingMode.PROBING)
        assert num_probing + found.count(StartingMode.PAUSED) == 4000
        # Ids are fixed, so this cannot fail by chance; a fair hash stays within the bound in 99.99 % of such lists.
        assert abs(num_probing - 4000 / EXPLORED_ONE_IN) < 4 * (4000 / EXPLORED_ONE_IN) ** 0.5

    def test_the_same_id_starts_the_same_way_on_every_replica(self) -> None:
        assert modes(table((BAD, 40))) == modes(table((BAD, 90)))

    def test_doubt_begins_high_and_ends_low(self) -> None:
        made, doubts = PriorTable(), []
        # Of a hundred verdicts ever more, then ever fewer are bad.
        path = [*range(101), *range(100, -1, -1)]
        for num_bad in path:
            made.learn({KEY: Evidence(100, num_bad, 1, 1, 1)}, 0.0)
            doubts.append(made.is_doubted(KEY, 0.0))
        begin, end = doubts.index(True), len(doubts) - doubts[::-1].index(True)
        assert path[begin] == pytest.approx(100 * DOUBT_ABOVE)
        assert path[end] == pytest.approx(100 * DOUBT_BELOW - 1)
        assert all(doubts[begin:end]), "between the bounds nothing changes"

    def test_what_is_known_fades_until_all_speculate_again(self) -> None:
        made = table((BAD, 64))
        assert made.is_doubted(KEY, 0.0)
        assert made.is_doubted(KEY, 3 * HALF_LIFE_S), "eight verdicts left: not enough to begin, enough to stay"
        assert not made.is_doubted(KEY, 5 * HALF_LIFE_S)
        assert not made.is_doubted(KEY, 3 * HALF_LIFE_S)

    def test_a_tenant_with_few_requests_is_judged_by_all(self) -> None:
        known, stranger = PriorKey("demo", KEY.route, "a"), PriorKey("demo", KEY.route, "b")
        made = table((GOOD, 30), key=known)
        for _ in range(400):
            made.record(KEY, BAD, 0.0)
        assert not made.is_doubted(known, 0.0)
        assert made.is_doubted(stranger, 0.0)

    @pytest.mark.parametrize(("share", "may_doubt"), [(0.5, False), (1.0, True)])
    def test_chance_alone_does_not_make_a_fair_draft_doubted(self, share: float, may_doubt: bool) -> None:
        # Where half of the requests pause, a key is doubted at some moment of 500 requests in about 0.3 % of runs
        # (simulated, at any rate of requests); more than 6 of 200 would be a chance of 1 in 100,000.
        chance, num_doubted = random.Random(11), 0
        for _ in range(200):
            made, now_s, was_doubted = PriorTable(), 0.0, False
            for _ in range(150):
                now_s += chance.expovariate(0.1)
                made.record(KEY, BAD if chance.random() < share else GOOD, now_s)
                was_doubted |= made.is_doubted(KEY, now_s)
            num_doubted += was_doubted
        assert num_doubted == 200 if may_doubt else num_doubted <= 6


class TestBounds:
    @pytest.fixture(autouse=True)
    def few_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(priors_module, "KEYS_MAX", 4)

    def test_the_key_longest_unheard_of_is_forgotten_first(self) -> None:
        made = PriorTable()
        for number in range(20):
            made.record(PriorKey(f"model-{number}", "r"), BAD, 0.0)
            made.record(KEY, BAD, 0.0)
        assert made.num_keys == 4
        assert made.evidence(KEY, 0.0).num_judged == 20

    def test_what_is_read_and_given_back_is_bounded_too(self) -> None:
        made = PriorTable()
        many = {PriorKey(f"model-{number}", "r"): BAD for number in range(20)}
        made.learn(many, 0.0)
        for _ in range(5):
            for key in many:
                made.record(key, BAD, 0.0)
            made.take(0.0)
            for number in range(4):
                made.record(PriorKey(f"newer-{number}", "r"), BAD, 0.0)
            made.give_back(0.0)
            assert made.num_keys <= 3 * 4

    def test_a_request_that_taught_nothing_leaves_nothing(self) -> None:
        made = table((NOTHING, 3))
        assert made.num_keys == 0


class TestExchange:
    def test_what_is_on_its_way_still_counts(self) -> None:
        made = table((BAD, 20))
        assert made.take(0.0)[KEY].num_judged == 20
        made.record(KEY, BAD, 0.0)
        assert made.evidence(KEY, 0.0).num_judged == 21

    def test_what_arrived_is_not_counted_twice(self) -> None:
        made = table((BAD, 20))
        sent = made.take(0.0)
        made.record(KEY, BAD, 0.0)
        made.learn(sent, 0.0)
        assert made.evidence(KEY, 0.0).num_judged == 21
        assert made.take(0.0)[KEY].num_judged == 1

    def test_what_did_not_arrive_is_sent_again_with_the_rest(self) -> None:
        made = table((BAD, 20))
        made.take(0.0)
        made.record(KEY, BAD, HALF_LIFE_S)
        made.give_back(HALF_LIFE_S)
        assert made.take(HALF_LIFE_S)[KEY].num_judged == pytest.approx(11)

    def test_the_summary_is_of_models_and_routes(self) -> None:
        made = table((GOOD, 3), key=PriorKey("demo", KEY.route, "tenant"))
        assert made.summary(0.0).keys() == {KEY}
        assert made.summary(0.0)[KEY].acceptance == pytest.approx(60 / 90)
        assert made.summary(0.0)[KEY].extra_tokens == pytest.approx(60 / 50)
