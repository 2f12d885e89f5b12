"""The exactness tests fail when exactness is broken: each rule that they guard is broken in turn.

Through the whole cores, with a real draft model; `tests/engine/test_verification.py` does the same for the rules by
themselves. A mutation counts as caught when its p-value lies below what the family of exactness tests is held to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draft_worker import runner as draft_runner
from outrider.engine.sampling import randomness, rejection, sampling, verification
from outrider.hints.hint_tree import DraftDistribution
from target_worker import runner as target_runner
from target_worker.hints.hint_path import HintPath, choose_path
from target_worker.scheduling import session as target_session
from tests.exactness.cases import LARGE_PROMPTS, small_params
from tests.exactness.drafts import make_draft
from tests.exactness.in_process import SMALL, Manner
from tests.exactness.test_every_parameter import (
    FAMILY_ERROR_RATE,
    FAMILY_SIZE,
    MOST_STATISTICS,
    check_same,
    draw,
    expected_distribution,
    expected_outputs,
    p_values,
    run_texts,
)

NUM_SESSIONS = (400, 2000)
"""As many as a case has in the default run; more where these do not show it."""
CAUGHT = FAMILY_ERROR_RATE / (FAMILY_SIZE * MOST_STATISTICS) / len(NUM_SESSIONS)
Mutation = Callable[[pytest.MonkeyPatch], None]


def accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection.likelihood_ratio
    monkeypatch.setattr(rejection, "likelihood_ratio", lambda p, q, token: 1.5 * right(p, q, token))


def recovers_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the residual."""
    monkeypatch.setattr(verification, "residuals", lambda rows, *_: rows)


def one_key_for_all_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting and recovering share a number."""
    right = randomness.uniform
    monkeypatch.setattr(rejection, "uniform", lambda seed, *_: right(seed, 1, randomness.Purpose.ACCEPT))


def draws_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft samples every hint with one number."""
    right = sampling.sample_draft
    monkeypatch.setattr(draft_runner, "sample_draft", lambda distribution, seed, _: right(distribution, seed, 0))


def truncates_after_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft samples from everything and sends the likeliest token beside what it sampled (I5)."""
    right = draft_runner._sampled

    def sampled(distribution: DraftDistribution, token_id: int, *others: Any) -> Any:
        pairs = list(zip(distribution.token_ids, distribution.weights, strict=True))
        kept = [pair for index, pair in enumerate(pairs) if index == 0 or pair[0] == token_id]
        sent = DraftDistribution(tuple(t for t, _ in kept), tuple(w for _, w in kept))
        return right(sent, token_id, *others)

    monkeypatch.setattr(draft_runner, "_sampled", sampled)


def stops_at_unlikely_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is verified depends on the hinted token's own probability (I4): (0.7, 0.3) becomes (0.85, 0.15)."""

    def peeking(*arguments: Any) -> HintPath:
        path = choose_path(*arguments)
        for index, hint in enumerate(path.hints):
            given = hint.distribution
            if given and given.weights[given.token_ids.index(hint.token_id)] < 0.5 * given.total:
                return replace(path, hints=path.hints[:index], num_feedable=min(index, path.num_feedable))
        return path

    monkeypatch.setattr(target_session, "choose_path", peeking)


MUTATIONS: list[Mutation] = [
    accepts_too_much,
    recovers_from_p,
    one_key_for_all_decisions,
    draws_come_back,
    truncates_after_sampling,
    stops_at_unlikely_hints,
]


def least_p_value(rule: str, num_sessions: int) -> float:
    params = small_params("temperature-0.5")
    drawn = draw(params, lambda batch: make_draft("good", SMALL, batch), rule, num_sessions, 7, on_time=1.0)
    assert drawn.verified > num_sessions / 4
    return min(p_values(drawn.counts, expected_distribution(params), params.max_tokens))


@pytest.mark.parametrize("rule", ["block", pytest.param("token", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_sampled_text_shows_that_a_rule_is_broken(mutate: Mutation, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    assert any(least_p_value(rule, num_sessions) < CAUGHT for num_sessions in NUM_SESSIONS)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_sampled_text_of_the_rules_as_they_are_shows_nothing(rule: str) -> None:
    assert all(least_p_value(rule, num_sessions) > CAUGHT for num_sessions in NUM_SESSIONS)


@pytest.mark.parametrize("forgotten", ["seed", "position", "purpose"])
def test_coupled_text_shows_that_the_noise_has_another_key(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers share the mistake, so that hints are accepted as ever; the reference does not."""
    right = randomness.key

    def wrong(seed: int, position: int, purpose: Any) -> int:
        given = {"seed": seed, "position": position, "purpose": purpose} | {forgotten: 0}
        return right(given["seed"], given["position"], given["purpose"])

    monkeypatch.setattr(sampling, "key", wrong)
    results = run_texts("none", "coupled", "self", Manner(on_time=1.0, has_branches=False))
    verified = sum(result.hint_counts()[0] for result in results)
    assert sum(result.hint_counts()[1] for result in results) > 0.9 * verified > 0
    for result, expected in zip(results, expected_outputs("none", "coupled") * 2, strict=True):
        with pytest.raises(AssertionError, match="the reference says"):
            check_same(result, expected)
    assert len(results) == 2 * len(LARGE_PROMPTS)


def test_text_shows_that_the_kv_of_accepted_branches_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_runner, "_move_entries", lambda *_: None)
    results = run_texts("none", "greedy", "good", Manner(on_time=1.0))
    expected = expected_outputs("none", "greedy") * 2
    assert any(result.token_ids != each.token_ids for result, each in zip(results, expected, strict=True))
