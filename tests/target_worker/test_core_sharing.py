"""A target takes the cores of its draft workers where its steps are the faster for it, and leaves them alone where they
are not."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from outrider.hints.hint_intake import IntakeShares
from outrider.hints.trials import NUM_STEADY_STEPS_MAX, NUM_TRIAL_STEPS_MAX
from outrider.observability.telemetry import TargetMetrics
from outrider.sampling_params import SamplingParams, SpeculationSettings
from target_worker.core_sharing import NUM_FIRST_STEPS, CoreSharing
from target_worker.limits import SchedulerLimits
from target_worker.messages import StartSession
from target_worker.runner import TargetCore
from target_worker.scheduling.scheduler import Scheduler
from tests import models

NUM_SEEDS = 16
LABELS = {"model_name": "tiny", "engine": "target"}
ALL, NOBODY = IntakeShares(1.0, 1.0), IntakeShares(1.0, 0.0)


@dataclass
class Asking:
    """A session, as far as the choice depends on it."""

    num_pending: int = 1
    is_hinted: bool = True

    def can_expect_hints(self) -> bool:
        return self.is_hinted


def sessions(count: int, num_pending: int = 1, *, is_hinted: bool = True) -> list[Asking]:
    return [Asking(num_pending, is_hinted) for _ in range(count)]


@dataclass
class Machine:
    """On which a step of all cores commits as much in 1/`gain` of the time; single steps scatter by `noise`."""

    gain: float
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def run(self, cores: CoreSharing, num_steps: int, size: int = 1, shares: IntakeShares | None = ALL) -> int:
        """Number of the steps that used all cores."""
        num_shared = 0
        for _ in range(num_steps):
            cost = cores.choose(sessions(size))
            num_shared += cores.uses_all_cores
            whole_ms = 10.0 * self.rng.lognormvariate(0.0, self.noise) / (self.gain if cores.uses_all_cores else 1.0)
            cost.observe(5 * size, whole_ms, 100)
            cores.observe(size, 3 * size, 100, whole_ms, shares)
        return num_shared


@pytest.mark.parametrize("gain", [1.3, 1.15, 0.85, 0.6])
def test_it_settles_on_the_faster_way(gain: float) -> None:
    """All of 16 runs, under steps that scatter by 30 %."""
    for seed in range(NUM_SEEDS):
        machine, cores = Machine(gain, 0.3, seed), CoreSharing()
        machine.run(cores, 3000)
        share = machine.run(cores, 3000) / 3000
        assert share > 0.95 if gain > 1.0 else share < 0.05


def test_it_begins_apart_and_tries_soon() -> None:
    machine, cores = Machine(1.5), CoreSharing()
    assert machine.run(cores, NUM_FIRST_STEPS) == 0
    assert machine.run(cores, NUM_TRIAL_STEPS_MAX) > 0


@pytest.mark.parametrize(("before", "after"), [(1.4, 0.7), (0.7, 1.4)])
def test_it_follows_a_change_of_the_load(before: float, after: float) -> None:
    cores = CoreSharing()
    Machine(before).run(cores, 2000)
    machine = Machine(after, seed=1)
    machine.run(cores, NUM_STEADY_STEPS_MAX + NUM_TRIAL_STEPS_MAX)
    share = machine.run(cores, 1000) / 1000
    assert share > 0.9 if after > 1.0 else share < 0.1


@pytest.mark.parametrize(
    ("batch", "uses_all_cores"),
    [
        (sessions(2), False),
        (sessions(2, is_hinted=False), True),
        ([*sessions(1), *sessions(1, num_pending=80)], True),  # a prompt
        ([*sessions(7, is_hinted=False), *sessions(1)], False),
    ],
)
def test_draft_workers_at_work_are_left_alone_where_that_is_faster(batch: list[Asking], uses_all_cores: bool) -> None:
    cores = CoreSharing()
    for size in (2, 8):
        Machine(0.5).run(cores, 500, size=size)
        while cores.trials(size).in_trial:
            Machine(0.5).run(cores, 1, size=size)
    cores.choose(batch)
    assert cores.uses_all_cores == uses_all_cores


def test_both_ways_have_costs_of_their_own() -> None:
    cores = CoreSharing()
    Machine(2.0, noise=0.0).run(cores, 2000)
    assert cores.choose(sessions(1)).line(100).step_ms(5) == pytest.approx(5.0, rel=0.01)
    cores.trials(1).is_on = False
    assert cores.choose(sessions(1)).line(100).step_ms(5) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("gain", [1.5, 0.6])
def test_a_new_size_of_batch_begins_as_its_nearest(gain: float) -> None:
    cores = CoreSharing()
    Machine(gain).run(cores, 2000, size=4)
    while cores.trials(4).in_trial:
        Machine(gain).run(cores, 1, size=4)
    cores.choose(sessions(8))
    assert cores.uses_all_cores == (gain > 1.0)


def test_steps_before_draft_workers_have_caught_up_say_nothing() -> None:
    cores = CoreSharing()
    Machine(3.0).run(cores, NUM_FIRST_STEPS, shares=NOBODY)
    trials = cores.trials(1)
    assert trials.on.weight == trials.off.weight == 0.0


def test_where_all_accept_hints_at_any_cost_it_is_measured_all_the_same() -> None:
    cores = CoreSharing()
    machine = Machine(1.4)
    machine.run(cores, 1500, shares=None)
    assert machine.run(cores, 1000, shares=None) > 900


def test_steps_on_all_cores_are_counted() -> None:
    """A prompt and a step without a draft run on all cores; so does everything of a session that has none."""
    config = models.engine_config(models.model_dir("llama"), num_threads=1)
    engine = models.load(replace(config, num_threads_beside_draft=1))
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=50, max_model_len=100, num_speculative_tokens=4)
    cores = CoreSharing()
    metrics = TargetMetrics("tiny", "target")
    core = TargetCore(Scheduler(limits, engine.allocator, engine.vocab_size, None, cores), engine, metrics, cores)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    core.handle(StartSession("a", [1, 2, 3], 3, params, SpeculationSettings(enabled=False), 1), 0.0)
    while core.run_next(0.0)[1] is not None:
        pass
    assert metrics.registry.get_sample_value("outrider_steps_on_all_cores_total", LABELS) == 5
