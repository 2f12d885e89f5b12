"""I4: under rejection sampling nothing that a draft drew, and that is not judged yet, has a say in what is verified.

Beside a draft worker, every other source of hints may take a path's place or continue it, and a step decides how many
hints it feeds. Whatever looks at a drawn value for that, or at what follows from it, makes some outputs likelier: a
path that is short because it ends with a drawn stop token, for one. The joint distribution of whole outputs shows it.
All tests of this file together fail by chance once in 10,000 runs; they are seeded, so what passed passes again.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.hints.hint_tree import ROOT_ID, Hint
from outrider.sampling_params import AcceptanceRule
from target_worker.hints.hint_path import HintSources
from target_worker.messages import HintsArrived, SessionEnded, Step, TokensCommitted
from tests.exactness.table_target import SOURCES, VOCAB_SIZE, Case, Sessions, given, joint
from tests.exactness.test_every_parameter import FAMILY_ERROR_RATE, chi_square_p, luck_of

FEATURES = ("none", "stop-token", "min-tokens", "grammar", "no-branches", "objective")
CASES = [
    Case(source, feature, rule, is_perfect)
    for source in SOURCES
    for feature in FEATURES
    for rule, is_perfect in ((AcceptanceRule.BLOCK, True), (AcceptanceRule.TOKEN, False))
    if not (source == "prediction" and feature == "grammar")  # what is given does not begin an output of the grammar
]
LEAST_P = FAMILY_ERROR_RATE / len(CASES)
NUM_SESSIONS = 1200


def outputs_of(case: Case, num_sessions: int = NUM_SESSIONS) -> tuple[float, collections.Counter[str]]:
    """The p-value of the outputs, and how many hints were verified by whose they were."""
    sessions = Sessions(case, luck_of(case))
    counts = sessions.run(num_sessions)
    assert counts.total() == num_sessions
    return chi_square_p(counts, joint(case)), sessions.num_verified


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.source}-{case.feature}-{case.rule.name.lower()}",
            marks=() if case.is_perfect else pytest.mark.thorough,
        )
        for case in CASES
    ],
)
def test_outputs_have_the_targets_joint_distribution(case: Case) -> None:
    p_value, num_verified = outputs_of(case)
    assert num_verified["draft"] > NUM_SESSIONS / 4, "hints were hardly used, so this shows nothing"
    if case.source != "none":
        assert num_verified["local"] > NUM_SESSIONS / 50, "the other source was hardly used"
    assert p_value > LEAST_P


NUM_NEIGHBOURS = 2
CHAIN_LEN = 5
Choice = tuple[object, ...]


def choices_of(case: Case, luck: int, values: Sequence[int], place: int) -> tuple[list[Choice], list[Choice]]:
    """Returns what a step chooses where a draft drew `values`: whose hint is verified at each position of that sequence
    up to `place`, and everything about its neighbours, whose own hints follow from `luck`."""
    sessions = Sessions(case, luck, at_once=1 + NUM_NEIGHBOURS, max_tokens=CHAIN_LEN + 2)
    # At times rows do not pay, and at times they just do.
    sessions.scheduler.cost.token_ms = random.Random(luck).uniform(0.4, 60.0)  # type: ignore[attr-defined]
    names = [f"s{index}" for index in range(1 + NUM_NEIGHBOURS)]
    for name in names:
        sessions.start(name)
    prefill = sessions.scheduler.next_step(sessions.now)
    assert isinstance(prefill, Step)
    # A step in which the prompt's last token is decided feeds no hints: the next one does.
    texts = {name: given() for name in names}
    for action in sessions.finish(prefill):
        if isinstance(action, TokensCommitted):
            texts[action.session_id] += action.token_ids
        elif isinstance(action, SessionEnded):
            del texts[action.session_id]
    if names[0] not in texts:
        return [], []
    for name in [each for each in names[1:] if each in texts]:
        sessions.hint(name, texts[name])
    if "memory" in case.source:
        sessions.hint_from_memory(names[0], texts[names[0]])
    drawn = [Hint(index + 1, index or ROOT_ID, token_id) for index, token_id in enumerate(values)]
    told = HintsArrived(names[0], 1, len(texts[names[0]]), drawn, sessions.now)
    sessions.scheduler.handle(told, sessions.now)
    step = sessions.scheduler.next_step(sessions.now)
    assert isinstance(step, Step)
    own: list[Choice] = []
    others: list[Choice] = []
    for item in step.items:
        if item.session_id == names[0]:
            verified = item.hints[: item.num_decided]
            own += [(hint.node_id if hint.node_id < 0 else "draft",) for hint in verified[: place + 1]]
        else:
            others.append((item.session_id, item.num_decided, tuple(item.hints)))
    return own, others


def first_difference(case: Case, luck: int) -> str | None:
    """Draws a chain twice, with the same values before some place, and compares what a step chooses."""
    rng = random.Random(luck)
    place = rng.randrange(CHAIN_LEN - 1)
    common = [rng.choice([0, 1, 2, 4]) for _ in range(place)]

    def chain() -> list[int]:
        values = [*common, *(rng.randrange(VOCAB_SIZE) for _ in range(CHAIN_LEN - place))]
        end = next((index for index, token_id in enumerate(values) if token_id in case.ends), CHAIN_LEN)
        return values[: end + 1]  # nothing is drafted behind a token that ends the output

    one, other = chain(), chain()
    chosen, otherwise = choices_of(case, luck, one, place), choices_of(case, luck, other, place)
    return None if chosen == otherwise else f"{one} and {other} at {place}: {chosen} and {otherwise}"


BLIND_CASES = [case for case in CASES if case.is_perfect and not case.has_grammar]
NUM_DRAWS = 60


@pytest.mark.parametrize("case", BLIND_CASES, ids=lambda case: f"{case.source}-{case.feature}")
def test_a_choice_does_not_see_what_was_drawn(case: Case) -> None:
    """Neither at the position of a value nor before it, nor for other sequences of the step."""
    for luck in range(NUM_DRAWS):
        assert (difference := first_difference(case, luck)) is None, difference


def sees_how_many_there_are(self: HintSources, hints: Sequence[Hint], max_len: int) -> Sequence[float]:
    return self.acceptance[: len(hints)]


def counts_on_those_that_are_there(right: Callable[..., Sequence[float]]) -> Callable[..., Sequence[float]]:
    def chances(self: HintSources, hints: Sequence[Hint], local: Any, num_feedable: int, max_fed: int) -> Any:
        return right(self, hints, local, num_feedable, max_fed)[:num_feedable]

    return chances


@pytest.mark.parametrize("mutation", ["promise", "chances"])
def test_a_choice_that_saw_it_would_be_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutated = sees_how_many_there_are if mutation == "promise" else counts_on_those_that_are_there(HintSources.chances)
    monkeypatch.setattr(HintSources, mutation, mutated)
    assert any(first_difference(case, luck) for case in BLIND_CASES for luck in range(NUM_DRAWS))


def test_outputs_would_show_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """How it was before: a path was taken for what it had, and a stop token came less than half as often."""
    monkeypatch.setattr(HintSources, "promise", sees_how_many_there_are)
    assert outputs_of(Case("lookup"), 2 * NUM_SESSIONS)[0] < LEAST_P
