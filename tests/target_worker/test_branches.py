"""Branches beside the path: which are verified, and that the output is plain decoding's whatever they say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.hints.confidence import NUM_LEVELS, Calibration, confidence_level
from outrider.hints.hint_tree import ROOT_ID, Hint, HintTree
from outrider.hints.speculation import allot
from outrider.hints.step_cost import StepLine
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.hints.branches import LEAST_GAIN, NUM_ALTERNATIVES_MAX, BranchSearch, RowPrices, observe_alternatives
from target_worker.hints.hint_path import HintPath, HintSources, choose_path
from target_worker.hints.prediction import PredictionHints
from target_worker.limits import SchedulerLimits
from target_worker.messages import HintsArrived, SessionEnded, StartSession, Step, SubscribeDraft, TokensCommitted
from target_worker.runner import run_step
from target_worker.scheduling.scheduler import Scheduler
from target_worker.serving.generate_messages import event_message
from tests import models
from tests.engine.sequences import text

STOP = 9
BELIEVES = Calibration(of_confidence=1.0, of_record=0.0)  # that a confidence is the probability


def tree_of(*nodes: tuple[int, int, float]) -> HintTree:
    """Below one committed token: parent, token and confidence of nodes 1, 2, ..."""
    tree = HintTree()
    hints = [
        Hint(number, parent, token_id, confidence=confidence_level(chance) if chance else 0)
        for number, (parent, token_id, chance) in enumerate(nodes, start=1)
    ]
    tree.add([5], 1, 1, hints)
    return tree


def path_of(tree: HintTree, max_fed: int = 8, **sources: Any) -> HintPath:
    found = HintSources(tree, [0.5] * 9, (), None, BELIEVES, BELIEVES)
    return choose_path(replace(found, **sources), [5], frozenset({STOP}), max_fed)


def search(tree: HintTree) -> BranchSearch:
    return BranchSearch(tree, [0.5], BELIEVES, BELIEVES, frozenset({STOP}))


class TestSearch:
    #  root -> 1 -> 2, and beside them 3 -> 4, 5 below 1
    TREE = ((0, 1, 0.6), (1, 2, 0.5), (0, 3, 0.3), (3, 4, 0.9), (1, 5, 0.4))

    def test_the_likeliest_come_first_and_each_after_those_that_lead_to_it(self) -> None:
        tree = tree_of(*self.TREE)
        found = search(tree).find(tree.primary_path(8), 8)
        assert [(each.branch.hint.token_id, each.branch.on_path, each.branch.trail) for each in found] == [
            (3, 0, (0,)),
            (4, 0, (0, 1)),
            (5, 1, (2,)),
        ]
        assert [each.gain for each in found] == pytest.approx([0.3, 0.3 * 0.9, 0.6 * 0.4], abs=0.01)

    def test_no_more_are_found_than_may_be_fed(self) -> None:
        tree = tree_of(*self.TREE)
        assert len(search(tree).find(tree.primary_path(8), 2)) == 2

    def test_alternatives_get_no_more_than_the_primary_hint_leaves(self) -> None:
        tree = tree_of((0, 1, 0.9), (0, 2, 0.8))
        (found,) = search(tree).find(tree.primary_path(8), 8)
        assert found.gain == pytest.approx(0.1, abs=0.01)

    def test_nothing_follows_a_stop_token(self) -> None:
        tree = tree_of((0, 1, 0.5), (0, STOP, 0.4), (0, 3, 0.3), (3, STOP, 0.9))
        assert [each.branch.hint.token_id for each in search(tree).find(tree.primary_path(8), 8)] == [3]

    def test_a_draft_that_does_not_say_how_sure_it_is_has_its_path_verified_only(self) -> None:
        tree = tree_of((0, 1, 0.0), (0, 2, 0.0))
        assert search(tree).find(tree.primary_path(8), 8) == []

    def test_of_hundreds_of_alternatives_the_first_are_looked_at(self) -> None:
        """A draft's message must not cost the target time without bound (I7)."""
        tree = tree_of((0, 1, 0.1), *((0, token_id, 0.9) for token_id in range(10, 410)))
        found = search(tree).find(tree.primary_path(8), 32)
        assert [each.branch.hint.token_id for each in found] == [*range(10, 10 + NUM_ALTERNATIVES_MAX)]

    def test_what_does_not_pay_is_not_looked_for(self) -> None:
        tree = tree_of(*self.TREE)
        found = replace(search(tree), prices=RowPrices(least_gain=0.25)).find(tree.primary_path(8), 8)
        assert [each.branch.hint.token_id for each in found] == [3, 4]
        found = replace(search(tree), prices=RowPrices(branch_share=0.05)).find(tree.primary_path(8), 8)
        assert found == [], "a branch costs 20 times as much as a row of the path, and brings 0.3"

    def test_a_branch_that_costs_more_than_a_row_is_worth_less(self) -> None:
        tree = tree_of(*self.TREE)
        found = replace(search(tree), prices=RowPrices(branch_share=0.5)).find(tree.primary_path(8), 8)
        assert [each.gain for each in found] == pytest.approx([0.15, 0.135, 0.12], abs=0.01)

    def test_prices_are_those_of_the_step_and_its_context(self) -> None:
        line = StepLine(8.0, 0.5, 0.25)
        assert RowPrices.at(line, 4, 2000) == (0.5 * 4 / 10.0, 0.5)
        assert RowPrices.at(line, 4, 0) == (0.2, 1.0)

    def test_a_path_that_was_cut_short_has_no_other_branches_than_beside_it(self) -> None:
        tree = tree_of(*self.TREE)
        found = search(tree).find(tree.primary_path(1), 8)
        assert [each.branch.hint.token_id for each in found] == [3, 4, 5]


