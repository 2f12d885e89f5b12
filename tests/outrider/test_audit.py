"""Runs compared, divergences judged, exit statuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.audit import (
    EXIT_UNPROVEN,
    RULED_OUT,
    Divergence,
    HintCounts,
    Margin,
    Run,
    TokenWeights,
    Verdict,
    compare,
    exit_code,
    is_reproduced,
    judge,
    margin,
    weigh,
    worst,
)

PLAIN = Run(token_ids=(5, 6, 7, 8), finish_reason="length", content="fghi")


def said(*token_ids: int, finish_reason: str = "length", content: str = "fghi") -> Run:
    return Run(token_ids=token_ids, finish_reason=finish_reason, content=content)


@pytest.mark.parametrize(
    ("speculated", "divergence"),
    [
        (said(5, 6, 7, 8), None),
        (said(5, 6, 9, 8), Divergence(2, 7, 9)),
        (said(9, 6, 9, 8), Divergence(0, 5, 9)),
        (said(5, 6, finish_reason="stop"), Divergence(2, 7, None)),
        (said(5, 6, 7, 8, 9), Divergence(4, None, 9)),
        (said(5, 6, 7, 8, finish_reason="stop"), Divergence(4, None, None)),
        (said(5, 6, 7, 8, content="fgh"), Divergence(4, None, None)),
    ],
)
def test_the_first_difference_counts(speculated: Run, divergence: Divergence | None) -> None:
    assert compare(PLAIN, speculated) == divergence


@pytest.mark.parametrize(
    ("replays", "verdict"),
    [
        ([said(5, 6, 7)], Verdict.DIVERGED),
        ([said(5, 6, 7), said(5, 6, 7, 1)], Verdict.DIVERGED),
        ([said(5, 6, 9)], Verdict.UNSTABLE),
        ([said(5, 6)], Verdict.UNSTABLE),
        ([said(5, 1, 7)], Verdict.UNSTABLE),
        ([said(5, 6, 7), said(5, 6, 9)], Verdict.UNSTABLE),
    ],
)
def test_plain_decoding_must_repeat_itself_before_speculation_is_blamed(
    replays: Sequence[Run], verdict: Verdict
) -> None:
    assert judge(PLAIN, Divergence(2, 7, 9), replays) is verdict


def test_no_divergence_needs_no_replay() -> None:
    assert judge(PLAIN, None, []) is Verdict.IDENTICAL


def test_an_end_is_reproduced_by_the_same_end() -> None:
    divergence = Divergence(4, None, 9)
    assert is_reproduced(PLAIN, divergence, said(5, 6, 7, 8))
    assert not is_reproduced(PLAIN, divergence, said(5, 6, 7, 8, 9))
    assert not is_reproduced(PLAIN, divergence, said(5, 6, 7, 8, finish_reason="stop"))


def test_the_margin_is_between_the_two_tokens() -> None:
    found = margin(Divergence(2, 7, 9), TokenWeights(7, {7: -0.5, 9: -2.0, 1: -3.0}))
    assert found is not None
    assert (found.plain_logprob, found.speculated_logprob, found.is_bound) == (-0.5, -2.0, False)
    assert found.nats == 1.5


def test_an_unlisted_token_bounds_the_margin() -> None:
    found = margin(Divergence(2, 7, 9), TokenWeights(7, {7: -0.5, 1: -3.0}))
    assert found is not None
    assert found.is_bound
    assert found.nats == 2.5


def test_the_margin_counts_from_what_plain_decoding_said_at_first() -> None:
    # The replay said 1 itself; the question stays how far 9 is from 7.
    found = margin(Divergence(2, 7, 9), TokenWeights(1, {1: -0.5, 7: -0.6, 9: -0.7}))
    assert found is not None
    assert found.nats == pytest.approx(0.1)


def test_where_the_plain_run_ended_the_token_that_ended_it_counts() -> None:
    found = margin(Divergence(4, None, 9), TokenWeights(0, {0: -0.25, 9: -2.25}))
    assert found is not None
    assert found.nats == 2.0


@pytest.mark.parametrize(
    ("divergence", "weights"),
    [
        (Divergence(2, 7, None), TokenWeights(7, {7: -0.5})),
        (Divergence(2, 7, 9), None),
        (Divergence(2, 7, 9), TokenWeights(1, {1: -0.5})),
    ],
)
def test_what_the_server_does_not_show_has_no_margin(divergence: Divergence, weights: TokenWeights | None) -> None:
    assert margin(divergence, weights) is None


@pytest.mark.parametrize("listed", [{9: RULED_OUT}, {3: RULED_OUT}])
def test_a_token_that_the_parameters_forbid_is_ruled_out(listed: dict[int, float]) -> None:
    found = margin(Divergence(2, 7, 9), TokenWeights(7, {7: -0.5, **listed}))
    assert found is not None
    assert found.is_ruled_out


def test_ranking_leaves_out_what_cannot_be_said() -> None:
    assert TokenWeights(7, {7: -0.5, 2: RULED_OUT, 3: -0.1}).ranked == [(3, -0.1), (7, -0.5)]


def test_distributions_belong_to_the_last_tokens() -> None:
    weights = TokenWeights(8, {8: -0.1})
    run = Run(token_ids=(5, 6, 7, 8), weights=(weights,))
    assert run.weights_at(3) is weights
    assert run.weights_at(2) is None
    assert run.weights_at(4) is None
    assert (run.token_at(3), run.token_at(4)) == (8, None)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 0),
        ([Verdict.IDENTICAL], 0),
        ([Verdict.IDENTICAL, Verdict.FAILED], 2),
        ([Verdict.FAILED, Verdict.UNSTABLE], 3),
        ([Verdict.UNSTABLE, Verdict.FAILED, Verdict.DIVERGED, Verdict.IDENTICAL], 1),
    ],
)
def test_the_worst_verdict_decides_the_exit_status(verdicts: list[Verdict], code: int) -> None:
    assert exit_code(verdicts) == code


def test_unproven_speculation_counts_only_where_nothing_is_worse() -> None:
    assert exit_code([Verdict.IDENTICAL], is_unproven=True) == EXIT_UNPROVEN == 4
    assert exit_code([Verdict.FAILED], is_unproven=True) == 2
    assert worst([]) is Verdict.IDENTICAL


def test_hint_counts_add_up() -> None:
    total = HintCounts.total(
        [
            HintCounts(num_draft_tokens=10, num_accepted_draft_tokens=4, num_spec_steps=2),
            HintCounts(num_draft_tokens=6, num_accepted_draft_tokens=4, num_spec_steps=2),
        ]
    )
    assert total.draft_acceptance_rate == 0.5
    assert total.mean_acceptance_length == 3.0
    assert HintCounts().draft_acceptance_rate is HintCounts().mean_acceptance_length is None


class TestWeighing:
    """An engine that promises the distribution alone may differ where two tokens are nearly equally likely."""

    @pytest.mark.parametrize(
        ("plain_logprob", "speculated_logprob", "verdict"),
        [
            (-1.0, -1.01, Verdict.INEXACT),
            (-1.0, -3.0, Verdict.DIVERGED),
            (-1.0, RULED_OUT, Verdict.DIVERGED),
        ],
    )
    def test_a_difference_counts_by_its_margin(
        self, plain_logprob: float, speculated_logprob: float, verdict: Verdict
    ) -> None:
        found = Margin(plain_logprob, speculated_logprob, is_bound=False)
        promised = Run(token_ids=(1,), exactness="distribution")
        assert weigh(Verdict.DIVERGED, promised, found) is verdict
        assert weigh(Verdict.DIVERGED, Run(token_ids=(1,)), found) is Verdict.DIVERGED

    def test_one_that_cannot_be_weighed_is_no_fault(self) -> None:
        assert weigh(Verdict.UNSTABLE, Run(token_ids=(1,), exactness="distribution"), None) is Verdict.INEXACT
        assert exit_code([Verdict.INEXACT, Verdict.IDENTICAL]) == 0

    def test_what_speculation_changed_is_not_excused_for_want_of_a_margin(self) -> None:
        assert weigh(Verdict.DIVERGED, Run(token_ids=(1,), exactness="distribution"), None) is Verdict.DIVERGED

    def test_inexact_is_worse_than_identical(self) -> None:
        assert worst([Verdict.IDENTICAL, Verdict.INEXACT]) is Verdict.INEXACT
