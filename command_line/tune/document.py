"""A profile as JSON, and as commands to paste. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from command_line.report import rounded
from command_line.tune.advice import Advice
from command_line.tune.agreement import coverage, hit_rate_after_miss
from command_line.tune.findings import Findings, ModelProfile
from command_line.tune.model import HintPace, Pair
from command_line.tune.placement.report import placements_dict
from command_line.tune.report import verdict, warnings

WORKER_HINT_WAIT_MS: Final = 10.0  # the target worker's own --hint-wait-ms


def flags(found: Findings) -> list[str]:
    """Commands to paste: for one machine first, then for single processes."""
    settings, paying = found.settings, found.paying
    common: list[object] = ["--dtype", settings.dtype]
    target: list[object] = ["--quantization", settings.quantization] if settings.quantization != "none" else []
    threads = ["--num-threads", settings.num_threads]
    if not paying:
        return [
            as_command("outrider serve", "--target", found.target, "--no-draft", *common, *target),
            as_command("outrider target-worker", "--model", found.target, *common, *target, *threads),
        ]
    # A bound for every batch size: the worker verifies fewer hints where fewer pay.
    target += ["--num-speculative-tokens", max(each.num_speculative_tokens for each in paying)]
    pool, wait = pool_words(paying), wait_words(found.pair, paying)
    return [
        as_command("outrider serve", "--target", found.target, "--draft", found.draft, *common, *target, *pool),
        as_command("outrider target-worker", "--model", found.target, *common, *target, *wait, *threads),
        as_command("outrider draft-worker", "--model", found.draft, *common, "--num-threads", 1),
    ]


def pool_words(paying: Sequence[Advice]) -> list[object]:
    """Flags of `outrider serve` for the draft workers that the largest of these batches needs."""
    num_drafts = paying[-1].drafts_per_target
    return ["--num-draft-workers", num_drafts] if num_drafts > 1 else []


def wait_words(pair: Pair, paying: Sequence[Advice]) -> list[object]:
    """Flags of a target worker that should wait longer for hints than it does unasked."""
    wait_ms = max(_wait_ms(pair, each) for each in paying)
    return ["--hint-wait-ms", math.ceil(wait_ms)] if wait_ms > WORKER_HINT_WAIT_MS else []


def _wait_ms(pair: Pair, advice: Advice) -> float:
    """Longest useful wait for hints, in ms: a restart and the hints after the first."""
    return HintPace.of(pair, advice.batch).delay_ms(advice.num_waited - 1) if advice.num_waited else 0.0


def as_command(command: str, *words: object) -> str:
    """A command to paste."""
    return f"{command} {shlex.join(map(str, words))}"


def profile_dict(own: ModelProfile) -> dict[str, Any]:
    """A model's step times."""
    times = own.times
    return {
        "step_ms_by_num_tokens": dict(zip(map(str, times.num_tokens), times.step_ms, strict=True)),
        "sequence_ms": times.sequence_ms,
        "knee_tokens": times.knee,
        "is_memory_bound": times.is_memory_bound,
        "num_parameters": own.num_parameters,
        "context_len": own.context_len,
        "spread": own.spread,
    }


def as_dict(found: Findings) -> dict[str, Any]:
    """The profile as JSON: times in milliseconds, shares from 0 to 1."""
    texts = found.pair.texts

    return rounded({
        "machine": found.machine,
        "settings": {"target": str(found.target), "draft": str(found.draft), **asdict(found.settings)},
        "target": profile_dict(found.target_profile),
        "draft": profile_dict(found.draft_profile),
        "overheads": asdict(found.pair.overheads),
        "texts": {
            "num_prompts": len(texts),
            "num_tokens": found.num_tokens,
            "acceptance_rate": coverage(texts, 1),
            "coverage_2": coverage(texts, 2),
            "coverage_4": coverage(texts, 4),
            "enumeration_hit_rate": hit_rate_after_miss(texts, 4),
            "ranks": texts,  # for `outrider simulate --pair`
        },
        "acceptance": [asdict(each) for each in found.acceptance],
        "advice": [
            asdict(each)
            | {"targets_per_draft": each.targets_per_draft, "drafts_per_target": each.drafts_per_target}
            for each in found.advice
        ],
        "placements": None if found.placements is None else placements_dict(found.placements),
        "verdict": verdict(found),
        "warnings": warnings(found),
        "flags": flags(found),
    })  # fmt: skip
