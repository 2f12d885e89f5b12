"""`outrider audit`: compares a running server's answers with and without speculation."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from command_line.audit import report as audit_report
from command_line.audit.auditor import Auditor
from command_line.audit.findings import RequestReport, as_dict, num_verified
from command_line.audit.options import DEFAULT_MAX_TOKENS, AuditOptions
from command_line.audit.requests import AuditRequest, Overrides, audit_request, read_bodies
from command_line.client import look_for, new_client, server_address
from command_line.progress import Progress
from command_line.report import print_notes
from command_line.settings import naming, takes_settings
from command_line.start.demo_prompts import DEMO_PROMPTS
from command_line.terminal import TerminalConsole, print_line
from outrider.audit import Verdict, exit_code
from outrider.errors import ConfigurationError

# Code, which is easy to predict; prose, which is not; and a list that soon repeats itself.
BUILT_IN_PROMPTS = (
    *DEMO_PROMPTS,
    "Speculative decoding leaves the output of a large language model as it is, because",
    "one two three one two three one two three one two",
)


@takes_settings(AuditOptions)
def audit(**given: Any) -> None:
    """Check a running server: does speculation change its output?

    Every request is sent once plainly and then with speculation, and the answers are compared token by token. The
    server verifies hints for them even where speculation does not pay at present. Where the answers differ, plain
    decoding is repeated at that position: if it gives the same token, speculation is at fault; if not, the engine is.
    The report shows the position, both tokens and the distance of their probabilities. An engine that promises the
    distribution alone (metrics.exactness), such as vLLM, may differ where two tokens are nearly equally likely: that is
    counted as inexact.

    [bold]Examples[/bold]

    [cyan]outrider audit[/cyan] tries a few built-in prompts on the local server.

    [cyan]outrider audit --requests recorded.jsonl --repeat 3 --concurrency 8[/cyan] replays recorded requests, eight
    at once.

    [cyan]outrider audit --prompt 'def read(path):' --temperature 0.8 --seed 7[/cyan] audits seeded sampling.

    [cyan]outrider audit --json --require-speculation[/cyan] is for scheduled jobs.

    [bold]Exit status[/bold]

    0: all identical, or inexact where the engine promises no more; 1: speculation changed an output; 3: plain decoding
    contradicts itself; 2: a request failed, or there is no server; 4: no hint was verified, with
    --require-speculation. If several apply, the first in the order 1, 3, 2, 4 counts.
    """
    options = AuditOptions(**given)
    with naming("--url"):
        options = replace(options, url=server_address(options.url))
    fixed = {name: getattr(options, name) for name in ("model", "max_tokens", "temperature")}
    overrides = Overrides({name: value for name, value in fixed.items() if value is not None}, options.seed)
    with naming("--requests"):
        bodies = _bodies(options, overrides.fixed)
        asked = [audit_request(name, body, overrides) for name, body in bodies]
    if not asked:
        raise typer.BadParameter("there is no request in it", param_hint="--requests")
    console = TerminalConsole(stderr=options.json)
    try:
        reports = asyncio.run(_audit(asked, options))
    except ConfigurationError as error:  # 1, the status of other errors, is that of a changed output
        _print_missing_server(error.message, is_json=options.json)
        raise typer.Exit(exit_code([Verdict.FAILED])) from None
    caption = f"{len(asked)} requests, {options.repeat} × with speculation, {options.concurrency} at once"
    _print(console, reports, f"{options.url}; {caption}")
    if options.json:
        print_line(json.dumps(as_dict(reports, is_speculation_required=options.require_speculation)))
    is_unproven = options.require_speculation and not num_verified(reports)
    raise typer.Exit(exit_code([report.verdict for report in reports], is_unproven=is_unproven))


def _print_missing_server(message: str, *, is_json: bool) -> None:
    TerminalConsole(stderr=True).print(Text.assemble(("outrider: ", "bold red"), message), soft_wrap=True)
    if is_json:
        nothing = as_dict((), is_speculation_required=False)
        failure = {"verdict": Verdict.FAILED.value, "exit_code": exit_code([Verdict.FAILED]), "error": message}
        print_line(json.dumps(nothing | failure))


def _bodies(options: AuditOptions, fixed: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """All requests by name; the built-in prompts if there are none. `fixed` parameters apply to prompts as well.

    Raises InvalidRequest, OSError and UnicodeDecodeError.
    """
    named = [(f"prompt {number}", text) for number, text in enumerate(options.prompt, 1)]
    if (file := options.prompt_file) is not None:
        with naming("--prompt-file"):
            named.append((file.name, file.read_text(encoding="utf-8")))
    if not named and options.requests is None:
        named = [(f"built-in {number}", text) for number, text in enumerate(BUILT_IN_PROMPTS, 1)]
    parameters = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0, **fixed}
    bodies = [(name, {"prompt": text, **parameters}) for name, text in named]
    if options.requests is None:
        return bodies
    is_stdin = str(options.requests) == "-"
    text = sys.stdin.read() if is_stdin else options.requests.read_text(encoding="utf-8")
    # Not splitlines: JSON may contain U+2028 and similar line separators.
    return bodies + read_bodies(text.split("\n"))


async def _audit(asked: Sequence[AuditRequest], options: AuditOptions) -> list[RequestReport]:
    """Every request's report, in order; at most `concurrency` requests run at once. Raises ConfigurationError for a
    server that is missing, or wants a key."""
    gate, num_done = asyncio.Semaphore(options.concurrency), 0
    with Progress(TerminalConsole(stderr=True)) as progress:
        progress.say(f"Auditing {options.url} with {len(asked)} requests.")
        async with new_client(options.url, options.api_key, options.timeout_s) as client:
            await look_for(client, options.url, "OUTRIDER_API_KEY")

            def on_progress(doing: str) -> None:
                progress.update(f"{num_done} of {len(asked)} done. {doing}")

            auditor = Auditor(client, options.repeat, on_progress)

            async def one(request: AuditRequest) -> RequestReport:
                nonlocal num_done
                async with gate:
                    report = await auditor.audit(request)
                num_done += 1
                return report

            return list(await asyncio.gather(*map(one, asked)))


def _print(console: Console, reports: Sequence[RequestReport], caption: str) -> None:
    console.print(audit_report.table(reports, caption))
    for report in reports:
        for line in audit_report.details(report):
            console.print(line, soft_wrap=True)
    print_notes(console, (f"changed: {change}" for change in audit_report.changes(reports)))
    exact = [report.plain.is_exact for report in reports if report.plain is not None]
    if not all(exact):
        runs = [finding for report in reports for finding in report.findings]
        num_same = sum(finding.verdict is Verdict.IDENTICAL for finding in runs)
        console.print(
            Text(
                f"note: the engine promises the distribution and not the tokens (metrics.exactness); {num_same} of "
                f"{len(runs)} runs were identical",
                "yellow",
            ),
            soft_wrap=True,
        )
    has_answers = any(report.findings for report in reports)
    if has_answers and not num_verified(reports):
        console.print(
            Text(
                "warning: no hint was verified in any run, so this proved little (no draft worker attached?)",
                "yellow",
            ),
            soft_wrap=True,
        )
