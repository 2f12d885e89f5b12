"""Does the prediction hold? The demo pair measured, served by two real workers, and simulated, in one test run."""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.shared.worker_pair import WorkerPair, worker_pair
from benchmarks.speculation.closed_loop import Slice, run_slice
from command_line import app
from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from command_line.simulator.fleet import Fleet, RequestKind, Traffic, with_pair
from command_line.simulator.world import World
from command_line.tune.findings import Settings
from command_line.tune.profile import loaded, step_times
from command_line.tune.times import StepTimes
from demo.corpus import held_out_prompts
from demo.grow import grow
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer

NUM_TOKENS = 60
NUM_PROMPTS = 12
SLICE_S = 5.0
"""Duration of a measurement with up to four streams; with more it is proportionally longer, so that each ends a
request."""
TOLERANCE = 0.35
"""Permitted error of a prediction, as a share of the measured value."""
CLEARLY = 1.25
"""Ratio of two loads' measured rates from which the prediction must put them in the same order."""
TRIES_MAX = 3
MOOD_MAX = 1.25
"""Permitted ratio between the machine's speeds within a run; above it, other processes use the cores and nothing can be
compared."""
SIZES = (1, 4, 8, 9, 12, 16, 24, 32, 48, 64)
"""Tokens of the steps that are timed: more than `outrider tune` has, since a block of eight hints is nine rows."""

CERTAINTY = 0.35
"""Share of tokens at which the demo pair's draft model is certain. The calibrated probability that it gives its first
guess is 0.93 on average where it is right and 0.65 where it is wrong (24 held-out prompts × 100 tokens): as for a draft
that is certain in 0.36 of all cases (`traffic.SURE`)."""

Load = tuple[int, bool]
"""Streams, and whether the draft worker is used."""
FITTED: tuple[Load, ...] = ((1, False), (8, False))
LOADS: tuple[Load, ...] = (*FITTED, (1, True), (4, True), (8, True))


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured or simulated rates for one number of streams, with or without the draft worker."""

    tokens_per_s: float
    tpot_ms: float  # median
    mean_acceptance_length: float


def profile(grown: Path, prompts: list[str], core: int, scratch: Path) -> dict[str, Any]:
    """The profile that `outrider tune` measures for the demo pair, with the step times of the grown target, whose
    output is the same."""
    asked = scratch / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
    arguments = [
        *("tune", "--prompts", str(asked), "--json", "--batch-sizes", "1", "--budget-s", "5"),
        *("--max-tokens", str(NUM_TOKENS), "--cpu-affinity", str(core)),
    ]
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    settings = Settings("bfloat16", "none", 1, context_len=128, num_tokens=NUM_TOKENS, budget_s=6.0)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with loaded(grown, settings, is_target=True, longest=512) as engine:
            times = step_times(engine, SIZES, settings, is_target=True).times
    finally:
        os.sched_setaffinity(0, before)
    steps = dict(zip(map(str, times.num_tokens), times.step_ms, strict=True))
    return found | {"target": {"step_ms_by_num_tokens": steps, "sequence_ms": times.sequence_ms}}


async def read_all(pair: WorkerPair, prompts: list[list[int]]) -> None:
    """Into both prefix caches: reading a prompt that is in none takes as long as ten steps and more."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt in prompts:
        await pair.generate(prompt, params, use_draft=True)


async def measured(pair: WorkerPair, prompts: list[list[int]], loads: Sequence[Load] = LOADS) -> dict[Load, Rates]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    cycle = itertools.cycle(prompts)
    found: dict[Load, Rates] = {}
    for load in loads:
        num_streams, use_draft = load
        seconds = SLICE_S * max(num_streams / 4, 1.0)
        part: Slice = await run_slice(
            pair, cycle, params, num_streams=num_streams, seconds=seconds, use_draft=use_draft
        )
        assert part.tpot_ms, f"no request of {NUM_TOKENS} tokens ended within {seconds:g} s"
        found[load] = Rates(part.tokens_per_s, statistics.median(part.tpot_ms), part.mean_acceptance_length or 1.0)
    return found


def fleet_of(found: Mapping[str, Any], fitted: Mapping[Load, Rates]) -> Fleet:
    """One target and one draft worker, as measured. How fast the machine is while it serves, beside how fast it was
    when the models were timed, is fitted to plain decoding of one and of eight streams, and taken to hold for all."""
    # Prompts come again and again: all of them but what does not fill a block is in the prefix cache.
    kind = RequestKind(
        prompt_tokens=(97, 112), shared_prefix=96, output_tokens=(NUM_TOKENS, NUM_TOKENS), certainty=CERTAINTY
    )
    fleet = with_pair(Fleet(kinds=(kind,)), found).with_pools(1, 1)
    target, draft = fleet.target, fleet.draft
    factor = statistics.geometric_mean(
        rates.tpot_ms / target.forward_ms(num_streams, num_streams, 0) for (num_streams, _), rates in fitted.items()
    )
    return replace(
        fleet,
        target=replace(
            target,
            step_ms=slower(target.step_ms, factor),
            sequence_ms=target.sequence_ms * factor,
            hinted_ms=target.hinted_ms * factor,
            hinted_sequence_ms=target.hinted_sequence_ms * factor,
            always_listen=True,
        ),
        draft=replace(draft, step_ms=slower(draft.step_ms, factor), sequence_ms=draft.sequence_ms * factor),
        network=replace(fleet.network, coordinator_ms=fleet.network.worker_ms),
    )


