"""`outrider demo`: starts the whole system, shows speculation at work and measures it against plain decoding."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from command_line.chat import legend, show, summary
from command_line.checkout import DEMO_DRAFT, DEMO_HEAD, DEMO_PARALLEL_DRAFT, DEMO_TARGET, module
from command_line.client import COMPLETIONS, Answer, new_client, stream
from command_line.progress import Progress
from command_line.start.comparison import Comparison, as_dict, compare, recommendation, sources_table, table
from command_line.start.demo_prompts import DEMO_PROMPTS
from command_line.start.deployment import Deployment
from command_line.start.drafters import Drafter, DrafterName, chosen, offered
from command_line.start.system import cache_dir, new_log_dir, running_system
from command_line.terminal import TerminalConsole, print_line
from outrider.engine.heads.kind import is_head
from outrider.engine.loading.machine import GIB, available_memory, hardware
from outrider.engine.options import Dtype
from outrider.errors import ConfigurationError
from outrider.local.until_signalled import run_until_signalled

MODEL_NAME = "outrider-demo"
GROWN_MEMORY_MIN = 6 * GIB  # the grown target beside its packed copy, Ray and the rest
NUM_ROUNDS_MAX = 3
DRAFT_TIMEOUT_S = 10.0  # for the first hint to be verified, after which the demo goes on without


@dataclass(frozen=True)
class DemoOptions:
    """The command line of `outrider demo`."""

    target: Path | None  # None: the demo's own, grown or not
    drafts: list[Path]  # empty: the demo's own
    drafters: list[DrafterName]  # empty: the first draft alone, and more is shown
    small: bool
    dtype: Dtype
    num_tokens: int
    budget_s: float
    as_json: bool
    verbose: bool


@dataclass
class Rounds:
    """Every measured answer, by prompt."""

    off: dict[str, list[Answer]] = field(default_factory=dict)
    on: dict[str, list[Answer]] = field(default_factory=dict)
    num_rounds: int = 0


def demo(
    target: Annotated[
        Path | None, typer.Option(help="A target of your own instead of the demo's.", show_default=False)
    ] = None,
    draft: Annotated[
        list[Path] | None,
        typer.Option(help="A draft of your own instead of the demo's; repeat it with --drafter.", show_default=False),
    ] = None,
    drafter: Annotated[
        list[DrafterName] | None,
        typer.Option(
            help="Compare sources of hints, one after the other: these, or all that the folders offer.",
            show_default=False,
        ),
    ] = None,
    small: Annotated[
        bool,
        typer.Option("--small", help="Use the demo target as it is (14 M parameters), not grown to 275 M."),
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights in memory.")] = Dtype.BFLOAT16,
    num_tokens: Annotated[int, typer.Option(min=2, max=1000, help="Tokens per answer.")] = 100,
    budget_s: Annotated[
        float, typer.Option(min=0, help="Seconds of measuring after which no further round begins.")
    ] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the processes' logs.")] = False,
) -> None:
    """Start everything, stream some answers, compare speculation off and on, stop everything.

    The demo's target is grown to the cost of 275 M parameters, without changing its output, if 6 GiB of
    memory are free: a smaller model leaves little to save. Exits with 1 if speculation changed any output.
    """

    drafts = list(draft or [])
    if len(drafts) > 1 and not drafter:
        raise typer.BadParameter("several drafts are compared with --drafter all", param_hint="--draft")
    options = DemoOptions(*(target, drafts, list(drafter or []), small, dtype, num_tokens, budget_s, as_json, verbose))
    raise typer.Exit(run_until_signalled(lambda: _demo(options)))


async def _demo(options: DemoOptions) -> int:
    stderr, console = TerminalConsole(stderr=True), TerminalConsole()
    with Progress(stderr) as progress:
        target = options.target or await _demo_target(options.small, progress)
        if options.drafters:
            return await _compare_drafters(options, target, console, progress)
        draft = options.drafts[0] if options.drafts else DEMO_DRAFT
        deployment = _deployment(options, target, {"draft": draft, "draft_head": draft if is_head(draft) else None})
        rounds, comparison = await _run(options, deployment, progress, console)
        with progress.paused():
            console.print(table(comparison, _caption(rounds, options)))
        progress.say("Stopping.")
    if options.as_json:
        print_line(json.dumps(_result(rounds, comparison, deployment)))
    return 0 if comparison.identical else 1


def _deployment(options: DemoOptions, target: Path, changes: Mapping[str, Any]) -> Deployment:
    return Deployment(
        target,
        **{"draft": None, **changes},
        dtype=options.dtype,
        enable_prefix_caching=False,  # every prompt is asked several times, and each should cost what it costs
        port=0,
        grpc_port=0,
        served_model_name=MODEL_NAME,
    )


async def _run(
    options: DemoOptions, deployment: Deployment, progress: Progress, console: Console | None
) -> tuple[Rounds, Comparison]:
    """Starts a system, measures it with speculation off and on, and stops it. Answers are shown on `console`."""
    progress.say("Starting Redis, the workers and the coordinator.")
    async with running_system(
        deployment,
        redis_url=None,
        log_dir=new_log_dir(),
        on_event=progress.on_event,
        echo=progress.echo if options.verbose else None,
    ) as addresses:
        progress.note(f"{addresses.http}/v1, {addresses.grpc} (gRPC), logs in {addresses.log_dir}")
        body = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True, "max_tokens": options.num_tokens}
        async with new_client(addresses.http) as client:
            if deployment.draft is not None:
                progress.say("Waiting for the first hint.")
                await _wait_for_draft(client, body)
            if console is not None:
                with progress.paused():
                    await _show(client, body, console)
            rounds = await _measure(client, body, options.budget_s, progress)
        return rounds, compare(rounds.off, rounds.on)


async def _compare_drafters(options: DemoOptions, target: Path, console: Console, progress: Progress) -> int:
    """Measures one source after the other, each in a system of its own."""
    drafts = options.drafts or await _demo_drafts(target)
    drafters = chosen(options.drafters, offered(target, drafts))
    results: list[tuple[Drafter, Comparison]] = []
    for number, drafter in enumerate(drafters, 1):
        progress.say(f"Source {number} of {len(drafters)}: {drafter.words}.")
        deployment = _deployment(options, target, drafter.changes)
        rounds, comparison = await _run(options, deployment, progress, None)
        results.append((drafter, comparison))
    best, found = max(results, key=lambda result: result[1].speedup)
    command = ["outrider", "serve", "--target", str(target), *best.flags]
    rows = [(each.words, comparison) for each, comparison in results]
    with progress.paused():
        console.print(sources_table(rows, _caption(rounds, options)))
        console.print(Text(recommendation(best.words, found, command)), soft_wrap=True)
    if options.as_json:
        print_line(json.dumps(_sources_result(results, target, options)))
    return 0 if all(comparison.identical for _, comparison in results) else 1


async def _demo_drafts(target: Path) -> list[Path]:
    """The demo's drafts, the head grown with its target."""
    drafts = [folder for folder in (DEMO_DRAFT, DEMO_PARALLEL_DRAFT) if folder.is_dir()]
    if not DEMO_HEAD.is_dir():
        return drafts
    if target == DEMO_TARGET:
        return [*drafts, DEMO_HEAD]
    grown = cache_dir() / "grown_head"
    await _grow("demo.eagle3.grow", "--head", DEMO_HEAD, "--out", grown)
    return [*drafts, grown]


