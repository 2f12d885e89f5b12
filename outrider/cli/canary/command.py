"""The commands of `outrider canary`."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Final, TypeVar

import typer
from rich.console import Console
from rich.live import Live

from outrider.canary.plan import DURATION_MAX_S, ArmChange, CanaryPlan, CanaryState, Objective, Rule
from outrider.canary.store import CanaryStore, CanaryView
from outrider.cli.canary import options, report
from outrider.errors import ConfigurationError
from outrider.redis_connection import redis_url_from
from outrider.registry import Registry

ResultT = TypeVar("ResultT")

AUDIT_SHARE: Final = 0.02
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

canary = typer.Typer(
    help=(
        "Try another way of speculating on a share of the traffic; measure, then promote it or take it back.\n\n"
        "What is said stays what it was, in both arms: they differ in speed. Keys, not requests, are divided: the "
        "header [bold]X-Canary-Key[/bold] (gRPC metadata x-canary-key), else prompt_cache_key, else user (gRPC "
        "tenant), else the request's id. Requests that say themselves how much to speculate take no part.\n\n"
        "Keys are what is compared: with a few dozen of them, or one that sends most of the traffic, times stay "
        "undecided however many requests there are. Where the same user may meet both arms, give each request an "
        "X-Canary-Key of its own."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@canary.command()
def start(
    redis_url: options.RedisUrl = None,
    redis_url_file: options.RedisUrlFile = None,
    share: options.Share = 0.1,
    off: options.Off = False,
    draft_model: options.DraftModel = "",
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    audit_share: options.AuditShare = None,
    objective: options.Better = Objective.TPOT,
    margin: options.Margin = 0.1,
    failure_margin: options.FailureMargin = 0.005,
    min_requests: options.MinRequests = 200,
    alpha: options.Alpha = 0.05,
    duration: options.Duration = "24h",
    auto: options.Auto = False,
) -> None:
    """Begin a canary. It takes effect at all replicas at once, four seconds from now.

    [bold]Examples[/bold]

    [cyan]outrider canary start --off --share 0.05 --objective none[/cyan] asks whether speculation still pays.

    [cyan]outrider canary start --draft-model draft-v2 --auto[/cyan] waits for draft workers of a folder draft-v2,
    to be started afterwards: the canary begins with the first of them, and no other request meets them.

    [cyan]outrider canary start --num-speculative-tokens 3 --duration 2h[/cyan] tries shorter blocks.

    [bold]Exit status[/bold]

    0 begun; 1 another canary is in force, or Redis does not answer; 2 a flag is wrong.
    """
    try:
        plan = CanaryPlan(
            canary_id=secrets.token_hex(4),
            change=ArmChange(
                speculates=not off,
                draft_model=draft_model,
                num_speculative_tokens=num_speculative_tokens or 0,
            ),
            share=share,
            rule=Rule(
                objective=objective,
                margin=margin,
                failure_margin=failure_margin,
                requests_min=min_requests,
                alpha=alpha,
            ),
            audit_share=(0.0 if off else AUDIT_SHARE) if audit_share is None else audit_share,
            duration_s=parse_duration(duration),
            is_automatic=auto,
        )
    except ValueError as error:
        raise typer.BadParameter(_first_line(error)) from None
    asked = _with_store(redis_url, redis_url_file, lambda store: _begin(store, plan))
    Console(highlight=False).print(report.page(asked))


async def _begin(store: CanaryStore, plan: CanaryPlan) -> CanaryView:
    await store.begin(plan)
    return await store.exchange()


@canary.command()
def status(
    redis_url: options.RedisUrl = None,
    redis_url_file: options.RedisUrlFile = None,
    as_json: options.AsJson = False,
    watch: options.Watch = False,
    every: options.Every = 5.0,
) -> None:
    """Show both arms side by side, how sure that is, and what the rule makes of it.

    A figure is one number for each request; intervals are at 95 %, for one look. Those of means, differences and
    acceptance allow for requests of one key that resemble each other; those of quantiles and shares do not. The rule's
    own bounds do, and hold however often one looks, so it takes longer to be sure than the table suggests. `?` is a
    side that so few requests, or keys, say nothing of. Quantiles are known to 1 % of themselves.

    [bold]Words[/bold]

    TTFT is the time from arrival at the coordinator to the first token, TPOT that between later ones, both of a
    request; acceptance is accepted over verified hints. failed: a worker was lost, or a bug; late: out of the request's
    own time; left: the client went away; departures: both of these; refused: full, or wrong, which counts for nothing.

    [bold]Exit status[/bold]

    0 promoted, or promoting is recommended; 3 it goes on; 4 given up, or aborting is recommended; 5 there is no canary;
    1 Redis does not answer; 2 a flag is wrong.
    """
    view = _with_store(
        redis_url, redis_url_file, lambda store: _look(store, as_json, every if watch else None)
    )
    raise typer.Exit(report.exit_status(view))


async def _look(store: CanaryStore, as_json: bool, every_s: float | None) -> CanaryView:
    """Shows it once, or until it is decided; the last view."""
    console = Console(highlight=False)
    is_live = every_s is not None and not as_json
    with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            view = await store.exchange()
            if as_json:
                print(json.dumps(report.as_dict(view)), flush=True)
            elif live is None:
                console.print(report.page(view))
            else:
                live.update(report.page(view), refresh=True)
            if every_s is None or _is_decided(view):
                return view
            await asyncio.sleep(every_s)


def _is_decided(view: CanaryView) -> bool:
    found = view.canary
    return found is None or found.state is CanaryState.PROMOTED or found.has_ended(view.clock_ms)


@canary.command()
def promote(
    redis_url: options.RedisUrl = None,
    redis_url_file: options.RedisUrlFile = None,
    reason: options.Reason = "",
) -> None:
    """Make the canary's arm everybody's, within seconds, until it is aborted. The rule need not agree.

    It is kept in Redis, across restarts of the coordinator. Meant for the time until the flags of workers and
    coordinator say the same; then clear it, which changes nothing any more.

    [bold]Exit status[/bold]

    0 promoted; 1 there is none that runs, or Redis does not answer; 2 a flag is wrong.
    """
    _decide(redis_url, redis_url_file, CanaryState.PROMOTED, reason or "by hand")


@canary.command()
def abort(
    redis_url: options.RedisUrl = None,
    redis_url_file: options.RedisUrlFile = None,
    reason: options.Reason = "",
) -> None:
    """Send everybody back to control, within seconds; also from a canary that was promoted.

    Draft workers of the model that it named are kept from everybody until the canary is cleared, or another one begins:
    what it was given up for may be them.

    [bold]Exit status[/bold]

    0 aborted; 1 there is none in force, or Redis does not answer; 2 a flag is wrong.
    """
    _decide(redis_url, redis_url_file, CanaryState.ABORTED, reason or "by hand")


@canary.command()
def clear(redis_url: options.RedisUrl = None, redis_url_file: options.RedisUrlFile = None) -> None:
    """Forget a canary that has ended, or was promoted and is what the flags say by now.

    Draft workers that it kept from requests are everybody's again.

    [bold]Exit status[/bold]

    0 there is none now; 1 it is still in force, or Redis does not answer; 2 a flag is wrong.
    """
    _with_store(redis_url, redis_url_file, _forget)


async def _forget(store: CanaryStore) -> None:
    view = await store.exchange()
    found = view.canary
    if found is not None and found.state is not CanaryState.PROMOTED and not found.has_ended(view.clock_ms):
        raise ConfigurationError(f"the canary {found.plan.canary_id} is in force; promote or abort it first")
    await store.forget()


def _decide(redis_url: str | None, redis_url_file: Path | None, state: CanaryState, reason: str) -> None:
    decided = _with_store(redis_url, redis_url_file, lambda store: decide(store, state, reason))
    Console(highlight=False).print(report.page(decided))


async def decide(store: CanaryStore, state: CanaryState, reason: str) -> CanaryView:
    """Promotes or aborts what is in force; what is known afterwards. Raises ConfigurationError where nothing is."""
    view = await store.exchange()
    found = view.canary
    if found is None or found.has_ended(view.clock_ms):
        raise ConfigurationError("there is no canary in force; `outrider canary status` tells what there was")
    if state is CanaryState.PROMOTED and found.state is not CanaryState.RUNNING:
        raise ConfigurationError(
            f"the canary {found.plan.canary_id} is {found.state}; only one that runs can be promoted"
        )
    if not await store.decide(found, state, reason):
        raise ConfigurationError(
            f"the canary {found.plan.canary_id} was decided on meanwhile; look again with `outrider canary status`"
        )
    return await store.exchange()


def parse_duration(text: str) -> float:
    """Seconds of such as 90s, 30m, 24h or 7d. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not 0 < float(found[1]) * _UNITS_S[found[2]] <= DURATION_MAX_S:
        raise ValueError(
            f"{text!r} is not a time of up to {DURATION_MAX_S / 86400:g}d, such as 90s, 30m or 24h"
        )
    return float(found[1]) * _UNITS_S[found[2]]


def _first_line(error: ValueError) -> str:
    """What pydantic found first, without its frame."""
    return str(error).partition("Value error, ")[2].partition(" [type=")[0] or str(error)


def _with_store(
    redis_url: str | None, redis_url_file: Path | None, work: Callable[[CanaryStore], Awaitable[ResultT]]
) -> ResultT:
    """Raises RegistryUnavailable, and typer's usage error for what is no URL of a Redis."""

    async def run() -> ResultT:
        try:
            url = redis_url_from(redis_url, redis_url_file)
            if url is None:
                raise ConfigurationError("--redis-url, --redis-url-file or OUTRIDER_REDIS_URL is required")
            registry = Registry(url)
        except ConfigurationError as error:
            raise typer.BadParameter(error.message) from None
        try:
            return await work(CanaryStore(registry))
        finally:
            await registry.close()

    return asyncio.run(run())
