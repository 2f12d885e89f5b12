"""`outrider bench`: puts load on running servers and reports how they bear it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.bench import options, report
from outrider.cli.bench.cells import Cell, cells
from outrider.cli.bench.document import document
from outrider.cli.bench.load import Loop, Plan, parse_levels
from outrider.cli.bench.plot import draw
from outrider.cli.bench.prompts import CHAT, COMPLETIONS, Workload, parse_extra_body, parse_prompts
from outrider.cli.bench.run import Run, measure
from outrider.cli.bench.servers import parse_servers
from outrider.cli.bench.summary import Slo
from outrider.cli.demo_prompts import DEMO_PROMPTS
from outrider.cli.system import run_until_signalled
from outrider.errors import InvalidRequest
from outrider.machine import hardware

DEFAULT_URL, DEFAULT_CONCURRENCY = "http://127.0.0.1:8000", "1,8"


def bench(
    url: options.Url = None,
    model: options.Model = None,
    api_key: options.ApiKey = None,
    timeout_s: options.TimeoutS = 120.0,
    concurrency: options.Concurrency = None,
    rate: options.Rate = None,
    num_requests: options.NumRequests = None,
    duration_s: options.DurationS = None,
    warmup: options.Warmup = None,
    num_rounds: options.NumRounds = 1,
    prompts: options.Prompts = None,
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    ignore_eos: options.IgnoreEos = False,
    extra_body: options.ExtraBody = None,
    slo_ttft_ms: options.SloTtftMs = None,
    slo_tpot_ms: options.SloTpotMs = None,
    json_file: options.JsonFile = None,
    requests: options.Requests = False,
    plot: options.Plot = None,
) -> None:
    """Measure running servers under load: Outrider, vLLM, SGLang, whatever speaks OpenAI's API.

    Requests are streamed and timed where they arrive, here. A closed loop (--concurrency) shows what a server can do;
    an open loop (--rate) shows what users of a public service would feel, for they do not wait for one another.
    Several servers take turns in rounds, so that a busy minute of the machine meets all of them.

    [bold]Words[/bold]

    TTFT is the time to the first text, E2EL to the last, TPOT = (E2EL - TTFT) ÷ (output tokens - 1), and ITL the gap
    between two chunks, of which one may bring several tokens. Goodput counts the answers that keep --slo-ttft-ms and
    --slo-tpot-ms. Output tokens are those of the server's own usage field where it sends one.

    [bold]Examples[/bold]

    [cyan]outrider bench --concurrency 1,8,32 --ignore-eos --plot load.svg[/cyan] looks at the server next door.

    [cyan]outrider bench --url ours=http://127.0.0.1:8000 --url vllm=http://127.0.0.1:9000 --rounds 5 --rate 5
    --slo-ttft-ms 500 --slo-tpot-ms 50 --json result.json[/cyan] compares two at 5 requests per second.

    [cyan]outrider bench --extra-body '{"speculation": {"enabled": false}}'[/cyan] is Outrider without speculation.

    [bold]Exit status[/bold]

    0 measured; 1 a server could not be reached, or every request to it failed; 2 a flag is wrong.
    """
    for flag, value in (
        ("--timeout-s", timeout_s),
        ("--duration-s", duration_s),
        ("--temperature", temperature),
        ("--slo-ttft-ms", slo_ttft_ms),
        ("--slo-tpot-ms", slo_tpot_ms),
    ):
        # The ranges let through what compares with nothing.
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(f"{value} is not a finite number", param_hint=flag)
    plan = _plan(concurrency, rate, num_requests, duration_s, warmup, num_rounds, seed)
    with _naming("--url"):
        servers = parse_servers(url or [DEFAULT_URL])
    with _naming("--prompts"):
        asked = DEMO_PROMPTS if prompts is None else parse_prompts(prompts.read_text(encoding="utf-8"))
    with _naming("--extra-body"):
        extra = parse_extra_body("{}" if extra_body is None else extra_body)
    endpoint = CHAT if chat else COMPLETIONS
    workload = Workload(endpoint, asked, max_tokens, temperature, seed, ignore_eos, extra)
    run = Run(servers, plan, workload, Slo(slo_ttft_ms, slo_tpot_ms), timeout_s)
    if requests and json_file is None:
        raise typer.BadParameter("needs --json, which is where they go", param_hint="--requests")
    is_json_printed = json_file is not None and str(json_file) == "-"
    _check_writable("--json", None if is_json_printed else json_file)
    _check_writable("--plot", plot)
    status = run_until_signalled(lambda: measure(run, model=model, api_key=api_key))
    found = cells(run.names, run.measured, run.slo)
    if found:
        _print(Console(stderr=is_json_printed, highlight=False), run, found, is_cut_short=status != 0)
        text = json.dumps(document(run, found, has_requests=requests, is_cut_short=status != 0))
        if is_json_printed:
            print(text, flush=True)
        elif json_file is not None:
            json_file.write_text(text + "\n", encoding="utf-8")
        if plot is not None:
            title = "Load on " + ", ".join(run.names)
            drawn = draw(title, report.panels(found, run.names), run.names, f"client: {hardware()}")
            plot.write_text(drawn, encoding="utf-8")
    raise typer.Exit(status or _exit_code(run, found))


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    """Errors about a flag's value become usage errors that name the flag."""
    try:
        yield
    except (InvalidRequest, OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error


def _plan(
    concurrency: str | None,
    rate: str | None,
    num_requests: int | None,
    duration_s: float | None,
    num_warmup: int | None,
    num_rounds: int,
    seed: int | None,
) -> Plan:
    if concurrency is not None and rate is not None:
        raise typer.BadParameter("is another kind of load than --concurrency; give one", param_hint="--rate")
    if rate is None:
        with _naming("--concurrency"):
            levels = parse_levels(Loop.CLOSED, DEFAULT_CONCURRENCY if concurrency is None else concurrency)
    else:
        with _naming("--rate"):
            levels = parse_levels(Loop.OPEN, rate)
    return Plan(levels, num_rounds, num_requests, duration_s, num_warmup, seed or 0)


def _check_writable(flag: str, path: Path | None) -> None:
    """Before the load, not after: an hour's figures must not be lost to a misspelt folder."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise typer.BadParameter(f"{str(path)!r} cannot be written", param_hint=flag)


def _print(console: Console, run: Run, found: Sequence[Cell], *, is_cut_short: bool) -> None:
    asked, num_rounds = run.workload, run.plan.num_rounds
    console.print(report.table(found, run.names))
    # Not the table's caption, which would be as narrow as the table.
    for line in (
        f"{asked.path}, at most {asked.max_tokens} tokens, temperature {asked.temperature:g}, "
        f"{'past the end of text, ' if asked.ignore_eos else ''}{len(asked.prompts)} prompts",
        "times are p50 / p90 / p99 of n"
        + (f"; rates are medians of {num_rounds} rounds (lowest–highest)" if num_rounds > 1 else ""),
        f"client: {hardware()}",
    ):
        console.print(Text(line, "dim"), soft_wrap=True)
    for failure in report.failures(found):
        console.print(failure, soft_wrap=True)
    for warning in report.warnings(found, len(asked.prompts)):
        console.print(Text(f"note: {warning}", "yellow"), soft_wrap=True)
    if is_cut_short:
        console.print(
            Text("interrupted: only what was complete by then is counted", "yellow"), soft_wrap=True
        )


def _exit_code(run: Run, found: Sequence[Cell]) -> int:
    """1 when some server answered nothing at all: there is no figure of it to go by."""
    answered = {cell.server for cell in found if cell.summary.num_ok}
    silent = [name for name in run.names if name not in answered]
    if not silent:
        return 0
    causes = {cause for cell in found if cell.server in silent for cause in cell.summary.failures}
    Console(stderr=True, highlight=False).print(
        Text.assemble(
            ("outrider: ", "bold red"), f"every request to {', '.join(silent)} failed: {', '.join(causes)}"
        ),
        soft_wrap=True,
    )
    return 1
