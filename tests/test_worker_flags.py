"""Tests of worker flags: defaults are defined in one place, and a bad value is refused before the model is loaded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draft_worker import __main__ as draft_worker
from draft_worker.limits import DraftLimits
from outrider.errors import ConfigurationError
from outrider.settings import from_flags
from target_worker import __main__ as target_worker
from target_worker.limits import SchedulerLimits
from target_worker.vllm import worker


def test_without_flags_a_worker_has_the_limits_that_the_code_has() -> None:
    assert from_flags(DraftLimits, draft_worker.parse_arguments(["--model", "m"])) == DraftLimits()
    assert from_flags(SchedulerLimits, target_worker.parse_arguments(["--model", "m"])) == SchedulerLimits()


def test_flags_reach_the_limits() -> None:
    flags = ["--model", "m", "--max-num-seqs", "3", "--min-reach", "0.2", "--max-alternatives", "1"]
    flags.append("--no-enable-prefix-caching")
    limits = from_flags(DraftLimits, draft_worker.parse_arguments(flags))
    assert limits == DraftLimits(max_num_seqs=3, min_reach=0.2, max_alternatives=1, enable_prefix_caching=False)
    flags = [
        "--model",
        "m",
        "--num-speculative-tokens",
        "2",
        "--no-lookup",
        "--always-listen",
        "--hint-wait-ms",
        "0",
    ]
    assert from_flags(SchedulerLimits, target_worker.parse_arguments(flags)) == SchedulerLimits(
        num_speculative_tokens=2, has_lookup=False, may_pause=False, hint_wait_ms_max=0.0
    )


@pytest.mark.parametrize(
    ("worker", "flag", "value"),
    [(draft_worker, "--max-nodes", "0"), (target_worker, "--num-speculative-tokens", "-1")],
    ids=["draft", "target"],
)
def test_a_bad_flag_is_refused_before_a_model_is_looked_for(worker: Any, flag: str, value: str) -> None:
    arguments = worker.parse_arguments(["--model", "/nowhere", flag, value])
    with pytest.raises(ConfigurationError, match=flag):
        asyncio.run(worker.serve(arguments))


def test_vllm_keeps_no_features_for_a_draft_head() -> None:
    kind = worker.kind(target_worker.PERMITTED)
    arguments = kind.parse_arguments(["--model", "/nowhere", "--draft-head", "/heads/mine"])
    with pytest.raises(ConfigurationError, match=r"--draft-head /heads/mine: vLLM keeps no features"):
        asyncio.run(worker.serve(kind, (), arguments))
