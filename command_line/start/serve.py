"""`outrider serve`: a draft model, a target model and the coordinator on this machine, under one supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import typer

from command_line.progress import Progress
from command_line.settings import takes_settings
from command_line.start.acceptance_probe import probe
from command_line.start.deployment import Deployment
from command_line.start.draft_choice import UnfitDraft, choose_draft
from command_line.start.options import ServeOptions
from command_line.start.system import new_log_dir, running_system
from command_line.terminal import TerminalConsole, print_line
from outrider.engine.heads.kind import kind_of_draft
from outrider.engine.options import Quantization
from outrider.local.until_signalled import run_until_signalled
from outrider.registry.redis_connection import redis_url_from
from outrider.settings import settings_of

SIGTERM_STATUS = 128 + 15


@takes_settings(ServeOptions, Deployment)
def serve(**given: Any) -> None:
    """Serve a model pair on this machine: Redis, workers and coordinator, started, watched and stopped together.

    With no flag at all it serves the demo pair. A worker that dies is started again; Ctrl-C stops everything.
    """
    options = ServeOptions(**{name: given.pop(name) for name in settings_of(ServeOptions)})
    try:
        choice = choose_draft(
            options.target,
            options.draft,
            kind=None if options.draft is None else kind_of_draft(options.target, options.draft),
            draft_head=given.pop("draft_head"),
            no_draft=options.no_draft,
            self_draft=options.self_draft,
            early_exit_layer=given["early_exit_layer"],
            target_quantization=given["quantization"],
            draft_quantization=options.draft_quantization,
        )
        deployment = Deployment(
            *(options.target, choice.folder),
            draft_quantization=choice.quantization,
            draft_head=choice.head,
            **given,
        )
    except UnfitDraft as error:
        raise typer.BadParameter(str(error)) from None
    redis = redis_url_from(options.redis_url, options.redis_url_file)
    status = run_until_signalled(lambda: _serve(deployment, redis, options.log_dir, options.verbose))
    # Being asked to stop and having stopped is success; Ctrl-C keeps the status that shells expect.
    raise typer.Exit(0 if status == SIGTERM_STATUS else status)


async def _serve(deployment: Deployment, redis_url: str | None, log_dir: Path | None, verbose: bool) -> int:
    console = TerminalConsole(stderr=True)
    with Progress(console) as progress:
        beside = f"the draft head {deployment.draft_head} beside it" if deployment.draft_head else "no draft"
        progress.say(f"Starting Outrider with {deployment.target} and {deployment.draft or beside}")
        async with running_system(
            deployment,
            redis_url=redis_url,
            log_dir=log_dir or new_log_dir(),
            on_event=progress.on_event,
            echo=progress.echo if verbose else None,
        ) as addresses:
            print_line(
                f"Outrider is ready: {addresses.http}/v1 (OpenAI), {addresses.grpc} (gRPC), "
                f"model {deployment.model_name}, logs in {addresses.log_dir}"
            )
            progress.note(
                f"Its Redis: --redis-url-file {addresses.redis_url_file}. `outrider canary` finds it on this machine."
            )
            progress.say(f"Serving {deployment.model_name}; Ctrl-C stops it.")
            probing = asyncio.create_task(_probe_draft(deployment, addresses.http, progress))
            try:
                await asyncio.Event().wait()
            finally:
                probing.cancel()
                progress.say("Stopping. Running requests have 8 s; Ctrl-C again ends them at once.")
    return 0


async def _probe_draft(deployment: Deployment, url: str, progress: Progress) -> None:
    """Says how the draft does; loudly where it is of no use."""
    if deployment.draft is None or deployment.knows_callers:  # nobody gave us a key
        return
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=deployment.trust) as client:
        found = await probe(client, deployment.model_name)
    if found is None:
        return
    is_quantized = deployment.draft_quantization is not Quantization.NONE
    name = f"{deployment.draft} ({deployment.draft_quantization.value})" if is_quantized else str(deployment.draft)
    if deployment.early_exit_layer is not None:
        name += f" ({deployment.early_exit_layer} layers)"
    tell = progress.warn if found.is_useless else progress.note
    tell(found.report(name))
