"""`outrider tune`: profiles a pair of models here, predicts the gain of speculation and recommends settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from command_line.checkout import DEMO_DRAFT, DEMO_TARGET
from command_line.load.prompts import parse_prompts
from command_line.progress import Progress
from command_line.report import print_notes
from command_line.settings import naming, takes_settings
from command_line.start.demo_prompts import DEMO_PROMPTS
from command_line.start.preflight import check_model, check_tokenizers
from command_line.terminal import TerminalConsole, print_line
from command_line.tune import document, report
from command_line.tune.advice import advise, usable_num_hints
from command_line.tune.agreement import Ranks, acceptances
from command_line.tune.findings import Findings, ModelProfile, Settings
from command_line.tune.model import Pair
from command_line.tune.options import TuneOptions
from command_line.tune.placement.devices import GB_PER_S, gpu_type, parse_prices
from command_line.tune.placement.measuring import (
    chosen_device,
    draft_on_cpu,
    gpu_name,
    on_one_more_core,
    why_no_more_cores,
)
from command_line.tune.placement.prediction import GpuProfiles, Placement, on_cores, on_gpus, predict
from command_line.tune.placement.report import WORDS as PLACEMENT_WORDS
from command_line.tune.placement.report import placement_table, placement_words
from command_line.tune.profile import DRAFT_SIZES, TARGET_SIZES, loaded, longest_sequence, step_times
from command_line.tune.sources import document as sources_document
from command_line.tune.sources import report as sources_report
from command_line.tune.sources.commands import flags
from command_line.tune.sources.compare import compare, measure
from command_line.tune.sources.comparison import Comparison
from command_line.tune.sources.measuring import Plan
from command_line.tune.sources.offers import HEADS, Offer, is_plain_model, offers
from command_line.tune.texts import GeneratedText, check_texts, generate, ranks_within
from command_line.tune.times import Overheads
from outrider.engine.loading.machine import hardware, usable_cores
from outrider.engine.options import Device
from outrider.errors import InvalidRequest
from outrider.text.tokenizer import Tokenizer

BATCH_SIZE_MAX = 1024


@takes_settings(TuneOptions)
def tune(**given: Any) -> None:
    """Profile a model pair on this machine and recommend settings: what will speculation gain, before serving it?

    It measures the time of a target step by number of tokens, the time of a draft step, and how often the draft's
    tokens equal the target's on your prompts. A replay of these measurements predicts the speed-up for every block
    length and batch size.

    Several sources of hints are compared on the same prompts, and the best one is recommended with its commands.
    Repeat [cyan]--draft[/cyan] for draft models, models with mask tokens and draft heads (EAGLE-3, Medusa), which are
    told apart by their folders, and give [cyan]--all-sources[/cyan] for what the target's own folder offers. Lookup
    always takes part. A single plain draft model gets a longer report of its own, which also says where the draft
    should run, and what its money would give as more of the target.

    [bold]Words[/bold]

    γ is the number of hints verified per step and session, τ the tokens that a step commits. Synchronous: draft and
    target wait for each other. Ahead: the draft continues while the target verifies, as Outrider's does. Bound: as if
    hints were free.

    [bold]Examples[/bold]

    [cyan]outrider tune[/cyan] profiles the demo pair.

    [cyan]outrider tune --target big --draft small --prompts recorded.jsonl --num-threads 8[/cyan] profiles your own
    pair.

    [cyan]outrider tune --target big --draft small --flags[/cyan] prints the commands to start.

    [cyan]outrider tune --target big --draft small --draft head --all-sources[/cyan] compares a draft model, a head and
    the target's own first layers.

    [bold]Exit status[/bold]

    0: measured, whatever the advice; 1: the pair cannot be served; 2: a flag is wrong.
    """
    options = TuneOptions(**given)
    if options.as_json and options.as_flags:
        raise typer.BadParameter("excludes --json, which has them too", param_hint="--flags")
    offered = _offered(options)
    if offered is not None:
        _tell_sources(options, _comparison(options, offered))
        return
    found = _findings(options, options.draft[0] if options.draft else DEMO_DRAFT)
    if options.as_json:
        print_line(json.dumps(document.as_dict(found)))
    elif options.as_flags:
        print_line("\n".join(document.flags(found)))
    else:
        _print(TerminalConsole(), found)


def _comparison(options: TuneOptions, offered: Sequence[Offer]) -> Comparison:
    """All sources, measured and predicted."""
    target = options.target
    if options.device == Device.CUDA:
        raise typer.BadParameter("several sources of hints are compared on CPUs", param_hint="--device")
    batches = _batches(options.batch_sizes)
    asked = _prompts(options.prompts)
    settings = _settings(options)
    models = [target, *(offer.folder for offer in offered if offer.kind not in HEADS)]
    prompts = _encoded(target, models, asked, options.max_tokens)
    plan = Plan(
        settings,
        _longest(prompts, settings),
        options.max_speculative_tokens,
        _overheads(options.overhead_ms, options.link_ms),
    )
    machine = hardware()
    with Progress(TerminalConsole(stderr=True)) as progress:
        with _pinned(options.cpu_affinity, options.num_threads):
            facts, sources = measure(target, offered, prompts, plan, progress)
        progress.say("Replaying.")
        return compare(facts, sources, batches, plan, machine, len(asked))


def _offered(options: TuneOptions) -> list[Offer] | None:
    """The sources to compare; None for one plain draft model, which gets a report of its own."""
    wants_more = options.all_sources or options.early_exit_layer
    drafts = options.draft
    if not drafts and (not wants_more or options.target == DEMO_TARGET):
        drafts = (DEMO_DRAFT,)
    check_model(options.target, "--target")
    if len(drafts) == 1 and not wants_more and is_plain_model(drafts[0]):
        return None
    return offers(options.target, drafts, options.early_exit_layer, is_everything=options.all_sources)


def _settings(options: TuneOptions) -> Settings:
    return Settings(
        options.dtype.value,
        options.quantization.value,
        options.num_threads,
        options.context_len,
        options.max_tokens,
        options.budget_s,
    )


def _longest(prompts: Sequence[Sequence[int]], settings: Settings) -> int:
    """Tokens of the longest sequence, generated or timed."""
    return max(
        max(map(len, prompts)) + settings.num_tokens,
        settings.context_len + max(settings.context_len, TARGET_SIZES[-1]),
    )


def _findings(options: TuneOptions, draft: Path) -> Findings:
    """Everything that is measured and predicted of one draft model."""
    target = options.target
    batches = _batches(options.batch_sizes)
    asked = _prompts(options.prompts)
    overheads = _overheads(options.overhead_ms, options.link_ms)
    prices = _prices(options)
    check_model(draft, "--draft")
    check_tokenizers(target, draft)
    settings = replace(_settings(options), device=chosen_device(options.device))
    prompt_token_ids = _encoded(target, [target, draft], asked, options.max_tokens)
    machine = hardware() if settings.device == "cpu" else f"{gpu_name()}; {hardware()}"
    with Progress(TerminalConsole(stderr=True)) as progress:
        with _pinned(options.cpu_affinity, options.num_threads):
            measured = _measure(target, draft, prompt_token_ids, settings, progress)
        pair = Pair(measured.target.times, measured.draft.times, measured.ranks, overheads)
        num_hints_max = usable_num_hints(pair, options.max_speculative_tokens)
        if num_hints_max < 1:
            raise InvalidRequest(
                "prompts", "too few tokens to compare: the answers end at once, or --budget-s is too short"
            )
        progress.say("Replaying.")
        return Findings(
            target,
            draft,
            settings,
            machine,
            measured.target,
            measured.draft,
            pair,
            acceptances(measured.ranks, num_hints_max),
            tuple(advise(pair, batch, num_hints_max) for batch in batches),
            num_prompts=len(asked),
            placements=predict(
                _placements(measured, pair, settings, prices, options.draft_gpu), batches, num_hints_max
            ),
        )


@dataclass(frozen=True, slots=True)
class _Measured:
    """Both models' profiles, the draft's ranks, and profiles of where else the models could run."""

    target: ModelProfile
    draft: ModelProfile
    ranks: tuple[Ranks, ...]
    target_on_more: ModelProfile | None  # on one core more than it has
    why_not_on_more: str
    draft_on_cpu: ModelProfile | None  # beside a GPU


def _placements(
    measured: _Measured, pair: Pair, settings: Settings, prices: dict[str, float], draft_gpu: str
) -> tuple[list[Placement], str]:
    """All placements that this machine offers, and why some are missing."""
    if settings.device == "cpu":
        more = None if measured.target_on_more is None else measured.target_on_more.times
        return on_cores(pair, more, settings.num_threads, measured.why_not_on_more)
    on_cpu = None if measured.draft_on_cpu is None else measured.draft_on_cpu.times
    return on_gpus(GpuProfiles(pair, gpu_type(gpu_name()), on_cpu), draft_gpu, prices)


def _prices(options: TuneOptions) -> dict[str, float]:
    """Prices of devices. Raises BadParameter for a price or a GPU that is not known."""
    if options.draft_gpu not in GB_PER_S:
        raise typer.BadParameter(
            f"{options.draft_gpu!r} is not known; known are {', '.join(GB_PER_S)}", param_hint="--draft-gpu"
        )
    try:
        return parse_prices(options.prices)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prices") from error


def _measure(
    target: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress,
) -> _Measured:
    """Measures both models' step times and the draft's ranks of the target's sequences. Raises OutriderError."""
    longest = _longest(prompts, settings)
    target_profile, target_on_more, texts = _measure_target(target, prompts, settings, progress, longest)
    check_texts(texts, settings.budget_s)
    progress.say(f"Loading {draft}.")
    with loaded(draft, settings, is_target=False, longest=longest) as engine:
        progress.say(f"Draft steps over up to {DRAFT_SIZES[-1]} nodes, at most {settings.budget_s:g} s.")
        draft_profile = step_times(engine, DRAFT_SIZES, settings, is_target=False)
        progress.say(f"The draft's candidates, at most {settings.budget_s:g} s.")
        ranks = ranks_within(engine, texts, settings.budget_s)
    on_cpu = None
    if settings.device != "cpu":
        progress.say(f"The draft on the CPU, at most {settings.budget_s:g} s.")
        on_cpu = draft_on_cpu(draft, settings, longest)
    return _Measured(target_profile, draft_profile, ranks, target_on_more, why_no_more_cores(settings), on_cpu)


