"""Hints from a client's prediction: found again after every edit, within bounds, worthless ones soon free (I4, I7)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.hints.hint_tree import Hint, HintTree
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.admission import check_request
from target_worker.hints.hint_path import HintSources, choose_path
from target_worker.hints.local_source import MAX_READ, NO_PROPOSAL, HintKind, LocalSource, Proposal
from target_worker.hints.prediction import (
    MAX_EVIDENCE,
    MAX_SEARCHES,
    MIN_EVIDENCE,
    PART_LEN,
    PredictionHints,
)
from target_worker.limits import SchedulerLimits
from target_worker.messages import SessionRefused, StartSession
from tests.target_worker.test_lookup_hints import PROMPT, VOCAB_SIZE, World, expected

PROMPT_LEN = 3
TOKENS = st.integers(0, 3)
TEXTS = st.lists(TOKENS, max_size=60)


def following(predicted: Sequence[int], output: Sequence[int]) -> PredictionHints:
    """Hints after an output, all of which was read."""
    hints = PredictionHints(predicted, PROMPT_LEN)
    while not hints.read([9] * PROMPT_LEN + list(output)):
        pass
    return hints


def proposed(predicted: Sequence[int], output: Sequence[int], max_len: int = 8) -> list[int]:
    return following(predicted, output).propose([9] * PROMPT_LEN + list(output), [], max_len).token_ids


def num_steps(predicted: Sequence[int], truth: Sequence[int], num_hints: int = 8) -> tuple[int, int]:
    """Steps for an output, and hints fed in vain, if a step verifies every hint worth more than 10 % of a token."""
    hints = PredictionHints(predicted, 0)
    committed: list[int] = []
    steps = wasted = 0
    while len(committed) < len(truth):
        proposal = hints.propose(committed, [], num_hints)
        gain, num_fed = 1.0, 0
        for chance in hints.chances(proposal):
            gain *= chance
            if gain < 0.1:
                break
            num_fed += 1
        rest = truth[len(committed) :]
        num_matched = next((i for i in range(num_fed) if i >= len(rest) or rest[i] != proposal.token_ids[i]), num_fed)
        hints.observe(proposal, num_matched, num_fed)
        committed += rest[: num_matched + 1]
        steps, wasted = steps + 1, wasted + num_fed - num_matched
    return steps, wasted


FILE = list(range(100, 300))
"""A predicted text in which every token occurs once."""


class TestAlignment:
    def test_the_prediction_is_proposed_from_its_beginning(self) -> None:
        assert proposed(FILE, []) == FILE[:8]

    def test_it_is_followed_while_it_comes_true(self) -> None:
        assert proposed(FILE, FILE[:50]) == FILE[50:58]

    def test_nothing_is_proposed_where_the_output_has_left_it(self) -> None:
        assert proposed(FILE, [*FILE[:50], 7]) == []

    @pytest.mark.parametrize("inserted", [[7], [7, 8, 9], [7] * 40])
    def test_after_an_insertion_it_goes_on_where_it_stopped(self, inserted: list[int]) -> None:
        output = [*FILE[:50], *inserted, *FILE[50:52]]
        assert proposed(FILE, output) == FILE[52:60]

    @pytest.mark.parametrize("num_deleted", [1, 5, 100])
    def test_after_a_deletion_it_goes_on_behind_it(self, num_deleted: int) -> None:
        rest = FILE[50 + num_deleted :]
        assert proposed(FILE, [*FILE[:50], *rest[:2]]) == rest[2:10]

    def test_after_a_replacement_it_goes_on_behind_it(self) -> None:
        assert proposed(FILE, [*FILE[:50], 7, 8, 9, *FILE[53:55]]) == FILE[55:63]

    def test_a_block_that_moved_is_found_behind(self) -> None:
        assert proposed(FILE, [*FILE[:10], *FILE[100:120], *FILE[10:12]]) == FILE[12:20]

    def test_a_first_token_that_is_cut_differently_costs_only_itself(self) -> None:
        assert proposed(FILE, [7, 8, *FILE[1:3]]) == FILE[3:11]

    def test_the_nearest_position_wins_among_equals(self) -> None:
        predicted = [1, 2, 3, 50, 4, 5, 60, 4, 5, 70, 4, 5, 80]
        assert proposed(predicted, [1, 2, 3, 9, 9, 4, 5]) == predicted[6:]

    def test_the_longest_match_wins_over_a_nearer_one(self) -> None:
        predicted = [1, 2, 3, 50, 4, 5, 60, 6, 4, 5, 70]
        assert proposed(predicted, [1, 2, 3, 9, 6, 4, 5]) == [70]

    def test_hints_before_it_count_as_output_and_change_nothing(self) -> None:
        committed = [9] * PROMPT_LEN + FILE[:50]
        hints = following(FILE, FILE[:50])
        assert hints.propose(committed, FILE[50:53], 4).token_ids == FILE[53:57]
        assert hints.propose(committed, [7], 4) == NO_PROPOSAL
        assert hints.propose(committed, [7, *FILE[50:52]], 4).token_ids == FILE[52:56]
        assert hints.propose(committed, [], 4).token_ids == FILE[50:54]

    def test_an_end_proposes_nothing(self) -> None:
        assert proposed(FILE, FILE) == []
        assert proposed([], FILE) == []

    @given(TEXTS, st.data())
    def test_after_agreeing_tokens_the_rest_is_proposed(self, predicted: list[int], data: st.DataObject) -> None:
        """Whatever the output was before: a window that stands only once in the prediction leads to what follows it."""
        unique = list(range(1000, 1000 + MIN_EVIDENCE + data.draw(st.integers(0, MAX_EVIDENCE))))
        position = data.draw(st.integers(0, len(predicted)))
        rest = predicted[position:]
        output = data.draw(TEXTS)
        found = proposed([*predicted[:position], *unique, *rest], [*output, *unique], 100)
        assert found == rest

    @given(TEXTS, TEXTS, st.lists(TOKENS, max_size=5), st.integers(-1, 12))
    def test_proposals_are_a_part_of_the_prediction_and_within_bounds(
        self, predicted: list[int], output: list[int], suffix: list[int], max_len: int
    ) -> None:
        committed = [9] * PROMPT_LEN + output
        proposal = following(predicted, output).propose(committed, suffix, max_len)
        ids = proposal.token_ids
        assert len(ids) <= max(max_len, 0)
        assert any(predicted[i : i + len(ids)] == ids for i in range(len(predicted) + 1))
        seen = [*output, *suffix]
        assert 0 <= proposal.match_len <= len(seen)
        if ids and proposal.match_len:
            agreed = seen[len(seen) - proposal.match_len :]
            joined = agreed + ids
            assert any(predicted[i : i + len(joined)] == joined for i in range(len(predicted)))

    @given(TEXTS, TEXTS, st.lists(st.integers(1, 9), max_size=60))
    def test_it_does_not_matter_in_which_parts_the_output_is_read(
        self, predicted: list[int], output: list[int], sizes: list[int]
    ) -> None:
        in_parts, at = PredictionHints(predicted, 0), 0
        for size in sizes:
            at = min(at + size, len(output))
            in_parts.read(output[:at])
        whole = PredictionHints(predicted, 0)
        assert in_parts.propose(output, [], 9) == whole.propose(output, [], 9)


class TestBounds:
    def test_a_long_prediction_and_a_long_output_are_read_in_parts(self) -> None:
        predicted = [i % 5000 for i in range(20 * MAX_READ)]
        hints = PredictionHints(predicted, 0)
        output = predicted[: 10 * MAX_READ]
        for part in range(1, 10):
            assert not hints.read(output), part
            assert hints.propose(output[: part * MAX_READ], [], 2).token_ids == predicted[part * MAX_READ :][:2]
        assert hints.propose(output, [], 4).token_ids == predicted[len(output) : len(output) + 4]

    def test_an_output_that_disagrees_is_searched_in_small_parts(self) -> None:
        hints = PredictionHints(FILE, 0)
        output = [7] * 1000
        num_calls = 1
        while not hints.read(output):
            num_calls += 1
        assert num_calls >= 1000 / (MAX_SEARCHES + PART_LEN)

    @pytest.mark.parametrize(
        ("predicted", "output"),
        [
            ([0] * 20_000, [0, 1] * 1000),
            ([0, 1] * 10_000, [0, 0, 1] * 700),
            (
                [random.Random(1).randrange(4) for _ in range(20_000)],
                [random.Random(2).randrange(4) for _ in range(2000)],
            ),
            (list(range(20_000)), list(range(30_000, 32_000))),
        ],
        ids=["one-token", "two-tokens", "four-tokens", "other-tokens"],
    )
    def test_a_hostile_prediction_costs_microseconds_a_token(self, predicted: list[int], output: list[int]) -> None:
        hints = PredictionHints(predicted, 0)
        while len(hints._text) < len(predicted):
            hints.read([])
        begin_s = time.thread_time()
        for end in range(1, len(output)):
            hints.propose(output[:end], [], 9)
        us_per_token = 1e6 * (time.thread_time() - begin_s) / len(output)
        assert us_per_token < 100, "20 on an idle core; the bound only has to tell it from a search of everything"

    @pytest.mark.parametrize("token_id", [0xD800, 0xDFFF, 0x10FFFF, 0x110000, 2**32 - 1])
    def test_any_token_id_can_be_predicted(self, token_id: int) -> None:
        assert proposed([1, token_id, 3, 4], [1, token_id]) == [3, 4]


class TestAcceptance:
    def test_few_edits_take_few_steps(self) -> None:
        rng = random.Random(0)
        truth = [rng.randrange(400) for _ in range(1200)]
        predicted = list(truth)
        for at in range(1100, 0, -200):  # changes, insertions and deletions of ten tokens
            predicted[at : at + rng.choice([0, 10, 10])] = [rng.randrange(400) for _ in range(rng.choice([0, 10, 10]))]
        assert num_steps(predicted, truth)[0] < len(truth) / 5

    def test_a_useless_prediction_soon_costs_nothing(self) -> None:
        rng = random.Random(0)
        truth, predicted = ([rng.randrange(8) for _ in range(4000)] for _ in range(2))
        steps, wasted = num_steps(predicted, truth)
        assert wasted < 0.25 * steps, "few tokens, so that pairs of them recur all the time"


class FixedSource:
    """A source that always proposes the same, with the same probability of each token."""

    def __init__(self, kind: HintKind, token_ids: list[int], chance: float, match_len: int = 8) -> None:
        self.kind = kind
        self._proposal = Proposal(token_ids, match_len)
        self._chance = chance
        self.observed: list[tuple[int, int]] = []

    def read(self, committed: Sequence[int], max_tokens: int = MAX_READ) -> bool:
        return True

    def propose(self, committed: Sequence[int], suffix: Sequence[int], max_len: int) -> Proposal:
        return Proposal(self._proposal.token_ids[:max_len], self._proposal.match_len)

    def chances(self, proposal: Proposal) -> list[float]:
        return [self._chance] * len(proposal.token_ids)

    def observe(self, proposal: Proposal, num_matched: int, num_verified: int) -> None:
        self.observed.append((num_matched, num_verified))


def kinds(sources: Sequence[LocalSource], tree: HintTree | None = None, max_local: int | None = None) -> list[int]:
    path = choose_path(HintSources(tree, [0.7] * 9, sources, None), [1, 2], frozenset(), 4, max_local)
    return [hint.node_id for hint in path.hints[: path.num_feedable]]


class TestChoiceOfSources:
    def test_the_source_that_promises_the_most_is_taken(self) -> None:
        lookup = FixedSource(HintKind.LOOKUP, [1] * 9, 0.5)
        for chance, kind in ((0.9, HintKind.PREDICTION), (0.3, HintKind.LOOKUP)):
            assert kinds([lookup, FixedSource(HintKind.PREDICTION, [2] * 9, chance)]) == [kind] * 4

    def test_local_hints_may_be_more_than_a_draft_workers(self) -> None:
        lookup = FixedSource(HintKind.LOOKUP, [1] * 40, 0.9)
        assert kinds([lookup], max_local=12) == [HintKind.LOOKUP] * 12
        tree = HintTree()
        tree.add([1, 2], 1, 2, [Hint(i + 1, i, 5) for i in range(9)])
        assert kinds([], tree, max_local=12) == [1, 2, 3, 4]

    def test_only_the_source_that_was_taken_learns(self) -> None:
        sources = [FixedSource(HintKind.LOOKUP, [1] * 4, 0.5), FixedSource(HintKind.PREDICTION, [2] * 4, 0.9)]
        path = choose_path(HintSources(None, (), sources, None), [1, 2], frozenset(), 4)
        path.observe_local(num_verified=4, num_matched=2)
        assert [source.observed for source in sources] == [[], [(2, 4)]]


class TestSessions:
    def start(self, world: World, prediction: Sequence[int], *, num_given: int = 0, is_plain: bool = False) -> None:
        text = expected(PROMPT)[: len(PROMPT) + num_given]
        world.texts["a"] = list(text)
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        settings = SpeculationSettings(enabled=not is_plain, is_plain=is_plain)
        event = StartSession("a", text, len(PROMPT), params, settings, 1, prediction=prediction)
        refused = [each for each in world.scheduler.handle(event, world.now) if isinstance(each, SessionRefused)]
        assert not refused
        world.run()
        assert world.texts["a"] == expected(PROMPT)

    def test_a_right_prediction_takes_few_steps_and_is_counted(self) -> None:
        world = World(has_lookup=False)
        self.start(world, expected(PROMPT)[len(PROMPT) :])
        assert world.num_steps < 20
        stats = world.ended["a"].stats
        assert stats.num_accepted_prediction_tokens == stats.num_prediction_tokens == 120
        assert stats.num_lookup_tokens == stats.num_draft_tokens == 0

    def test_a_wrong_one_changes_no_token(self) -> None:
        world = World(has_lookup=False)
        rng = random.Random(0)
        self.start(world, [rng.randrange(VOCAB_SIZE) for _ in range(200)])
        stats = world.ended["a"].stats
        assert stats.num_accepted_prediction_tokens < stats.num_prediction_tokens

    def test_a_replayed_session_finds_its_place(self) -> None:
        world = World(has_lookup=False)
        self.start(world, expected(PROMPT)[len(PROMPT) :], num_given=70)
        assert world.ended["a"].stats.num_accepted_prediction_tokens == 50
        assert world.num_steps < 10

    def test_plain_decoding_stays_plain(self) -> None:
        world = World()
        self.start(world, expected(PROMPT)[len(PROMPT) :], is_plain=True)
        assert world.num_steps == 120
        assert world.ended["a"].stats.num_prediction_tokens == 0

    def test_no_more_of_it_is_kept_than_the_context_has(self) -> None:
        world = World(has_lookup=False)
        self.start(world, expected(PROMPT)[len(PROMPT) :] * 1000)

    @pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**32 - 1])
    def test_a_token_outside_the_vocabulary_is_refused_by_name(self, token_id: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        event = StartSession("a", [1], 1, params, SpeculationSettings(), 1, prediction=[1, token_id])
        with pytest.raises(InvalidRequest, match="prediction") as error:
            check_request(event, 400, VOCAB_SIZE)
        assert error.value.parameter == "prediction"


@pytest.mark.parametrize(
    ("limits", "most"),
    [({}, 32), ({"num_speculative_tokens": 5}, 20), ({"num_speculative_tokens": 0}, 0), ({"num_local_tokens": 12}, 12)],
)
def test_local_hints_have_a_bound_of_their_own(limits: dict[str, int], most: int) -> None:
    assert SchedulerLimits(**limits).num_local_tokens_max == most  # type: ignore[arg-type]
