"""`outrider audit`: asks a running server the same with and without speculation and says whether it matters."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.text import Text

from outrider.audit import exit_code
from outrider.cli.audit import report as audit_report
from outrider.cli.audit.auditor import Auditor, new_audit_client
from outrider.cli.audit.findings import RequestReport, as_dict, num_verified
from outrider.cli.audit.options import (
    DEFAULT_MAX_TOKENS,
    ApiKey,
    AsJson,
    Concurrency,
    MaxTokens,
    Model,
    Prompt,
    PromptFile,
    Repeat,
    Requests,
    RequireSpeculation,
    Seed,
    Temperature,
    TimeoutS,
    Url,
)
from outrider.cli.audit.requests import AuditRequest, Overrides, audit_request, read_bodies
from outrider.cli.demo_prompts import DEMO_PROMPTS
from outrider.cli.progress import Progress
from outrider.errors import InvalidRequest

# Code, of which much is easy to guess; prose, of which little is; and a list that soon repeats itself.
BUILT_IN_PROMPTS = (
    *DEMO_PROMPTS,
    "Speculative decoding leaves the output of a large language model as it is, because",
    "one two three one two three one two three one two",
)


def audit(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Model = None,
    timeout_s: TimeoutS = 120.0,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    requests: Requests = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    repeat: Repeat = 1,
    concurrency: Concurrency = 1,
    require_speculation: RequireSpeculation = False,
    as_json: AsJson = False,
) -> None:
    """Check a running server: does speculation change what it says?

    Every request is answered once plainly and then with speculation, and the answers are compared token by token.
    The server verifies their hints even where speculation does not pay at present.
    Where they differ, plain decoding is asked again at that very place: if it repeats itself, speculation is at fault;
    if it does not, the engine is. The report names the position, both tokens and how far apart their probabilities are.

    [bold]Examples[/bold]

    [cyan]outrider audit[/cyan] tries a few built-in prompts on the server next door.

    [cyan]outrider audit --requests recorded.jsonl --repeat 3 --concurrency 8[/cyan] replays real traffic, crowded.

    [cyan]outrider audit --prompt 'def read(path):' --temperature 0.8 --seed 7[/cyan] audits seeded sampling.

    [cyan]outrider audit --json --require-speculation[/cyan] is a canary for a scheduler of jobs.

    [bold]Exit status[/bold]

    0 all identical; 1 speculation changed an output; 3 plain decoding contradicts itself; 2 a request failed; 4 no hint
    was verified, with --require-speculation. Of several the first in this order counts: 1, 3, 2, 4.
    """
    _check_url(url)
    given = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    overrides = Overrides({name: value for name, value in given.items() if value is not None}, seed)
    try:
        bodies = _bodies(prompt or [], prompt_file, requests, overrides.fixed)
        asked = [audit_request(name, body, overrides) for name, body in bodies]
    except (InvalidRequest, OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint="--requests") from error
    if not asked:
        raise typer.BadParameter("there is no request in it", param_hint="--requests")
    console = Console(stderr=as_json, highlight=False)
    reports = asyncio.run(_audit(asked, url, api_key, timeout_s, repeat, concurrency))
    _print(
        console, reports, f"{url}; {len(asked)} requests, {repeat} × with speculation, {concurrency} at once"
    )
    if as_json:
        report = as_dict(reports, is_speculation_required=require_speculation)
        print(json.dumps(report), flush=True)
    is_unproven = require_speculation and not num_verified(reports)
    raise typer.Exit(exit_code([report.verdict for report in reports], is_unproven=is_unproven))


def _check_url(url: str) -> None:
    try:
        is_usable = httpx.URL(url).scheme in ("http", "https")
    except httpx.InvalidURL:
        is_usable = False
    if not is_usable:
        raise typer.BadParameter(f"{url!r} is not an address like http://host:port", param_hint="--url")


def _bodies(
    prompts: Sequence[str], prompt_file: Path | None, requests: Path | None, fixed: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Everything that was asked for, by name; the built-in prompts when nothing was. Prompts, which nobody recorded,
    have `fixed` from the start. Raises InvalidRequest, OSError and UnicodeDecodeError."""
    named = [(f"prompt {number}", text) for number, text in enumerate(prompts, 1)]
    if prompt_file is not None:
        named.append((prompt_file.name, prompt_file.read_text(encoding="utf-8")))
    if not named and requests is None:
        named = [(f"built-in {number}", text) for number, text in enumerate(BUILT_IN_PROMPTS, 1)]
    parameters = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0, **fixed}
    bodies = [(name, {"prompt": text, **parameters}) for name, text in named]
    if requests is None:
        return bodies
    is_stdin = str(requests) == "-"
    text = sys.stdin.read() if is_stdin else requests.read_text(encoding="utf-8")
    # Not splitlines: JSON may hold U+2028 and its like.
    return bodies + read_bodies(text.split("\n"))


async def _audit(
    asked: Sequence[AuditRequest],
    url: str,
    api_key: str | None,
    timeout_s: float,
    num_repeats: int,
    concurrency: int,
) -> list[RequestReport]:
    """Every request's report, in order, at most `concurrency` requests under way."""
    gate, num_done = asyncio.Semaphore(concurrency), 0
    with Progress(Console(stderr=True, highlight=False)) as progress:
        progress.say(f"Auditing {url} with {len(asked)} requests.")
        async with new_audit_client(url, api_key, timeout_s) as client:
            auditor = Auditor(
                client,
                num_repeats,
                lambda doing: progress.update(f"{num_done} of {len(asked)} done. {doing}"),
            )

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
    for change in audit_report.changes(reports):
        console.print(Text(f"changed: {change}", "dim"), soft_wrap=True)
    has_answers = any(report.findings for report in reports)
    if has_answers and not num_verified(reports):
        console.print(
            Text(
                "warning: no hint was verified in any run, so this proved little (no draft worker attached?)",
                "yellow",
            ),
            soft_wrap=True,
        )
