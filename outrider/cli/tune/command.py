"""`outrider tune`: profiles a pair of models here and says what speculation will gain, and with which settings."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.bench.prompts import parse_prompts
from outrider.cli.demo_prompts import DEMO_PROMPTS
from outrider.cli.deployment import DEMO_DRAFT, DEMO_TARGET, Dtype, Quantization
from outrider.cli.preflight import check_model, check_tokenizers
from outrider.cli.progress import Progress
from outrider.cli.tune import document, options, report
from outrider.cli.tune.advice import advise, usable_num_hints
from outrider.cli.tune.agreement import Ranks, acceptances
from outrider.cli.tune.findings import Findings, ModelProfile, Settings
from outrider.cli.tune.model import Pair
from outrider.cli.tune.profile import DRAFT_SIZES, TARGET_SIZES, loaded, longest_sequence, step_times
from outrider.cli.tune.texts import GeneratedText, check_texts, generate, ranks_within
from outrider.cli.tune.times import Overheads
from outrider.errors import InvalidRequest
from outrider.machine import hardware, usable_cores
from outrider.tokenizer import Tokenizer

BATCH_SIZE_MAX = 1024


def tune(
    target: options.Target = DEMO_TARGET,
    draft: options.Draft = DEMO_DRAFT,
    prompts: options.Prompts = None,
    dtype: options.DtypeChoice = Dtype.BFLOAT16,
    quantization: options.QuantizationChoice = Quantization.NONE,
    num_threads: options.NumThreads = 1,
    cpu_affinity: options.CpuAffinity = None,
    batch_sizes: options.BatchSizes = "1,4,8,16,32",
    context_len: options.ContextLen = 256,
    max_speculative_tokens: options.MaxSpeculativeTokens = 12,
    overhead_ms: options.OverheadMs = None,
    link_ms: options.LinkMs = None,
    max_tokens: options.MaxTokens = 100,
    budget_s: options.BudgetS = 10.0,
    as_json: options.AsJson = False,
    as_flags: options.AsFlags = False,
) -> None:
    """Profile a model pair on this machine and recommend settings: what will speculation gain, before serving it?

    Three things are measured: what a target step costs by the number of tokens fed, what a draft step costs, and how
    often the draft says what the target says on your prompts. A replay of the one over the other predicts the
    speed-up for every block length and batch size.

    [bold]Words[/bold]

    γ is the number of hints verified per step and session; τ the tokens that a step commits. Synchronous: draft and
    target take turns. Ahead: the draft goes on meanwhile, as Outrider's does. Bound: hints for nothing.

    [bold]Examples[/bold]

    [cyan]outrider tune[/cyan] looks at the demo pair.

    [cyan]outrider tune --target big --draft small --prompts recorded.jsonl --num-threads 8[/cyan] at a pair of yours.

    [cyan]outrider tune --target big --draft small --flags[/cyan] prints what to start.

    [bold]Exit status[/bold]

    0 measured, whatever the advice is; 1 the pair cannot be served together or at all; 2 a flag is wrong.
    """
    if as_json and as_flags:
        raise typer.BadParameter("excludes --json, which has them too", param_hint="--flags")
    batches = _batches(batch_sizes)
    asked = _prompts(prompts)
    overheads = _overheads(overhead_ms, link_ms)
    check_model(target, "--target")
    check_model(draft, "--draft")
    check_tokenizers(target, draft)
    settings = Settings(dtype.value, quantization.value, num_threads, context_len, max_tokens, budget_s)
    prompt_token_ids = _encoded(target, draft, asked, max_tokens)
    machine = hardware()
    with Progress(Console(stderr=True, highlight=False)) as progress:
        with _pinned(cpu_affinity, num_threads):
            target_profile, draft_profile, ranks = _measure(
                target, draft, prompt_token_ids, settings, progress
            )
        pair = Pair(target_profile.times, draft_profile.times, ranks, overheads)
        num_hints_max = usable_num_hints(pair, max_speculative_tokens)
        if num_hints_max < 1:
            raise InvalidRequest(
                "prompts", "too little text to compare: the answers end at once, or --budget-s is too short"
            )
        progress.say("Replaying.")
        found = Findings(
            target,
            draft,
            settings,
            machine,
            target_profile,
            draft_profile,
            pair,
            acceptances(ranks, num_hints_max),
            tuple(advise(pair, batch, num_hints_max) for batch in batches),
            num_prompts=len(asked),
        )
    if as_json:
        print(json.dumps(document.as_dict(found)), flush=True)
    elif as_flags:
        print("\n".join(document.flags(found)))
    else:
        _print(Console(highlight=False), found)


def _measure(
    target: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress,
) -> tuple[ModelProfile, ModelProfile, tuple[Ranks, ...]]:
    """Both models' step times, and the draft's ranks of the target's texts. Raises OutriderError."""
    longest = max(
        max(map(len, prompts)) + settings.num_tokens,
        settings.context_len + max(settings.context_len, TARGET_SIZES[-1]),
    )
    target_profile, texts = _measure_target(target, prompts, settings, progress, longest)
    check_texts(texts, settings.budget_s)
    progress.say(f"Loading {draft}.")
    with loaded(draft, settings, is_target=False, longest=longest) as engine:
        progress.say(f"Draft steps over up to {DRAFT_SIZES[-1]} nodes, at most {settings.budget_s:g} s.")
        draft_profile = step_times(engine, DRAFT_SIZES, settings, is_target=False)
        progress.say(f"The draft's guesses, at most {settings.budget_s:g} s.")
        return target_profile, draft_profile, ranks_within(engine, texts, settings.budget_s)


