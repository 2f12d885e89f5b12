"""The controller that decides per request whether speculation pays."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.speculation.fallback import (
    _TRANSITIONS,
    ALWAYS,
    FallbackAction,
    FallbackController,
    FallbackPolicy,
    FallbackState,
    IllegalTransition,
    Trigger,
)
from coordinator.speculation.priors import NOTHING, StartingMode

POLICY = FallbackPolicy()
GIVE_UP = (FallbackAction.DETACH, FallbackAction.STOP_ACCEPTING_HINTS)
RESUME = (FallbackAction.START_ACCEPTING_HINTS, FallbackAction.ATTACH)


def controller(*, is_enabled: bool = True) -> FallbackController:
    made = FallbackController(POLICY, is_enabled=is_enabled)
    made.start()
    return made


def paused() -> FallbackController:
    made = controller()
    for _ in range(POLICY.judge_after_spec_steps):
        made.on_step(1, 5, 0)
    assert made.state is FallbackState.PAUSED
    return made


def steps_until(made: FallbackController, state: FallbackState, step: tuple[int, int, int]) -> int:
    for count in itertools.count(1):
        made.on_step(*step)
        if made.state is state:
            return count
        assert count < 10_000, f"never reached {state}"
    raise AssertionError


def test_a_request_begins_by_attaching() -> None:
    assert FallbackController(POLICY, is_enabled=True).start() == (FallbackAction.ATTACH,)


def test_a_request_without_speculation_never_acts() -> None:
    made = FallbackController(POLICY, is_enabled=False)
    assert made.start() == ()
    assert not made.accepts_hints
    assert all(made.on_step(1, 5, 0) == () for _ in range(1000))
    assert made.state is FallbackState.DISABLED


def test_low_acceptance_pauses_after_eight_steps_and_frees_the_draft() -> None:
    made = controller()
    actions = [made.on_step(1, 5, 0) for _ in range(8)]
    assert actions == [()] * 7 + [GIVE_UP]
    assert made.state is FallbackState.PAUSED
    assert not made.accepts_hints


def test_a_draft_that_is_right_every_other_time_is_kept_whatever_the_block_length() -> None:
    made = controller()
    for step in range(500):
        # Blocks of six at one in two: on average one accepted, 0.16 of the verified hints, but 0.5 of the decided.
        made.on_step(2, 6, (0, 1, 0, 3, 1, 1)[step % 6])
    assert made.state is FallbackState.SPECULATING
    assert made._blocks.rate == pytest.approx(0.5, abs=0.1)


def test_branches_are_no_decided_hints_but_what_they_bring_counts() -> None:
    path_alone, with_branches = controller(), controller()
    for step in range(100):
        is_right, is_branch_right = step % 2, step % 10 == 0
        path_alone.on_step(1 + is_right, 1, is_right)
        with_branches.on_step(1 + is_right + is_branch_right, 3, is_right + is_branch_right, 2, int(is_branch_right))
    assert with_branches.evidence == path_alone.evidence
    assert with_branches.extra_tokens == pytest.approx(path_alone.extra_tokens + 0.1, abs=0.05)


def test_a_step_that_verified_branches_alone_had_hints() -> None:
    made = controller()
    for _ in range(2 * POLICY.starved_after_steps):
        made.on_step(2, 2, 1, 2, 1)
    assert made.state is FallbackState.SPECULATING
    assert made.extra_tokens == pytest.approx(1.0)


def test_a_draft_that_turns_bad_is_noticed_within_a_few_steps() -> None:
    made = controller()
    for _ in range(200):
        made.on_step(6, 5, 5)
    assert steps_until(made, FallbackState.PAUSED, (1, 5, 0)) <= 60


def test_steps_without_hints_do_not_count_as_rejections() -> None:
    made = controller()
    for _ in range(POLICY.starved_after_steps - 1):
        assert made.on_step(1, 0, 0) == ()
    assert made.on_step(1, 0, 0) == GIVE_UP, "but a draft that never delivers is let go"


def test_a_pause_ends_with_a_probe() -> None:
    made = paused()
    assert [made.on_step(1, 0, 0) for _ in range(POLICY.pause_min_tokens)][-1] == RESUME
    assert made.state is FallbackState.PROBING
    assert made.accepts_hints


def test_a_probe_that_pays_resumes() -> None:
    made = paused()
    steps_until(made, FallbackState.PROBING, (1, 0, 0))
    assert steps_until(made, FallbackState.SPECULATING, (4, 5, 3)) == POLICY.probe_spec_steps


def test_between_the_thresholds_a_paused_request_stays_paused_and_a_speculating_one_goes_on() -> None:
    quarter = ((1, 4, 0), (2, 4, 1), (1, 4, 0))  # one accepted of four decided
    speculating, probing = controller(), paused()
    steps_until(probing, FallbackState.PROBING, (1, 0, 0))
    for _ in range(10):
        for step in quarter:
            speculating.on_step(*step)
    for step in quarter * 3:
        if probing.state is FallbackState.PROBING:
            probing.on_step(*step)
    assert speculating.state is FallbackState.SPECULATING
    assert probing.state is FallbackState.PAUSED


def test_each_failed_probe_doubles_the_pause_up_to_a_bound_and_a_good_one_resets_it() -> None:
    made = paused()
    pauses = []
    for _ in range(5):
        pauses.append(steps_until(made, FallbackState.PROBING, (1, 0, 0)))
        steps_until(made, FallbackState.PAUSED, (1, 5, 0))
    assert pauses == [64, 128, 256, 512, 512]
    steps_until(made, FallbackState.PROBING, (1, 0, 0))
    steps_until(made, FallbackState.SPECULATING, (6, 5, 5))
    steps_until(made, FallbackState.PAUSED, (1, 5, 0))
    assert steps_until(made, FallbackState.PROBING, (1, 0, 0)) == 64


def test_no_draft_pauses_without_a_word_to_the_target_and_is_tried_again() -> None:
    made = controller()
    assert made.on_no_draft() == ()
    assert made.state is FallbackState.PAUSED
    assert steps_until(made, FallbackState.PROBING, (1, 0, 0)) == 64


@pytest.mark.parametrize(
    ("mode", "state", "actions"),
    [
        (StartingMode.SPECULATING, FallbackState.SPECULATING, (FallbackAction.ATTACH,)),
        (StartingMode.PROBING, FallbackState.PROBING, (FallbackAction.ATTACH,)),
        (StartingMode.PAUSED, FallbackState.PAUSED, ()),
    ],
)
def test_a_request_starts_as_it_is_told(
    mode: StartingMode, state: FallbackState, actions: tuple[FallbackAction, ...]
) -> None:
    made = FallbackController(POLICY, is_enabled=True, starting_mode=mode)
    assert (made.state, made.start()) == (state, actions)
    assert FallbackController(POLICY, is_enabled=False, starting_mode=mode).state is FallbackState.DISABLED


def test_a_request_that_starts_paused_probes_after_the_shortest_pause() -> None:
    made = FallbackController(POLICY, is_enabled=True, starting_mode=StartingMode.PAUSED)
    made.start()
    assert steps_until(made, FallbackState.PROBING, (1, 0, 0)) == POLICY.pause_min_tokens


def test_the_bounds_are_those_of_a_flat_rate() -> None:
    for rate, policy_tokens in (
        (POLICY.pause_below, POLICY.pause_tokens),
        (POLICY.resume_above, POLICY.resume_tokens),
    ):
        assert policy_tokens == pytest.approx(rate / (1 - rate), rel=1e-3)


def probed(pause_gap_s: float, probe_gap_s: float) -> FallbackController:
    """A request that speaks plainly, then probes a draft of which three hints of five hold."""
    made = FallbackController(POLICY, is_enabled=True, starting_mode=StartingMode.PAUSED)
    made.start()
    while made.state is FallbackState.PAUSED:
        made.on_step(1, 0, 0, gap_s=pause_gap_s)
    for _ in range(POLICY.probe_spec_steps):
        made.on_step(4, 5, 3, gap_s=probe_gap_s)
    return made


def test_a_probe_whose_tokens_come_more_slowly_has_failed_whatever_holds() -> None:
    assert probed(0.010, 0.030).last_trigger is Trigger.HIGH_ACCEPTANCE
    slower = probed(0.010, 0.050)
    assert (slower.state, slower.last_trigger) == (FallbackState.PAUSED, Trigger.SLOWER)
    assert (slower.evidence.num_judged, slower.evidence.num_paused) == (1, 1)


def test_uneven_gaps_rarely_fail_a_probe_that_pays() -> None:
    """Gaps vary by half of their mean, and tokens come 1.5 times as fast: fewer than one probe in fifty may fail.

    Simulated it is below one in a hundred, so that 2000 probes stay below one in fifty but for a chance of 1e-4.
    """
    chance, num_failed = random.Random(3), 0
    for _ in range(2000):
        made = FallbackController(POLICY, is_enabled=True, starting_mode=StartingMode.PAUSED)
        made.start()
        while made.last_trigger in (None, Trigger.PAUSE_OVER):
            is_paused = made.state is FallbackState.PAUSED
            gap_s = chance.gammavariate(4, 0.0025) * (1.0 if is_paused else 4 / 1.5)
            made.on_step(1 if is_paused else 4, 0 if is_paused else 5, 0 if is_paused else 3, gap_s=gap_s)
        num_failed += made.last_trigger is Trigger.SLOWER
    assert num_failed < 2000 / 50


def test_steps_of_a_target_that_rests_are_not_counted() -> None:
    made = controller()
    for _ in range(10 * POLICY.starved_after_steps):
        assert made.on_step(1, 0, 0, is_paused=True) == ()
    assert made.state is FallbackState.SPECULATING
    for _ in range(POLICY.starved_after_steps - 1):
        assert made.on_step(1, 0, 0) == ()
    assert made.on_step(1, 0, 0) == GIVE_UP


def test_a_probe_waits_for_a_target_that_rests() -> None:
    made = paused()
    steps_until(made, FallbackState.PROBING, (1, 0, 0))
    for _ in range(5 * POLICY.starved_after_steps):
        assert made.on_step(1, 0, 0, is_paused=True) == ()
    assert steps_until(made, FallbackState.SPECULATING, (4, 5, 3)) == POLICY.probe_spec_steps


def test_what_a_request_teaches_is_its_first_verdict() -> None:
    assert controller().evidence == NOTHING
    bad = paused()
    assert (bad.evidence.num_judged, bad.evidence.num_paused, bad.evidence.num_steps) == (1, 1, 8)
    steps_until(bad, FallbackState.PROBING, (1, 0, 0))
    steps_until(bad, FallbackState.SPECULATING, (4, 5, 3))
    assert (bad.evidence.num_judged, bad.evidence.num_paused) == (1, 1)
    assert bad.evidence.num_accepted == 3 * POLICY.probe_spec_steps

    good = controller()
    for _ in range(POLICY.judge_after_spec_steps - 1):
        good.on_step(4, 5, 3)
    assert good.evidence.num_judged == 0, "too short to tell"
    good.on_step(4, 5, 3)
    assert (good.evidence.num_judged, good.evidence.num_paused) == (1, 0)
    for _ in range(POLICY.kept_after_spec_steps):
        good.on_step(4, 5, 3)
    steps_until(good, FallbackState.PAUSED, (1, 5, 0))
    assert (good.evidence.num_judged, good.evidence.num_paused) == (1, 0), "it was worth it for long enough"


def test_want_of_a_draft_worker_teaches_nothing() -> None:
    starved, alone = controller(), controller()
    steps_until(starved, FallbackState.PAUSED, (1, 0, 0))
    alone.on_no_draft()
    assert starved.evidence == alone.evidence == NOTHING


@pytest.mark.parametrize("state", list(FallbackState))
@pytest.mark.parametrize("trigger", list(Trigger))
def test_the_table_is_all_there_is(state: FallbackState, trigger: Trigger) -> None:
    made = controller()
    made.state = state
    if (state, trigger) in _TRANSITIONS:
        assert made.handle(trigger) == _TRANSITIONS[state, trigger][1]
        assert made.state is _TRANSITIONS[state, trigger][0]
    else:
        with pytest.raises(IllegalTransition):
            made.handle(trigger)
        assert made.state is state


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=400))
def test_attach_and_detach_always_alternate(blocks: list[tuple[int, int]]) -> None:
    made = FallbackController(POLICY, is_enabled=True)
    is_attached = FallbackAction.ATTACH in made.start()
    for num_draft_tokens, accepted in blocks:
        num_accepted = min(accepted, num_draft_tokens)
        for action in made.on_step(num_accepted + 1, num_draft_tokens, num_accepted):
            if action is FallbackAction.ATTACH:
                assert not is_attached
                is_attached = True
            elif action is FallbackAction.DETACH:
                assert is_attached
                is_attached = False
        assert is_attached == made.accepts_hints
        assert 0 <= made._blocks.rate <= 1


def test_a_request_that_speculates_always_is_paused_only_for_want_of_hints() -> None:
    made = FallbackController(ALWAYS, is_enabled=True)
    for _ in range(500):
        assert made.on_step(1, 5, 0, gap_s=0.1) == ()
    steps_until(made, FallbackState.PAUSED, (1, 0, 0))
    assert made.last_trigger is Trigger.STARVED
    steps_until(made, FallbackState.PROBING, (1, 0, 0))
    for _ in range(ALWAYS.probe_spec_steps):
        made.on_step(1, 5, 0, gap_s=0.1)
    assert made.state is FallbackState.SPECULATING, "slower, and nothing held"


def test_a_policy_that_would_swing_is_refused() -> None:
    with pytest.raises(ValueError, match="pause_below"):
        FallbackPolicy(pause_below=0.4, resume_above=0.3)