def _measure_target(
    target: Path,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    progress: Progress,
    longest: int,
) -> tuple[ModelProfile, ModelProfile | None, list[GeneratedText]]:
    """Measures the target. Its own function, so that the target's memory is free before the draft is loaded."""
    progress.say(f"Loading {target}.")
    with loaded(target, settings, is_target=True, longest=longest) as engine:
        progress.say(f"Target steps over up to {TARGET_SIZES[-1]} tokens, at most {settings.budget_s:g} s.")
        profile = step_times(engine, TARGET_SIZES, settings, is_target=True)
        progress.say(f"The target's greedy outputs: {len(prompts)} prompts, at most {settings.budget_s:g} s.")
        texts = generate(engine, prompts, settings, progress.update)
        if settings.device == "cpu" and not why_no_more_cores(settings):
            progress.say(f"The target's steps on one core more, at most {settings.budget_s:g} s.")
        return profile, on_one_more_core(engine, settings), texts


def _encoded(target: Path, models: Sequence[Path], asked: Sequence[str], num_tokens: int) -> list[list[int]]:
    """Prompts as tokens. A prompt that is too long keeps its end: all models must fit it and its answer."""
    longest = min(map(longest_sequence, models))
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
    with naming("--prompts"):
        return parse_prompts(path.read_text(encoding="utf-8"))


