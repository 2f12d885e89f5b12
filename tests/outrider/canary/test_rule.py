"""When a canary is promoted and when it is given up, and how seldom either is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from outrider.canary.plan import NUM_GROUPS, ArmChange, ArmName, CanaryPlan, Objective, Rule
from outrider.canary.rule import Judgement, Standing, Verdict, judge
from outrider.canary.statistics import FIRST, NUM_CLUSTERS, ArmStatistics, Count, Loss, RequestFigures
from tests.golden import Trace

Arms = Mapping[ArmName, ArmStatistics]
NUM_RUNS = 200
EVERY = 200
"""Requests between two looks."""
ALPHA = 0.05


def plan(share: float = 0.3, audit_share: float = 0.0, **rule: Any) -> CanaryPlan:
    return CanaryPlan(
        canary_id="abcd1234", change=ArmChange(num_speculative_tokens=2), share=share, audit_share=audit_share,
        rule=Rule(**{"alpha": ALPHA, **rule}),
    )  # fmt: skip


def arm(
    num: int = 400,
    tpot_ms: float = 10.0,
    ttft_ms: float = 100.0,
    spread: float = 0.2,
    num_keys: int = NUM_GROUPS,
    **counts: int,
) -> ArmStatistics:
    """Half of the requests this much above the mean, half as much below; those that are lost are of other keys in turn,
    as long as there are some."""
    found = ArmStatistics()
    for number in range(num):
        factor = 1 + (spread if number % 2 else -spread)
        found.add(
            RequestFigures(
                ttft_ms=ttft_ms * factor, tpot_ms=tpot_ms * factor, e2e_ms=1000.0,
                num_draft_tokens=0, num_accepted_draft_tokens=0,
            ),
            number // 2 % num_keys,
        )  # fmt: skip
    for what, count in counts.items():
        for number in range(count):
            found.lose(Count(what), number % num_keys)
    return found


def judged(
    canary: ArmStatistics, control: ArmStatistics | None = None, *, late: bool = False, **rule: Any
) -> Judgement:
    arms = {ArmName.CONTROL: control or arm(1000), ArmName.CANARY: canary}
    return judge(plan(**rule), arms, is_out_of_time=late)


def standing(judgement: Judgement, name: str) -> Standing:
    return next(guard.standing for guard in judgement.guards if guard.name == name)


def test_an_arm_that_is_faster_in_all_is_promoted() -> None:
    assert judged(arm(tpot_ms=8)).verdict is Verdict.PROMOTE


def test_an_arm_that_is_clearly_slower_is_given_up() -> None:
    found = judged(arm(tpot_ms=11))
    assert found.verdict is Verdict.ABORT
    assert "mean TPOT is certainly above control's" in found.reason
    assert "11 ms beside 10 ms" in found.reason


def test_faster_tokens_do_not_pay_for_a_later_first_one() -> None:
    found = judged(arm(tpot_ms=8, ttft_ms=115))
    assert found.verdict is Verdict.ABORT
    assert standing(found, "TTFT no worse") is Standing.BROKEN
    within = arm(2000, tpot_ms=8, ttft_ms=101)
    assert judged(within, arm(4000)).verdict is Verdict.PROMOTE
    assert judged(within, arm(4000), margin=0.01).verdict is Verdict.CONTINUE


def test_an_arm_that_is_as_good_goes_on_until_its_time_is_over() -> None:
    assert judged(arm()).verdict is Verdict.CONTINUE
    found = judged(arm(), late=True)
    assert found.verdict is Verdict.ABORT
    assert found.reason.startswith("undecided when its time was over; open: ")


def test_one_that_need_not_be_better_is_promoted_when_it_is_no_worse() -> None:
    assert judged(arm(2000), arm(4000), objective=Objective.NONE).verdict is Verdict.PROMOTE
    slower = judged(arm(2000, tpot_ms=13), arm(4000), objective=Objective.NONE)
    assert slower.verdict is Verdict.ABORT


def test_without_a_margin_guards_keep_their_names() -> None:
    names = [guard.name for guard in judged(arm(), margin=0.0).guards]
    assert names[4:] == ["TPOT no worse", "TTFT no worse", "TPOT better"]


def test_the_objective_may_be_the_first_token() -> None:
    assert judged(arm(ttft_ms=80), objective=Objective.TTFT).verdict is Verdict.PROMOTE
    assert judged(arm(tpot_ms=8), objective=Objective.TTFT).verdict is Verdict.CONTINUE


def test_times_of_few_requests_decide_nothing() -> None:
    found = judged(arm(199, tpot_ms=30))
    assert found.verdict is Verdict.CONTINUE
    assert judged(arm(200, tpot_ms=30)).verdict is Verdict.ABORT
    assert judged(arm(5000, tpot_ms=8), arm(199)).verdict is Verdict.CONTINUE


def test_a_single_divergence_ends_it_at_once_however_fast_it_is() -> None:
    found = judged(arm(5, tpot_ms=1, audited=3, diverged=1))
    assert found.verdict is Verdict.ABORT
    assert found.reason == "1 of 3 audited requests have another output without speculation"
    assert judged(arm(tpot_ms=8, audited=30, unstable=2)).verdict is Verdict.PROMOTE


def test_failures_of_one_arm_alone_end_it_before_there_are_many() -> None:
    found = judged(arm(30, failed=6), arm(70))
    assert found.verdict is Verdict.ABORT
    assert "16.67% of the canary's requests fail, 0.00% of control's" in found.reason


@pytest.mark.parametrize("what", [Count.LATE, Count.LEFT])
def test_an_arm_that_drives_its_slow_requests_away_is_given_up_though_the_others_are_fast(
    what: Count,
) -> None:
    found = judged(arm(250, tpot_ms=8, **{what: 250}), arm(1000))
    assert found.verdict is Verdict.ABORT
    assert "50.00% of the canary's requests run out of time or are left, 0.00% of control's" in found.reason


def test_the_arm_of_the_review_that_timed_out_and_drove_clients_away_is_not_promoted() -> None:
    assert judged(arm(250, tpot_ms=8, late=150, left=100), arm(1000)).verdict is Verdict.ABORT
    few_keys = judged(arm(250, tpot_ms=8, late=150, left=100, num_keys=2), arm(1000), share=0.5)
    assert few_keys.verdict is Verdict.CONTINUE
    assert standing(few_keys, "departures") is Standing.OPEN


def test_clients_that_leave_both_arms_alike_keep_nothing_from_being_promoted() -> None:
    assert judged(arm(400, tpot_ms=8, left=40, late=4), arm(1000, left=100, late=10)).verdict is Verdict.PROMOTE


def test_refusals_say_nothing_of_an_arm() -> None:
    assert judged(arm(400, tpot_ms=8, refused=300), arm(1000)).verdict is Verdict.PROMOTE


def test_one_key_whose_every_request_fails_speaks_once() -> None:
    one = judged(arm(400, tpot_ms=8, failed=200, num_keys=1), arm(1000), share=0.1)
    assert standing(one, "failures") is Standing.OPEN
    assert judged(arm(400, tpot_ms=8, failed=200), arm(1000), share=0.1).verdict is Verdict.ABORT


def test_times_of_a_handful_of_keys_decide_nothing_however_many_requests_they_send() -> None:
    for tpot_ms in (2.0, 50.0):
        found = judged(arm(4000, tpot_ms=tpot_ms, num_keys=5), arm(4000))
        assert found.verdict is Verdict.CONTINUE
        assert "too few keys to compare TPOT" in next(
            guard.text for guard in found.guards if guard.name == "TPOT better"
        )


def test_where_audits_were_asked_for_none_is_not_enough() -> None:
    def found(**counts: int) -> Judgement:
        arms = {ArmName.CONTROL: arm(1000), ArmName.CANARY: arm(tpot_ms=8, **counts)}
        return judge(plan(audit_share=0.02), arms, is_out_of_time=False)

    assert found(unaudited=9).verdict is Verdict.CONTINUE
    assert standing(found(unaudited=9), "divergences") is Standing.OPEN
    assert found(audited=1).verdict is Verdict.PROMOTE


def test_failures_of_both_arms_are_nobodys() -> None:
    assert judged(arm(400, tpot_ms=8, failed=30), arm(1000, failed=75)).verdict is Verdict.PROMOTE
    fewer = judged(arm(400, tpot_ms=8), arm(1000, failed=75))
    assert fewer.verdict is Verdict.PROMOTE


def test_a_few_more_failures_than_controls_keep_it_from_being_promoted() -> None:
    found = judged(arm(400, tpot_ms=8, failed=4), arm(1000, failed=4))
    assert found.verdict is Verdict.CONTINUE
    assert standing(found, "failures") is Standing.OPEN


def looked_at(
    chance: np.random.Generator,
    num: int,
    share: float,
    effect: float,
    failure_rates: tuple[float, float],
    num_keys: int | None,
    *,
    is_keyed: bool = True,
) -> Iterator[Arms]:
    """Both arms after every so many requests; `effect` is on the canary's TPOT, failures are control's and its.

    Without `num_keys` each request has a key of its own; else each key has its own mean TPOT and TTFT, their logarithms
    normal with a deviation of 0.4, and one in fifty runs out of its time every other time. Not `is_keyed`: groups are
    drawn for requests and not for their keys.
    """
    key = np.arange(num) if num_keys is None else chance.integers(0, num_keys, num)
    is_canary = (chance.random(num) < share)[key]
    group = chance.integers(0, NUM_GROUPS, num)[key if is_keyed else slice(None)]
    failed = chance.random(num) < np.where(is_canary, failure_rates[1], failure_rates[0])
    late, nature = np.zeros(num, bool), np.ones(num)
    if num_keys is not None:
        late = (chance.random(num_keys) < 0.02)[key] & (chance.random(num) < 0.5)
        nature = chance.lognormal(0.0, 0.4, num_keys)[key]
    figures = {
        "tpot": chance.lognormal(2.0, 0.5, num) * nature * np.where(is_canary, 1 + effect, 1.0),
        "ttft": chance.lognormal(4.0, 0.8, num) * nature,
    }
    look = np.arange(num) // EVERY
    num_looks = num // EVERY
    columns: dict[ArmName, dict[str, np.ndarray]] = {}
    for name, mask in ((ArmName.CONTROL, ~is_canary), (ArmName.CANARY, is_canary)):
        good = mask & ~failed & ~late

        def counted(which: np.ndarray) -> np.ndarray:
            return np.bincount(look[which], minlength=num_looks).cumsum()

        columns[name] = {
            "finished": counted(good), "failed": counted(mask & failed), "late": counted(mask & late & ~failed)
        }  # fmt: skip
        for figure, values in figures.items():
            cells = look[good] * NUM_CLUSTERS + group[good] % NUM_CLUSTERS
            for part, weights in (("dividend", values[good]), ("divisor", None)):
                sums = np.bincount(cells, weights, num_looks * NUM_CLUSTERS).reshape(-1, NUM_CLUSTERS).cumsum(0)
                for cluster in range(NUM_CLUSTERS):
                    columns[name][f"{figure}:c:{cluster}:{part}"] = sums[:, cluster]
    firsts = [
        (
            index // EVERY,
            ArmName.CANARY if is_canary[index] else ArmName.CONTROL,
            f"{FIRST}{loss}:{group[index]}",
        )
        for loss, lost in ((Loss.FAILURES, failed), (Loss.DEPARTURES, late & ~failed))
        for index in np.flatnonzero(lost)[np.unique(group[lost], return_index=True)[1]].tolist()
    ]
    names = list(columns[ArmName.CONTROL])
    tables = {arm: np.array(list(each.values()), float).T for arm, each in columns.items()}
    for row in range(num_looks):
        yield {
            arm: ArmStatistics(
                dict(zip(names, tables[arm][row].tolist(), strict=True))
                | {name: 1.0 for at, of, name in firsts if at <= row and of is arm}
            )
            for arm in ArmName
        }


def decided(seen: Iterable[Arms], share: float, **rule: Any) -> Verdict:
    """The first verdict that ends it."""
    made = plan(share, **rule)
    verdicts = (judge(made, arms, is_out_of_time=False).verdict for arms in seen)
    return next((verdict for verdict in verdicts if verdict is not Verdict.CONTINUE), Verdict.CONTINUE)


def outcomes(
    effect: float,
    failure_rates: tuple[float, float] = (0.01, 0.01),
    share: float = 0.3,
    num: int = 4000,
    num_keys: int | None = None,
    *,
    is_keyed: bool = True,
    **rule: Any,
) -> Counter[Verdict]:
    """Counts of the verdicts on NUM_RUNS canaries, each examined after every EVERY of its `num` requests."""
    chance = np.random.default_rng(7)
    return Counter(
        decided(looked_at(chance, num, share, effect, failure_rates, num_keys, is_keyed=is_keyed), share, **rule)
        for _ in range(NUM_RUNS)
    )


AT_MOST_ALPHA = int(stats.binom.ppf(0.9999, NUM_RUNS, ALPHA))
"""The number of errors that a rule with an error rate of alpha exceeds with a probability of 0.01 %: 23 of 200."""


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_arms_that_are_the_same_are_promoted_or_given_up_as_rarely_as_the_plan_says(share: float) -> None:
    found = outcomes(0.0, share=share)
    assert found[Verdict.PROMOTE] + found[Verdict.ABORT] <= AT_MOST_ALPHA


@pytest.mark.parametrize(("num_keys", "share"), [(20, 0.3), (60, 0.3), (500, 0.3), (2000, 0.1)])
def test_so_they_are_where_the_requests_of_a_key_resemble_each_other(num_keys: int, share: float) -> None:
    found = outcomes(0.0, share=share, num=6000, num_keys=num_keys)
    assert found[Verdict.PROMOTE] + found[Verdict.ABORT] <= AT_MOST_ALPHA


def test_with_requests_taken_for_independent_that_are_not_most_decisions_would_be_wrong() -> None:
    found = outcomes(0.0, num=6000, num_keys=60, is_keyed=False)
    assert found[Verdict.PROMOTE] + found[Verdict.ABORT] > 0.5 * NUM_RUNS


def test_with_a_thousand_keys_a_fifth_fewer_milliseconds_are_mostly_found() -> None:
    found = outcomes(-0.2, num=8000, num_keys=1000, margin=0.3)
    assert found[Verdict.PROMOTE] >= 0.8 * NUM_RUNS
    assert found[Verdict.ABORT] <= AT_MOST_ALPHA


def test_an_arm_that_is_worse_by_the_margin_hardly_ever_counts_as_no_worse() -> None:
    found = outcomes(0.1, objective=Objective.NONE, margin=0.1)
    assert found[Verdict.PROMOTE] <= AT_MOST_ALPHA


def test_a_fifth_fewer_milliseconds_a_token_are_nearly_always_found() -> None:
    found = outcomes(-0.2, margin=0.2)
    assert found[Verdict.PROMOTE] >= 0.9 * NUM_RUNS
    assert found[Verdict.ABORT] <= AT_MOST_ALPHA


def test_a_tenth_more_milliseconds_a_token_nearly_always_end_it() -> None:
    found = outcomes(0.1)
    assert found[Verdict.ABORT] >= 0.9 * NUM_RUNS
    assert not found[Verdict.PROMOTE]


def test_failures_of_five_in_a_hundred_instead_of_one_nearly_always_end_it() -> None:
    found = outcomes(0.0, (0.01, 0.05))
    assert found[Verdict.ABORT] >= 0.9 * NUM_RUNS


class Looks(Trace):
    """A canary whose statistics are looked at now and then."""

    def look(self, canary: ArmStatistics, control: ArmStatistics, *, late: bool = False) -> None:
        found = judged(canary, control, late=late)
        event = f"{canary.num(Count.FINISHED)} requests, control {control.num(Count.FINISHED)}"
        details = [f"{guard.standing:<7}{guard.name:<15}{guard.text}" for guard in found.guards]
        self.add(event + (", its time is over" if late else ""), found.verdict, *details, found.reason)

    def check_as(self, name: str) -> None:
        self.check(Path(__file__).parent / "traces" / f"rule_{name}.txt")


class TestTraces:
    def test_a_faster_draft_is_promoted(self) -> None:
        run = Looks("The canary's tokens come in 8 ms instead of 10; it is promoted once there are enough.")
        for num in (100, 400):
            run.look(arm(num, tpot_ms=8), arm(2 * num))
        run.check_as("promoted")

    def test_slower_tokens_end_it(self) -> None:
        run = Looks("The canary's tokens come in 13 ms instead of 10.")
        run.look(arm(400, tpot_ms=13), arm(1000))
        run.check_as("slower")

    def test_another_output_ends_it_at_once(self) -> None:
        run = Looks("One audit found another output than without speculation.")
        run.look(arm(40, tpot_ms=8, audited=5, diverged=1), arm(100))
        run.check_as("diverged")

    def test_one_that_makes_no_difference_ends_with_its_time(self) -> None:
        run = Looks("Both arms are alike: nothing is certain, so control stays.")
        run.look(arm(400), arm(1000))
        run.look(arm(800), arm(2000), late=True)
        run.check_as("alike")
