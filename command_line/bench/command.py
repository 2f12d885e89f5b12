"""`outrider bench`: sends load to running servers and reports their speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from command_line.bench import report
from command_line.bench.cells import Cell, cells
from command_line.bench.document import document
from command_line.bench.options import BenchOptions
from command_line.bench.plot import draw
from command_line.bench.run import Run, measure
from command_line.client import CHAT, COMPLETIONS
from command_line.load.load import Loop, Plan, parse_levels
from command_line.load.prompts import Workload, parse_extra_body, parse_prompts
from command_line.load.servers import parse_servers
from command_line.load.summary import Slo
from command_line.report import check_writable, is_printed, print_notes, write_json
from command_line.settings import naming, takes_settings
from command_line.start.demo_prompts import DEMO_PROMPTS
from command_line.terminal import TerminalConsole
from outrider.engine.loading.machine import hardware
from outrider.local.until_signalled import run_until_signalled

DEFAULT_URL, DEFAULT_CONCURRENCY = "http://127.0.0.1:8000", "1,8"


@takes_settings(BenchOptions)
def bench(**given: Any) -> None:
    """Measure running servers under load: Outrider, vLLM, SGLang or any other server with OpenAI's API.

    Answers are streamed and timed on this machine. A closed loop (--concurrency) measures capacity. An open loop
    (--rate) measures what users of a public service would see, since they do not wait for one another. Several
    servers are measured alternately in rounds, so that a busy minute of the machine affects all of them.

    [bold]Words[/bold]

    TTFT is the time to the first output, E2EL to the last, TPOT = (E2EL - TTFT) ÷ (output tokens - 1), and ITL the
    gap between two chunks, each of which may contain several tokens. Goodput counts the answers within --slo-ttft-ms
    and --slo-tpot-ms. Output tokens come from the server's usage field if it sends one.

    [bold]Examples[/bold]

    [cyan]outrider bench --concurrency 1,8,32 --ignore-eos --plot load.svg[/cyan] measures the local server.

    [cyan]outrider bench --url ours=http://127.0.0.1:8000 --url vllm=http://127.0.0.1:9000 --rounds 5 --rate 5
    --slo-ttft-ms 500 --slo-tpot-ms 50 --json result.json[/cyan] compares two at 5 requests per second.

    [cyan]outrider bench --extra-body '{"speculation": {"enabled": false}}'[/cyan] measures Outrider without
    speculation.

    [bold]Exit status[/bold]

    0: measured; 1: a server could not be reached, or every request to it failed; 2: a flag is wrong.
    """
    options = BenchOptions(**given)
    run = _run(options)
    if options.requests and options.json is None:
        raise typer.BadParameter("needs --json, which they are written to", param_hint="--requests")
    check_writable("--json", options.json)
    check_writable("--plot", options.plot)
    status = run_until_signalled(lambda: measure(run, model=options.model, api_key=options.api_key))
    found = cells(run.names, run.measured, run.slo)
    if found:
        is_cut_short = status != 0
        _print(TerminalConsole(stderr=is_printed(options.json)), run, found, is_cut_short)
        made = document(run, found, has_requests=options.requests, is_cut_short=is_cut_short)
        write_json(made, options.json)
        if options.plot is not None:
            title = "Load on " + ", ".join(run.names)
            drawn = draw(title, report.panels(found, run.names), run.names, f"client: {hardware()}")
            options.plot.write_text(drawn, encoding="utf-8")
    raise typer.Exit(status or _exit_code(run, found))


def _run(options: BenchOptions) -> Run:
    """The run that the options describe. Raises typer's usage error."""
    if options.concurrency is not None and options.rate is not None:
        raise typer.BadParameter(
            "is another kind of load than --concurrency; give only one of them", param_hint="--rate"
        )
    loop, levels = (Loop.CLOSED, options.concurrency) if options.rate is None else (Loop.OPEN, options.rate)
    with naming(f"--{loop}"):
        plan = Plan(
            parse_levels(loop, DEFAULT_CONCURRENCY if levels is None else levels),
            options.rounds,
            options.num_requests,
            options.duration_s,
            options.warmup,
            options.seed or 0,
        )
    with naming("--url"):
        servers = parse_servers(options.url or [DEFAULT_URL])
    with naming("--prompts"):
        path = options.prompts
        prompts = DEMO_PROMPTS if path is None else parse_prompts(path.read_text(encoding="utf-8"))
    with naming("--extra-body"):
        extra = parse_extra_body(options.extra_body)
    workload = Workload(
        CHAT if options.chat else COMPLETIONS,
        prompts,
        options.max_tokens,
        options.temperature,
        options.seed,
        options.ignore_eos,
        extra,
    )
    return Run(servers, plan, workload, Slo(options.slo_ttft_ms, options.slo_tpot_ms), options.timeout_s)


def _print(console: Console, run: Run, found: Sequence[Cell], is_cut_short: bool) -> None:
    asked, num_rounds = run.workload, run.plan.num_rounds
    console.print(report.table(found, run.names))
    captions = (
        f"{asked.path}, at most {asked.max_tokens} tokens, temperature {asked.temperature:g}, "
        f"{'past the end token, ' if asked.ignore_eos else ''}{len(asked.prompts)} prompts",
        "times are p50 / p90 / p99 of n"
        + (f"; rates are medians of {num_rounds} rounds (lowest–highest)" if num_rounds > 1 else ""),
        f"client: {hardware()}",
    )
    print_notes(console, captions)
    for failure in report.failures(found):
        console.print(failure, soft_wrap=True)
    print_notes(console, (), report.warnings(found, len(asked.prompts)))
    if is_cut_short:
        console.print(Text("interrupted: only what was complete by then is counted", "yellow"), soft_wrap=True)


def _exit_code(run: Run, found: Sequence[Cell]) -> int:
    """1 if some server answered no request at all, so that there is no figure for it."""
    answered = {cell.server for cell in found if cell.summary.num_ok}
    silent = [name for name in run.names if name not in answered]
    if not silent:
        return 0
    causes = {cause for cell in found if cell.server in silent for cause in cell.summary.failures}
    TerminalConsole(stderr=True).print(
        Text.assemble(("outrider: ", "bold red"), f"every request to {', '.join(silent)} failed: {', '.join(causes)}"),
        soft_wrap=True,
    )
    return 1
