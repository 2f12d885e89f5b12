"""Does the prediction hold? The demo pair as `outrider tune` sees it, and as two workers serve it, in one test run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.shared.worker_pair import worker_pair
from benchmarks.speculation.speedup import measure, summarize
from command_line import app
from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from command_line.start.demo_prompts import DEMO_PROMPTS
from demo.grow import grow
from outrider.text.tokenizer import Tokenizer

NUM_TOKENS = 100
NUM_ROUNDS = 2
TOLERANCE = 0.35
"""Permitted error of the prediction, as a share of the measured ratio. It cannot be much less: two runs of one
measurement differ by 10 % where others use the cores, and steps are timed without the draft beside them, whose forward
passes share the memory and the last-level cache.

The target is grown, so that its step is many times what messages and Python cost. With the small one, whose step takes
a millisecond, the prediction is mostly that of constants that were measured on another machine, and one run in a few
was further off.
"""


def predicted(target: Path, core: int) -> dict[str, Any]:
    """The advice for batch 1, the target on a core of its own."""
    arguments = [
        "tune",
        *("--target", str(target), "--draft", str(DEMO_DRAFT)),
        "--json",
        "--batch-sizes",
        "1",
        "--max-tokens",
        str(NUM_TOKENS),
        "--cpu-affinity",
        str(core),
    ]
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, [*arguments, "--budget-s", "20"])
    assert result.exit_code == 0, result.stderr
    [advice] = json.loads(result.stdout)["advice"]
    assert isinstance(advice, dict)
    return advice


@pytest.mark.long
async def test_the_grown_demo_pair_is_as_fast_as_predicted(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("a draft rides ahead only on a core of its own")
    target = tmp_path / "grown"
    grow(Path(DEMO_TARGET), target)
    advice = predicted(target, cores[0])
    tokenizer = Tokenizer(DEMO_TARGET)
    prompts = [tokenizer.encode(text) for text in DEMO_PROMPTS]
    num_hints = advice["num_speculative_tokens"]
    assert num_hints > 0, "the demo pair is there to show that speculation pays"
    # What the draft gains: the worker's own trials of plain steps would be a good part of so short a run.
    async with worker_pair(
        target,
        Path(DEMO_DRAFT),
        target_arguments=[
            "--cpu-affinity",
            str(cores[0]),
            "--num-speculative-tokens",
            str(num_hints),
            "--always-listen",
        ],
        draft_arguments=["--cpu-affinity", str(cores[1])],
    ) as pair:
        measured = summarize(await measure(pair, prompts, NUM_TOKENS, NUM_ROUNDS))
    shown = f"predicted {advice['speedup']:.2f} with γ = {num_hints}, measured {measured}"
    assert measured["identical"], shown
    assert (advice["speedup"] > 1.0) == (measured["speedup"] > 1.0), shown
    assert abs(advice["speedup"] - measured["speedup"]) <= TOLERANCE * measured["speedup"], shown