class TestSelection:
    def test_of_path_and_branches_the_likeliest_are_fed(self) -> None:
        path = path_of(tree_of(*TestSearch.TREE))
        assert path.gains() == pytest.approx([0.6, 0.3, 0.3, 0.27, 0.24], abs=0.02)
        fed = [path.for_step(num_fed) for num_fed in range(6)]
        assert [[hint.token_id for hint in hints] for hints, _ in fed] == [[1], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2]]
        assert [len(branches) for _, branches in fed] == [0, 0, 0, 1, 2, 3]

    def test_so_many_as_pay(self) -> None:
        path = path_of(tree_of(*TestSearch.TREE))
        assert allot([path.gains()], StepLine(10.0, 0.001), 8) == [5]
        assert allot([path.gains()], StepLine(1.0, 0.5), 8) == [1]

    def test_no_more_than_may_be_fed_in_all(self) -> None:
        assert len(path_of(tree_of(*TestSearch.TREE), max_fed=3).gains()) == 3

    def test_a_request_that_always_speculates_feeds_its_path_first(self) -> None:
        path = replace(path_of(tree_of(*TestSearch.TREE)), is_always=True)
        assert path.gains()[:2] == [1.0, 1.0]
        hints, branches = path.for_step(3)
        assert ([hint.token_id for hint in hints], len(branches)) == ([1, 2], 1)

    def test_local_hints_leave_a_drafts_limit_as_it_is(self) -> None:
        """They may be more than a draft worker's; the branches may not."""
        ends = [*((0, 20 + i, 0.12) for i in range(4))]
        chains = [
            (2 + i if not depth else 6 + 4 * (depth - 1) + i, 30 + depth, 0.95) for depth in range(6) for i in range(4)
        ]
        tree = tree_of((0, 10, 0.5), *ends, *chains)
        local = PredictionHints([10, 77, 78], 1)
        path = choose_path(
            HintSources(tree, [0.7] * 9, (local,), None, BELIEVES, BELIEVES), [5], frozenset(), max_fed=8, max_local=32
        )
        hints, branches = path.for_step(len(path.gains()))
        assert [hint.token_id for hint in hints] == [10, 77, 78]
        assert 1 + len(branches) == 8

    def test_that_a_request_always_speculates_makes_its_path_no_likelier(self) -> None:
        """A draft head would not be asked any more."""
        path = path_of(tree_of(*TestSearch.TREE))
        assert replace(path, is_always=True).expected == path.expected == pytest.approx(0.9, abs=0.02)

    def test_none_under_rejection_nor_where_they_are_switched_off(self) -> None:
        tree = tree_of(*TestSearch.TREE)
        assert path_of(tree, calibration=None).branches == ()
        assert path_of(tree, of_branches=None).branches == ()


class TestLearning:
    TREE = ((0, 1, 0.6), (0, 3, 0.3), (1, 2, 0.5), (1, 4, 0.3))

    def chance_after(self, num_steps: int, token_ids: Sequence[int], calibration: Calibration) -> float:
        for _ in range(num_steps):
            observe_alternatives(calibration, tree_of(*self.TREE), token_ids)
        return calibration.chance(confidence_level(0.3), 0.5)

    def test_an_alternative_that_is_never_right_is_soon_unlikely(self) -> None:
        calibration = Calibration(of_confidence=1.0, of_record=0.0)
        before = calibration.chance(confidence_level(0.3), 0.5)
        assert self.chance_after(100, [7], calibration) < before / 2

    def test_one_that_was_never_right_is_seen_to_improve(self) -> None:
        """It is too unlikely to be fed by then."""
        calibration = Calibration(of_confidence=1.0, of_record=0.0)
        assert self.chance_after(2000, [7], calibration) < LEAST_GAIN
        assert self.chance_after(200, [3], calibration) > 0.3

    def test_only_places_that_were_decided_count(self) -> None:
        calibration, counted = (Calibration(of_confidence=1.0, of_record=0.0) for _ in range(2))
        self.chance_after(1, [7], calibration)
        observe_alternatives(counted, tree_of(*self.TREE[:2]), [7])
        assert calibration == counted, "the other alternative follows a hint that was wrong"
        observe_alternatives(counted, tree_of((0, 1, 0.5)), [1, 4])
        assert calibration == counted, "there was none"