def _overheads(overhead_ms: float | None, link_ms: float | None) -> Overheads:
    usual = Overheads()
    if overhead_ms is not None:
        usual = usual.scaled(overhead_ms / usual.plain_ms)
    return usual if link_ms is None else replace(usual, link_ms=link_ms)


@contextmanager
def _pinned(cores: str | None, num_threads: int) -> Iterator[None]:
    """Pins this process to `cores` while it measures."""
    from outrider.worker.worker_process import pin_to_cores  # imports gRPC, which would slow --help down

    before = os.sched_getaffinity(0) if cores else set()
    pin_to_cores(cores)
    try:
        if num_threads > len(usable_cores()):
            # The threads would spin while they wait for each other: a step would take 100 times as long.
            raise typer.BadParameter(
                f"{num_threads} threads have only {len(usable_cores())} cores", param_hint="--num-threads"
            )
        yield
    finally:
        if before:
            os.sched_setaffinity(0, before)


def _print(console: Console, found: Findings) -> None:
    tables = [report.steps_table(found), report.acceptance_table(found), report.advice_table(found)]
    lines, words = report.verdict(found), list(report.WORDS)
    if found.placements is not None:
        tables.append(placement_table(found.placements))
        lines += placement_words(found.placements)
        words.append(PLACEMENT_WORDS)
    for table in tables:
        console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    print_notes(console, [*words, report.caption(found)], report.warnings(found))


def _tell_sources(options: TuneOptions, found: Comparison) -> None:
    if options.as_json:
        print_line(json.dumps(sources_document.as_dict(found)))
        return
    if options.as_flags:
        print_line("\n".join(flags(found)))
        return
    console = TerminalConsole()
    for table in (sources_report.acceptance_table(found), sources_report.ranking_table(found)):
        console.print(table)
    for line in (*sources_report.verdict(found), *flags(found)):
        console.print(Text(line), soft_wrap=True)
    print_notes(console, [*sources_report.WORDS, sources_report.caption(found)], sources_report.warnings(found))
