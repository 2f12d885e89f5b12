"""`outrider demo`: starts the whole system, shows speculation at work and measures it against plain decoding."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from command_line.chat import legend, show, summary
from command_line.checkout import DEMO_DRAFT, DEMO_TARGET, module
from command_line.client import COMPLETIONS, Answer, new_client, stream
from command_line.progress import Progress
from command_line.start.comparison import Comparison, as_dict, compare, table
from command_line.start.demo_prompts import DEMO_PROMPTS
from command_line.start.deployment import Deployment
from command_line.start.system import cache_dir, new_log_dir, running_system
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
    draft: Path
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
        Path | None, typer.Option(help="A draft of your own instead of the demo's.", show_default=False)
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

    options = DemoOptions(target, draft or DEMO_DRAFT, small, dtype, num_tokens, budget_s, as_json, verbose)
    raise typer.Exit(run_until_signalled(lambda: _demo(options)))


async def _demo(options: DemoOptions) -> int:
    stderr, console = Console(stderr=True, highlight=False), Console(highlight=False)
    with Progress(stderr) as progress:
        deployment = Deployment(
            options.target or await _demo_target(options.small, progress),
            options.draft,
            dtype=options.dtype,
            enable_prefix_caching=False,  # every prompt is asked several times, and each should cost what it costs
            port=0,
            grpc_port=0,
            served_model_name=MODEL_NAME,
        )
        progress.say("Starting Redis, the workers and the coordinator.")
        async with running_system(
            deployment,
            redis_url=None,
            log_dir=new_log_dir(),
            on_event=progress.on_event,
            echo=progress.echo if options.verbose else None,
        ) as addresses:
            progress.note(f"{addresses.http}/v1, {addresses.grpc} (gRPC), logs in {addresses.log_dir}")
            body = {
                "model": MODEL_NAME,
                "temperature": 0,
                "ignore_eos": True,
                "max_tokens": options.num_tokens,
            }
            async with new_client(addresses.http) as client:
                progress.say("Waiting for the first hint.")
                await _wait_for_draft(client, body)
                with progress.paused():
                    await _show(client, body, console)
                rounds = await _measure(client, body, options.budget_s, progress)
            comparison = compare(rounds.off, rounds.on)
            with progress.paused():
                console.print(table(comparison, _caption(rounds, options)))
            progress.say("Stopping.")
    if options.as_json:
        print(json.dumps(_result(rounds, comparison, deployment)), flush=True)
    return 0 if comparison.identical else 1


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
    # In a process of its own: it needs torch, the supervisor does not.
    command = (*module("demo.grow"), "--model", str(DEMO_TARGET), "--out", str(grown))
    process = await asyncio.create_subprocess_exec(
        *command,
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
        raise ConfigurationError(f"growing the demo's target failed:\n{output.decode(errors='replace')[-2000:]}")
    return grown


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
