"""A draft that reads mask tokens (PARD): several guesses in one pass, corrected by the rows of the next."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, StepItem
from outrider.engine.sampling.randomness import mix
from outrider.sampling_params import SamplingParams
from tests.draft_worker.test_scheduler import LIMITS, TARGET, RandomLife, World, attach

GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=200, ignore_eos=True)
WIDE = replace(LIMITS, max_lookahead=12, max_nodes_per_step=8, num_mask_tokens=3)


class RandomLifeWithMasks(RandomLife):
    limits = replace(LIMITS, num_mask_tokens=3)
    reads_masks = True


TestRandomLifeWithMasks = RandomLifeWithMasks.TestCase
TestRandomLifeWithMasks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


def attached(sampling: SamplingParams = GREEDY, limits: DraftLimits = WIDE, mask_error_share: int = 0) -> World:
    world = World(limits, num_children=2 if mask_error_share else 1, reads_masks=True)
    world.model.mask_error_share = mask_error_share
    world.tell(AttachSession("a", 1, TARGET, [1, 2, 3], sampling, 7))
    return world


def items(world: World) -> list[StepItem]:
    """Runs a step; returns its items."""
    step = world.scheduler.next_step()
    assert step is not None
    world.hear(world.scheduler.finish_step(step, world.model.run(step)))
    world.check()
    world.check_heard()
    return step.items


class TestGrowth:
    def test_the_prompt_gives_as_many_hints_as_masks_and_one(self) -> None:
        world = attached()
        assert items(world)[0].num_masks == WIDE.num_mask_tokens
        assert len(world.primary()) == 1 + WIDE.num_mask_tokens

    def test_a_pass_feeds_what_was_guessed_and_guesses_more(self) -> None:
        world = attached()
        items(world)
        guessed = world.primary()
        (item,) = items(world)
        assert list(item.token_ids) == guessed
        assert item.num_masks == WIDE.num_mask_tokens
        assert len(world.primary()) == 2 * len(guessed)

    def test_committed_guesses_are_fed_with_the_masks(self) -> None:
        world = attached()
        items(world)
        world.commit(world.primary()[:2])
        assert world.session().num_pending == 2
        kept = world.primary()
        assert len(kept) == WIDE.num_mask_tokens - 1, "what was guessed below them stays"
        (item,) = items(world)
        assert (len(item.token_ids), item.num_masks) == (2, WIDE.num_mask_tokens)
        assert len(world.primary()) == 1 + WIDE.num_mask_tokens

    def test_many_sessions_share_the_masks(self) -> None:
        world = World(replace(WIDE, max_num_seqs=3, max_nodes_per_step=4), reads_masks=True)
        for name in "abc":
            world.tell(attach(name, (1, 2, ord(name) % 5)))
        assert [item.num_masks for item in items(world)] == [1, 1, 1]

    @pytest.mark.parametrize(("limits", "num_hints"), [({"max_lookahead": 2}, 2), ({"max_nodes": 3}, 3)])
    def test_masks_keep_to_the_bounds(self, limits: dict[str, int], num_hints: int) -> None:
        world = attached(limits=replace(WIDE, **limits))  # type: ignore[arg-type]
        items(world)
        assert len(world.session().nodes) == num_hints

    def test_nothing_is_guessed_behind_a_stop_token(self) -> None:
        world = attached()
        items(world)
        first, second, *_ = world.primary()
        if first != second:
            world = attached(replace(GREEDY, stop_token_ids=frozenset([second])))
            items(world)
            assert world.primary() == [first, second]

    def test_without_a_mask_token_there_are_none(self) -> None:
        world = World(WIDE)
        world.tell(attach())
        for _ in range(2):
            assert [item.num_masks for item in items(world)] == [0]


class TestCorrection:
    def corrected(self, sampling: SamplingParams) -> tuple[list[int], list[int], World]:
        """Returns a guessed path with a wrong token in it, and the path once its rows were fed."""
        world = attached(sampling, mask_error_share=3)
        world.model.num_steps = next(
            n for n in range(200) if _is_wrong(n + 1, 0) and not _is_wrong(n + 2, 0) and not _is_wrong(n + 2, 1)
        )
        items(world)
        guessed = world.primary()
        items(world)
        return guessed, world.primary(), world

    def test_the_row_of_the_token_before_replaces_a_wrong_guess(self) -> None:
        guessed, path, world = self.corrected(GREEDY)
        assert path[0] == guessed[0]
        assert path[1] != guessed[1]
        siblings = world.session().nodes[world.session().cursor_node.children[0]].children
        assert [world.session().nodes[child].hint.token_id for child in siblings] == [path[1], guessed[1]]

    def test_under_rejection_sampling_the_first_draw_stays(self) -> None:
        """I4: a choice between two draws would be a choice of tokens."""
        guessed, path, _ = self.corrected(SAMPLED)
        assert path[: len(guessed)] == guessed

    def test_a_new_link_hears_the_children_in_their_order(self) -> None:
        _, path, world = self.corrected(GREEDY)
        world.commit(path[:1])
        world.trees["a"] = type(world.trees["a"])()
        actions = world.scheduler._resend(world.session())
        world.hear(actions)
        assert [hint.token_id for hint in world.trees["a"].primary_path(50)] == path[1:]


def _is_wrong(num_steps: int, index: int) -> bool:
    """Whether a mask of the fake model guesses another token than its rows would."""
    return mix(num_steps + 7 * index) % 3 == 0
