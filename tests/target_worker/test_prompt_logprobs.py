"""Log probabilities of the prompt, on a real engine: every position once, in order, however it was prefilled."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.hints.hint_tree import ROOT_ID, Hint
from outrider.hints.step_cost import StepCost, StepLine
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    HintsArrived,
    PromptScored,
    SessionEnded,
    StartSession,
    TokensCommitted,
)
from target_worker.runner import TargetCore
from target_worker.scheduling.scheduler import Scheduler
from tests import models
from tests.engine.sequences import text

TOLERANCE = 1e-4
MAX_TOKENS = 8
PROMPT_LENS = (1, 2, 9, 31)


@functools.cache
def teacher_forced(token_ids: tuple[int, ...]) -> torch.Tensor:
    """transformers' own, after every token.  # float32 [length, vocab_size]"""
    model = models.random_model("llama")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check(given: TokenLogprobs, expected: torch.Tensor, token_id: int, num_top: int) -> None:
    """# expected: [vocab_size]"""
    right = float(expected[token_id])
    assert given.logprob == pytest.approx(right, abs=TOLERANCE)
    surely, perhaps = (int((expected > right + margin).sum()) for margin in (TOLERANCE, -TOLERANCE))
    assert surely + 1 <= given.rank <= max(perhaps, 1)
    assert [value for _, value in given.top] == pytest.approx(expected.topk(num_top).values.tolist(), abs=TOLERANCE)
    for top_id, value in given.top:
        assert value == pytest.approx(float(expected[top_id]), abs=TOLERANCE)


class GivenCost(StepCost):
    """No clock has a say, so that a run repeats itself."""

    def line(self, num_context: int = 0) -> StepLine:
        return StepLine(20.0, 0.1)


class World:
    """Sessions of one target core, and what was said of them in the order it was said."""

    def __init__(self, budget: int, max_num_seqs: int) -> None:
        engine = models.engine("llama")
        limits = SchedulerLimits(
            may_pause=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=100,
            num_speculative_tokens=4,
            hint_wait_ms_max=0.0,
        )
        allocator = BlockAllocator(engine.allocator.num_blocks, engine.allocator.block_size)
        scheduler = Scheduler(limits, allocator, engine.vocab_size)
        scheduler.cost = GivenCost()
        self.core = TargetCore(scheduler, engine, TargetMetrics("tiny", "target"))
        self.said: dict[str, list[Action]] = {}

    def start(self, name: str, token_ids: Sequence[int], num_prompt_tokens: int, num_top: int | None) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=MAX_TOKENS, num_logprobs=num_top, num_prompt_logprobs=num_top
        )
        event = StartSession(name, list(token_ids), num_prompt_tokens, params, SpeculationSettings(), 1)
        self.said[name] = []
        self.core.handle(event, 0.0)

    def run(self) -> None:
        while True:
            actions, until = self.core.run_next(0.0)
            for action in actions:
                self.said[action.session_id].append(action)
            if until is None:
                break
        assert all(isinstance(said[-1], SessionEnded) for said in self.said.values())
        self.core.scheduler.allocator.check_integrity([])

    def output(self, name: str) -> list[int]:
        return [t for each in self.said[name] if isinstance(each, TokensCommitted) for t in each.token_ids]

    def check(self, name: str, token_ids: Sequence[int], num_prompt_tokens: int, num_top: int) -> None:
        whole = (*token_ids, *self.output(name))
        expected = teacher_forced(whole)
        position = 1
        for action in self.said[name]:
            if isinstance(action, PromptScored):
                assert action.first_position == position
                assert action.logprobs
                for each in action.logprobs:
                    check(each, expected[position - 1], whole[position], num_top)
                    position += 1
        assert position == max(num_prompt_tokens, 1), "a position is missing, or there are too many"
        position = len(token_ids)
        for action in self.said[name]:
            if isinstance(action, TokensCommitted):
                assert action.logprobs is not None
                assert len(action.logprobs) == len(action.token_ids)
                for each in action.logprobs:
                    check(each, expected[position - 1], whole[position], num_top)
                    position += 1
        kinds = [type(action) for action in self.said[name]]
        if PromptScored in kinds:
            last_scored = len(kinds) - 1 - kinds[::-1].index(PromptScored)
            assert last_scored < kinds.index(TokensCommitted), "the prompt comes before the output"


@pytest.mark.parametrize("num_top", [0, 20])
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(2, 1), (5, 2), (8, 3), (13, 4), (64, 4), (200, 4)])
def test_every_prompt_position_is_scored_once_in_any_chunks(budget: int, max_num_seqs: int, num_top: int) -> None:
    world = World(budget, max_num_seqs)
    prompts = {f"s{length}": text(length, length, models.VOCAB_SIZE) for length in PROMPT_LENS}
    for name, prompt in prompts.items():
        world.start(name, prompt, len(prompt), num_top)
    world.run()
    for name, prompt in prompts.items():
        world.check(name, prompt, len(prompt), num_top)


@pytest.mark.parametrize("budget", [3, 7, 64])
@pytest.mark.parametrize("num_given", [1, 5, MAX_TOKENS - 1])
def test_a_session_that_was_moved_scores_its_prompt_again_and_nothing_else(num_given: int, budget: int) -> None:
    """Committed tokens are fed as the prompt is, but have been scored where they were said."""
    prompts = {f"s{length}": text(length, length, models.VOCAB_SIZE) for length in PROMPT_LENS}
    first = World(64, 4)
    for name, prompt in prompts.items():
        first.start(name, prompt, len(prompt), 2)
    first.run()
    second = World(budget, 2)
    for name, prompt in prompts.items():
        second.start(name, [*prompt, *first.output(name)[:num_given]], len(prompt), 2)
    second.run()
    for name, prompt in prompts.items():
        given = first.output(name)[:num_given]
        assert [*given, *second.output(name)] == first.output(name)
        second.check(name, [*prompt, *given], len(prompt), 2)


def test_they_are_the_same_beside_others_that_decode_with_hints_and_share_their_prompt() -> None:
    world = World(16, 4)
    prompt = text(31, 31, models.VOCAB_SIZE)
    world.start("other", prompt, len(prompt), None)
    world.start("scored", prompt, len(prompt), 3)
    hints = [Hint(i + 1, i if i else ROOT_ID, (7 * i) % models.VOCAB_SIZE) for i in range(6)]
    world.core.handle(HintsArrived("other", 1, len(prompt), hints, 0.0), 0.0)
    world.core.handle(HintsArrived("scored", 1, len(prompt), hints, 0.0), 0.0)
    world.run()
    world.check("scored", prompt, len(prompt), 3)
    assert not any(isinstance(action, PromptScored) for action in world.said["other"])
    assert world.output("other") == world.output("scored")
