"""Does the prediction hold? The demo pair as `outrider tune` sees it, and as two workers serve it, in one test run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.speedup import measure, summarize
from benchmarks.worker_pair import worker_pair
from outrider.cli import app
from outrider.cli.demo_prompts import DEMO_PROMPTS
from outrider.cli.deployment import DEMO_DRAFT, DEMO_TARGET
from outrider.tokenizer import Tokenizer

NUM_TOKENS = 100
NUM_ROUNDS = 2
TOLERANCE = 0.35
"""Of the measured ratio: with the demo pair's near 1.65, predictions from 1.1 to 2.2 pass. Plain speed does not, nor a
replay that forgets the workers' overheads (2.8) or what hints cost (5). Runs on a machine that others used were 6 to
20 % off.

It cannot be much less. Two runs of one measurement differ by 10 % where others use the cores; steps are timed without
the draft beside them, whose forward passes share the memory and the last cache; and the constants for messages and
Python are those of one machine.
"""


def predicted(core: int) -> dict[str, Any]:
    """The advice for batch 1, the target on a core of its own."""
    arguments = [
        "tune",
        "--json",
        "--batch-sizes",
        "1",
        "--max-tokens",
        str(NUM_TOKENS),
        "--cpu-affinity",
        str(core),
    ]
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, [*arguments, "--budget-s", "4"])
    assert result.exit_code == 0, result.stderr
    [advice] = json.loads(result.stdout)["advice"]
    assert isinstance(advice, dict)
    return advice


@pytest.mark.slow
async def test_the_demo_pair_is_as_fast_as_predicted() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("a draft rides ahead only on a core of its own")
    advice = predicted(cores[0])
    tokenizer = Tokenizer(DEMO_TARGET)
    prompts = [tokenizer.encode(text) for text in DEMO_PROMPTS]
    num_hints = advice["num_speculative_tokens"]
    assert num_hints > 0, "the demo pair is there to show that speculation pays"
    # What the draft gains, alone: hints that are looked up in former answers would come on top, and the worker's own
    # trials of plain steps would be a good part of so short a run.
    alone = ["--always-listen", "--max-lookup-tokens", "0"]
    async with worker_pair(
        Path(DEMO_TARGET),
        Path(DEMO_DRAFT),
        target_arguments=[
            "--cpu-affinity",
            str(cores[0]),
            "--num-speculative-tokens",
            str(num_hints),
            *alone,
        ],
        draft_arguments=["--cpu-affinity", str(cores[1])],
    ) as pair:
        measured = summarize(await measure(pair, prompts, NUM_TOKENS, NUM_ROUNDS))
    shown = f"predicted {advice['speedup']:.2f} with γ = {num_hints}, measured {measured}"
    assert measured["identical"], shown
    assert (advice["speedup"] > 1.0) == (measured["speedup"] > 1.0), shown
    assert abs(advice["speedup"] - measured["speedup"]) <= TOLERANCE * measured["speedup"], shown
