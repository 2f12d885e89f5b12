"""I2, bit for bit in bfloat16: the batch composition and the route change neither tokens nor log probabilities.

Every session asks for log probabilities, raw and of twenty tokens: equal floats are equal logits. Reference is the
session alone, prompt in one piece, without speculation and without what another session left behind.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace

import pytest

from outrider.engine.loading.loading import load_model
from outrider.engine.model import Engine
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.hints.hint_tree import Hint
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    HintsArrived,
    SessionEnded,
    SessionRefused,
    StartSession,
    TokensCommitted,
)
from target_worker.runner import TargetCore
from target_worker.scheduling.scheduler import Scheduler
from tests import models
from tests.engine.sequences import text

NUM_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=20, repetition_penalty=1.2
    ),
    "coupled": SamplingParams(
        temperature=0.9, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=20
    ),
}
PROMPT_LENGTHS = (1, 7, 40, 90, 150)
MODES = pytest.mark.parametrize("mode", list(PARAMS))
WEIGHTS = pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])


@dataclass(slots=True)
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0


@functools.cache
def engine(quantization: str) -> Engine:
    directory = models.model_dir("llama")
    return load_model(models.engine_config(directory, "bfloat16", quantization=quantization, max_num_seqs=80))


class Runner:
    """One target worker's core, driven to the end of all sessions."""

    def __init__(self, quantization: str = "none", **limits: object) -> None:
        self.engine = engine(quantization)
        defaults: dict[str, object] = {
            "max_num_seqs": 70, "max_num_waiting": 100, "max_model_len": 400, "hint_wait_ms_max": 0.0,
        }  # fmt: skip
        self.limits = SchedulerLimits(**(defaults | limits))  # type: ignore[arg-type]
        scheduler = Scheduler(self.limits, self.engine.allocator, self.engine.vocab_size)
        self.core = TargetCore(scheduler, self.engine, TargetMetrics("m", "w"))
        self.outputs: dict[str, Output] = {}
        self.running: set[str] = set()

    def start(self, name: str, prompt: list[int], params: SamplingParams, *, num_given: int = 0) -> None:
        """The last `num_given` tokens of `prompt` were committed elsewhere."""
        self.outputs[name] = Output()
        self.running.add(name)
        seed = params.seed or 0
        event = StartSession(name, prompt, len(prompt) - num_given, params, SpeculationSettings(), seed)
        self._take(self.core.handle(event, 0.0))

    def _take(self, actions: list[Action]) -> None:
        for action in actions:
            assert not isinstance(action, SessionRefused), action
            if isinstance(action, TokensCommitted):
                self.outputs[action.session_id].token_ids += action.token_ids
                self.outputs[action.session_id].logprobs += action.logprobs or []
            elif isinstance(action, SessionEnded):
                self.outputs[action.session_id].num_cached_tokens = action.num_cached_tokens
                self.running.discard(action.session_id)

    def step(self) -> None:
        actions, _ = self.core.run_next(0.0)
        self._take(actions)

    def finish(self) -> dict[str, Output]:
        while self.running:
            self.step()
        self.engine.allocator.check_integrity([])
        return self.outputs


def prompt_of(length: int) -> list[int]:
    return text(length, length, models.VOCAB_SIZE)


@functools.cache
def alone(mode: str, quantization: str, length: int) -> Output:
    runner = Runner(quantization, enable_prefix_caching=False)
    runner.start("a", prompt_of(length), PARAMS[mode])
    return runner.finish()["a"]


@WEIGHTS
@MODES
@pytest.mark.parametrize("budget", [71, 100, 512])
def test_prompts_in_pieces_of_any_size(mode: str, quantization: str, budget: int) -> None:
    """All prompts at once share the token budget of a step, so that each is cut differently."""
    runner = Runner(quantization, max_num_batched_tokens=budget, enable_prefix_caching=False)
    for length in PROMPT_LENGTHS:
        runner.start(str(length), prompt_of(length), PARAMS[mode])
    for name, output in runner.finish().items():
        assert output == alone(mode, quantization, int(name)), name