def _caption(rounds: Rounds, options: DemoOptions) -> str:
    size = f"{rounds.num_rounds} × {len(rounds.on)} prompts × {options.num_tokens} tokens"
    return f"{size}, greedy, {options.dtype}; {hardware()}"


async def _demo_target(small: bool, progress: Progress) -> Path:
    """The demo's target, grown where memory allows. The growth is cached and costs a second time nothing."""
    if small or available_memory() < GROWN_MEMORY_MIN:
        if not small:
            progress.say("Less than 6 GiB of memory are free: using the small target.")
        return DEMO_TARGET
    if not DEMO_TARGET.is_dir():
        raise ConfigurationError(f"{DEMO_TARGET} is missing; name models of your own with --target and --draft")
    progress.say("Growing the demo's target to 275 M parameters.")
    grown = cache_dir() / "grown"
    await _grow("demo.grow", "--model", DEMO_TARGET, "--out", grown)
    return grown


async def _grow(*command: object) -> None:
    """Runs a growth, which does nothing where its output is there already. Raises ConfigurationError."""
    # In a process of its own: it needs torch, the supervisor does not.
    name, *arguments = map(str, command)
    process = await asyncio.create_subprocess_exec(
        *module(name),
        *arguments,
        cwd=DEMO_TARGET.parents[1],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ConfigurationError(f"growing the demo's models failed:\n{output.decode(errors='replace')[-2000:]}")


def _with_speculation(body: dict[str, Any], prompt: str, *, enabled: bool) -> dict[str, Any]:
    return {**body, "prompt": prompt, "speculation": {"enabled": enabled, "detail": True}}


async def _complete(client: httpx.AsyncClient, body: dict[str, Any], prompt: str, *, enabled: bool) -> Answer:
    request = _with_speculation(body, prompt, enabled=enabled)
    return await stream(client, COMPLETIONS, request, lambda pieces: None)


async def _wait_for_draft(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Short requests until one had hints verified; they warm everything up besides."""
    deadline = time.monotonic() + DRAFT_TIMEOUT_S
    short = {**body, "max_tokens": 16}
    await _complete(client, short, DEMO_PROMPTS[0], enabled=False)
    while time.monotonic() < deadline:
        answer = await _complete(client, short, DEMO_PROMPTS[0], enabled=True)
        if answer.speculation.get("num_draft_tokens"):
            return
        await asyncio.sleep(0.2)


async def _show(client: httpx.AsyncClient, body: dict[str, Any], console: Console) -> None:
    """Streams every prompt's answer, each token in the colour of its origin."""
    if (shown := legend(console)) is not None:
        console.print(shown, soft_wrap=True)
    for number, prompt in enumerate(DEMO_PROMPTS, 1):
        console.print(Rule(f"prompt {number}", style="dim"))
        console.print(Text(prompt, "dim"), end="", soft_wrap=True)
        request = _with_speculation(body, prompt, enabled=True)
        answer = await stream(client, COMPLETIONS, request, lambda pieces: show(console, pieces))
        console.print(Text(f"\n\n{summary(answer)}", "dim"), soft_wrap=True)
    console.print(Rule(style="dim"))


async def _measure(client: httpx.AsyncClient, body: dict[str, Any], budget_s: float, progress: Progress) -> Rounds:
    """Every prompt off and on, in turns, so that whatever else the machine does falls on both alike."""
    rounds = Rounds({prompt: [] for prompt in DEMO_PROMPTS}, {prompt: [] for prompt in DEMO_PROMPTS})
    began_s = time.monotonic()
    for round_index in range(NUM_ROUNDS_MAX):
        elapsed_s = time.monotonic() - began_s
        if round_index and elapsed_s * (round_index + 1) / round_index > budget_s:
            break
        rounds.num_rounds += 1
        progress.say(f"Measuring, round {round_index + 1}: every prompt, speculation off and on in turns.")
        for prompt, enabled in itertools.product(DEMO_PROMPTS, (False, True)):
            number, mode = DEMO_PROMPTS.index(prompt) + 1, "on" if enabled else "off"
            progress.update(f"Measuring, round {round_index + 1}: prompt {number}, speculation {mode}.")
            answers = rounds.on if enabled else rounds.off
            answers[prompt].append(await _complete(client, body, prompt, enabled=enabled))
    return rounds


def _result(rounds: Rounds, comparison: Comparison, deployment: Deployment) -> dict[str, object]:
    return {
        "prompts": [{"prompt": prompt, "text": answers[-1].text} for prompt, answers in rounds.on.items()],
        **as_dict(comparison),
        "num_rounds": rounds.num_rounds,
        "target": deployment.target.name,
        "draft": deployment.draft.name if deployment.draft is not None else None,
        "dtype": str(deployment.dtype),
        "hardware": hardware(),
        "python": sys.version.split()[0],
    }


def _sources_result(
    results: Sequence[tuple[Drafter, Comparison]], target: Path, options: DemoOptions
) -> dict[str, object]:
    best = max(results, key=lambda result: result[1].speedup)[0]
    return {
        "sources": [
            {"drafter": str(each.name), "source": each.words, "flags": list(each.flags), **as_dict(comparison)}
            for each, comparison in results
        ],
        "recommended": str(best.name),
        "target": target.name,
        "dtype": str(options.dtype),
        "hardware": hardware(),
    }