def slower(times: StepTimes | None, factor: float) -> StepTimes:
    assert times is not None
    return StepTimes(times.num_tokens, tuple(ms * factor for ms in times.step_ms))


def predicted(fleet: Fleet) -> dict[Load, Rates]:
    found: dict[Load, Rates] = {}
    for num_streams, use_draft in LOADS:
        traffic = Traffic(concurrency=num_streams, warmup_s=5.0, seconds=30.0)
        outcome = World(replace(fleet, traffic=traffic).with_pools(1, int(use_draft))).run()
        assert outcome.tpot_ms is not None
        found[num_streams, use_draft] = Rates(
            outcome.tokens_per_s, outcome.tpot_ms.p50, outcome.mean_acceptance_length or 1.0
        )
    return found


def differences(found: Mapping[Load, Rates], expected: Mapping[Load, Rates]) -> list[str]:
    """Descriptions of the predicted and the expected rates, one for each load."""
    return [
        f"{load}: {found[load].tokens_per_s:.1f} tokens/s predicted, {expected[load].tokens_per_s:.1f} measured; "
        f"TPOT {found[load].tpot_ms:.2f} and {expected[load].tpot_ms:.2f} ms; "
        f"tokens a step {found[load].mean_acceptance_length:.2f} and {expected[load].mean_acceptance_length:.2f}"
        for load in LOADS
    ]


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_the_grown_demo_pair_serves_as_predicted(tmp_path: Path) -> None:
    """Costs, agreement and load of one test run.

    What is fitted is one number, how fast the machine is while it serves. Predicted are throughput and median TPOT of
    1, 4 and 8 streams with the draft, and the order of all loads by both.

    In a quiet minute of two cores of an AMD EPYC (Zen 5): TPOT 3.78, 8.63 and 15.31 ms predicted, 3.79, 8.76 and 14.40
    measured; 244, 419 and 476 tokens per second predicted, 229, 397 and 466 measured; 5.00, 4.38 and 3.84 tokens a step
    predicted, 4.89, 4.15 and 3.80 measured. With other processes on the cores TPOT was up to 43 % off in
    another run: the load of others changes within a run, which no model of ours can know. So it is measured anew where
    they differ, and only what is so twice counts.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("a draft rides ahead only on a core of its own")
    target = tmp_path / "grown"
    grow(Path(DEMO_TARGET), target)
    texts = held_out_prompts(NUM_PROMPTS, seed=1)
    found = profile(target, texts, cores[0], tmp_path)
    tokenizer = Tokenizer(DEMO_TARGET)
    async with worker_pair(
        target,
        Path(DEMO_DRAFT),
        target_arguments=["--cpu-affinity", str(cores[0]), "--always-listen"],
        draft_arguments=["--cpu-affinity", str(cores[1])],
    ) as pair:
        prompts = [tokenizer.encode(text) for text in texts]
        await read_all(pair, prompts)
        wrong: list[list[str]] = []
        moods: list[float] = []
        for _ in range(TRIES_MAX):
            served: dict[Load, Rates] = {}
            moods = []
            for load in LOADS:
                served |= await measured(pair, prompts, [load])
                moods.append((await measured(pair, prompts, FITTED[:1]))[FITTED[0]].tpot_ms)
            simulated = predicted(fleet_of(found, {load: served[load] for load in FITTED}))
            if max(moods) > MOOD_MAX * min(moods):
                continue
            if not (found_wrong := disagreements(simulated, served)):
                return
            wrong.append([*found_wrong, *differences(simulated, served)])
    if len(wrong) < 2:
        pytest.skip(f"others use these cores: a token took {', '.join(f'{mood:.2f}' for mood in moods)} ms, plainly")
    pytest.fail("\n\n".join("\n".join(each) for each in wrong))


def disagreements(simulated: Mapping[Load, Rates], served: Mapping[Load, Rates]) -> list[str]:
    """Descriptions of predictions that differ from the measurement by more than the machine's changes of speed
    explain."""
    found = []
    for name in ("tpot_ms", "tokens_per_s"):
        for load in LOADS:
            one, other = getattr(simulated[load], name), getattr(served[load], name)
            if one != pytest.approx(other, rel=TOLERANCE):
                found.append(f"{load}: {name} is {one:.2f} where {other:.2f} was measured")
        for first, second in itertools.combinations(LOADS, 2):
            ratio = getattr(served[first], name) / getattr(served[second], name)
            if not 1.0 / CLEARLY < ratio < CLEARLY:
                predicted_ratio = getattr(simulated[first], name) / getattr(simulated[second], name)
                if (predicted_ratio > 1.0) != (ratio > 1.0):
                    found.append(f"{first}, {second}: {name} in another order")
    return found