def _measure_target(
    target: Path,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress,
    longest: int,
) -> tuple[ModelProfile, list[GeneratedText]]:
    """A function of its own, so that the target's memory is free before the draft is loaded."""
    progress.say(f"Loading {target}.")
    with loaded(target, settings, is_target=True, longest=longest) as engine:
        progress.say(f"Target steps over up to {TARGET_SIZES[-1]} tokens, at most {settings.budget_s:g} s.")
        profile = step_times(engine, TARGET_SIZES, settings, is_target=True)
        progress.say(f"The target's greedy texts: {len(prompts)} prompts, at most {settings.budget_s:g} s.")
        return profile, generate(engine, prompts, settings, progress.update)


def _encoded(target: Path, draft: Path, asked: Sequence[str], num_tokens: int) -> list[list[int]]:
    """Prompts as tokens. One that is too long keeps its end: both models must be able to read it and its answer."""
    longest = min(longest_sequence(target), longest_sequence(draft))
    if longest <= num_tokens:
        raise typer.BadParameter(
            f"{num_tokens} is more than fits into the models' {longest} tokens", param_hint="--max-tokens"
        )
    tokenizer = Tokenizer(target)
    prompts = [token_ids[num_tokens - longest :] for text in asked if (token_ids := tokenizer.encode(text))]
    if not prompts:
        raise typer.BadParameter("no prompt has a token", param_hint="--prompts")
    return prompts


def _batches(text: str) -> list[int]:
    try:
        batches = sorted({int(part) for part in text.split(",")})
    except ValueError:
        batches = []
    if not batches or not 1 <= batches[0] <= batches[-1] <= BATCH_SIZE_MAX:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers from 1 to {BATCH_SIZE_MAX} such as 1,8",
            param_hint="--batch-sizes",
        )
    return batches


def _prompts(path: Path | None) -> Sequence[str]:
    if path is None:
        return DEMO_PROMPTS
    try:
        return parse_prompts(path.read_text(encoding="utf-8"))
    except (InvalidRequest, OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--prompts") from error


def _overheads(overhead_ms: float | None, link_ms: float | None) -> Overheads:
    for flag, value in (("--overhead-ms", overhead_ms), ("--link-ms", link_ms)):
        # The range lets through what compares with nothing.
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number", param_hint=flag)
    usual = Overheads()
    if overhead_ms is not None:
        usual = usual.scaled(overhead_ms / usual.plain_ms)
    return usual if link_ms is None else replace(usual, link_ms=link_ms)


@contextmanager
def _pinned(cores: str | None, num_threads: int) -> Iterator[None]:
    """This process on `cores`, as long as it measures."""
    from outrider.worker_process import pin_to_cores  # brings gRPC, which --help need not wait for

    before = os.sched_getaffinity(0) if cores else set()
    pin_to_cores(cores)
    try:
        if num_threads > len(usable_cores()):
            # They would wait for one another by turning in circles: a step takes a hundred times as long.
            raise typer.BadParameter(
                f"{num_threads} threads have only {len(usable_cores())} cores", param_hint="--num-threads"
            )
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def _print(console: Console, found: Findings) -> None:
    for table in (report.steps_table(found), report.acceptance_table(found), report.advice_table(found)):
        console.print(table)
    for line in report.verdict(found):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(report.caption(found), "dim"), soft_wrap=True)
    for warning in report.warnings(found):
        console.print(Text(f"note: {warning}", "yellow"), soft_wrap=True)