@dataclass
class Output:
    """The output of one session."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_trails: int = 0  # steps that accepted branches
    num_deep_trails: int = 0
    num_from_branches: int = 0  # tokens
    num_reported: int = 0  # of these, as the worker counts them


def guesses(luck: random.Random, right: Sequence[int], vocab_size: int) -> list[Hint]:
    """A tree below the committed tokens in which some node is right at every depth, wherever it stands."""
    hints: list[Hint] = []

    def grow(parent: int, following: Sequence[int]) -> None:
        if not following:
            return
        token_ids = [luck.randrange(vocab_size) for _ in range(luck.randint(1, 3))]
        if luck.random() < 0.8:
            token_ids[luck.randrange(len(token_ids))] = following[0]
        for token_id in dict.fromkeys(token_ids):
            hints.append(Hint(len(hints) + 1, parent, token_id, confidence=luck.randint(30, NUM_LEVELS)))
            if luck.random() < 0.8:
                grow(hints[-1].node_id, following[1:] if token_id == following[0] else [luck.randrange(vocab_size)])

    grow(ROOT_ID, right)
    return hints


def say(dtype: str, params: SamplingParams, right: Sequence[int] | None, luck: int = 0) -> Output:
    """Runs a target with a draft that knows the output, `right`, and sends it among other guesses; None: without a
    draft."""
    engine = models.engine("llama", dtype)
    limits = SchedulerLimits(may_pause=False, max_num_seqs=2, max_model_len=400, hint_wait_ms_max=0.0)
    allocator = BlockAllocator(engine.allocator.num_blocks, engine.allocator.block_size)
    scheduler = Scheduler(limits, allocator, engine.vocab_size)
    prompt = text(37, 3, engine.vocab_size)
    scheduler.handle(StartSession("a", prompt, len(prompt), params, SpeculationSettings(), 11), 0.0)
    scheduler.handle(SubscribeDraft(1, "a", len(prompt)), 0.0)
    chance, output = random.Random(luck), Output()
    while True:
        at = len(output.token_ids)
        if right is not None and at:
            hints = guesses(chance, right[at : at + 4], engine.vocab_size)
            scheduler.handle(HintsArrived("a", 1, len(prompt) + at, hints, 0.0), 0.0)
        step = scheduler.next_step(0.0)
        assert isinstance(step, Step)
        # Rows cost little, however busy the machine is.
        result = replace(run_step(engine, step), step_ms=10.0 + 0.01 * step.num_tokens)
        trails = [verdict.trail for verdict in result.verdicts if verdict is not None]
        output.num_trails += any(trails)
        output.num_deep_trails += any(len(trail) > 1 for trail in trails)
        output.num_from_branches += sum(map(len, trails))
        for action in scheduler.finish_step(step, result, 0.0):
            if isinstance(action, TokensCommitted):
                output.token_ids += action.token_ids
                output.logprobs += action.logprobs or []
                output.num_reported += event_message(action).step.num_accepted_branches
                assert action.num_branches == sum(len(item.branches) for item in step.items) <= action.num_draft_tokens
            elif isinstance(action, SessionEnded):
                allocator.check_integrity([])
                return output


GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
COUPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=120, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        COUPLED,
        replace(GREEDY, num_logprobs=3),
        replace(COUPLED, num_logprobs=0, are_logprobs_processed=True, top_p=0.9),
        replace(GREEDY, repetition_penalty=1.4, presence_penalty=0.7, bad_words=((5,), (44, 3)), num_logprobs=2),
        replace(COUPLED, frequency_penalty=0.8, min_tokens=60, logit_bias=((3, 4.0), (17, -100.0))),
    ],
    ids=["greedy", "coupled", "logprobs", "processed-logprobs", "penalties", "coupled-penalties"],
)
def test_the_output_is_that_of_plain_decoding(dtype: str, params: SamplingParams) -> None:
    """I2, bit for bit, with KV entries that move and rows of several branches in a step."""
    plain = say(dtype, params, None)
    assert plain.num_trails == 0
    outputs = [say(dtype, params, plain.token_ids, luck) for luck in range(3)]
    for hinted in outputs:
        assert hinted.token_ids == plain.token_ids
        assert hinted.logprobs == plain.logprobs
        # The last step may have decided more than the output takes.
        assert hinted.num_from_branches - 8 <= hinted.num_reported <= hinted.num_from_branches
    assert sum(hinted.num_trails for hinted in outputs) >= 15
    assert sum(hinted.num_deep_trails for hinted in outputs) >= 3