@WEIGHTS
@MODES
@pytest.mark.parametrize("num_sessions", [2, 3, 8, 17, 33, 64])
def test_batches_of_1_to_64(mode: str, quantization: str, num_sessions: int) -> None:
    """Sessions come one step after another, so that prefill and decoding of all lengths meet."""
    runner = Runner(quantization, enable_prefix_caching=False)
    lengths = itertools.islice(itertools.cycle(PROMPT_LENGTHS), num_sessions)
    for index, length in enumerate(lengths):
        runner.start(f"{index}/{length}", prompt_of(length), PARAMS[mode])
        if index % 3 == 0:
            runner.step()
    for name, output in runner.finish().items():
        assert output == alone(mode, quantization, int(name.split("/")[1])), name


@WEIGHTS
@MODES
def test_recomputation_after_a_move(mode: str, quantization: str) -> None:
    """Committed tokens that were decoded one by one are prefilled in one piece elsewhere, from any point on."""
    for length in (7, 90):
        whole = alone(mode, quantization, length)
        for num_given in range(1, NUM_TOKENS):
            runner = Runner(quantization, enable_prefix_caching=False)
            given = whole.token_ids[:num_given]
            runner.start("a", prompt_of(length) + given, PARAMS[mode], num_given=num_given)
            moved = runner.finish()["a"]
            assert moved.token_ids == whole.token_ids[num_given:]
            assert moved.logprobs == whole.logprobs[num_given:]


@WEIGHTS
@MODES
def test_prefix_cache_hits(mode: str, quantization: str) -> None:
    """A prompt whose beginning another session left, whole or in part, computed in its prefill or while decoding."""
    runner = Runner(quantization)
    for length in PROMPT_LENGTHS:
        runner.start(f"first/{length}", prompt_of(length), PARAMS[mode])
    firsts = dict(runner.finish())
    for length in PROMPT_LENGTHS:
        runner.start(f"again/{length}", prompt_of(length), PARAMS[mode])
        given = firsts[f"first/{length}"].token_ids[:20]
        runner.start(f"moved/{length}", prompt_of(length) + given, PARAMS[mode], num_given=20)
    outputs = runner.finish()
    for length in PROMPT_LENGTHS:
        again = outputs[f"again/{length}"]
        assert again.num_cached_tokens == (length - 1) // 8 * 8
        whole = alone(mode, quantization, length)
        assert replace(again, num_cached_tokens=0) == whole
        assert outputs[f"moved/{length}"].token_ids == whole.token_ids[20:]
        assert outputs[f"moved/{length}"].logprobs == whole.logprobs[20:]


@MODES
def test_one_prompt_many_times_at_once(mode: str) -> None:
    """A request with `n` outputs: the first prefill is shared, and every output depends on its own seed."""
    prompt = text(90, 1234 + len(mode), models.VOCAB_SIZE)  # no other test leaves it behind
    several = [replace(PARAMS[mode], seed=seed) for seed in (3, 4, 5, 6)]
    together = Runner()
    for index, params in enumerate(several):
        together.start(str(index), prompt, params)
    outputs = together.finish()
    assert [outputs[str(index)].num_cached_tokens for index in range(4)] == [0, 88, 88, 88]
    for index, params in enumerate(several):
        apart = Runner(enable_prefix_caching=False)
        apart.start("a", prompt, params)
        assert replace(outputs[str(index)], num_cached_tokens=0) == apart.finish()["a"]


@WEIGHTS
@MODES
@pytest.mark.parametrize("num_right", [0, 1, 3, 7])
def test_blocks_of_hints_right_and_wrong(mode: str, quantization: str, num_right: int) -> None:
    """Verified in blocks of eight rows beside other sessions that are verified too."""
    runner = Runner(quantization, num_speculative_tokens=7, enable_prefix_caching=False)
    lengths = (7, 90, 150)
    for length in lengths:
        runner.start(str(length), prompt_of(length), PARAMS[mode])
    while runner.running:
        for length in lengths:
            said = runner.outputs[str(length)].token_ids
            whole = alone(mode, quantization, length).token_ids
            guesses = whole[len(said) : len(said) + 8]
            guesses = [g if i < num_right else (g + 1) % 50 for i, g in enumerate(guesses)]
            hints = [Hint(i + 1, i, guess) for i, guess in enumerate(guesses)]
            base_len = length + len(said)
            runner.core.handle(HintsArrived(str(length), 1, base_len, hints, 0.0), 0.0)
        runner.step()
    for length in lengths:
        assert runner.outputs[str(length)] == alone(mode, quantization, length)
