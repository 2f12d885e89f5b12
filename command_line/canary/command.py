"""Commands of `outrider canary`."""

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
from rich.live import Live

from command_line.canary import options, report
from command_line.terminal import TerminalConsole, print_line
from outrider.canary.plan import DURATION_MAX_S, ArmChange, CanaryPlan, CanaryState, Objective, Rule
from outrider.canary.store import CanaryStore, CanaryView
from outrider.errors import ConfigurationError
from outrider.local.system_folder import redis_url_files
from outrider.registry.redis_connection import redis_url_from
from outrider.registry.registry import Registry

ResultT = TypeVar("ResultT")

AUDIT_SHARE: Final = 0.02
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

canary = typer.Typer(
    help=(
        "Test another speculation setting on a share of the traffic, measure it, then promote or abort it.\n\nThe "
        "output is the same in both arms: they differ in speed. Keys, not requests, are divided: the header "
        "[bold]X-Canary-Key[/bold] (gRPC metadata x-canary-key), else prompt_cache_key, else user (gRPC tenant), "
        "else the request's id. Requests with speculation settings of their own take no part.\n\nThe keys are "
        "compared: with a few dozen of them, or one that sends most of the traffic, times stay undecided however "
        "many requests there are. If the same user may get both arms, give each request its own X-Canary-Key."
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
    model: options.Model = "",
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

    [cyan]outrider canary start --off --share 0.05 --objective none[/cyan] tests whether speculation still pays.

    [cyan]outrider canary start --draft-model draft-v2 --auto[/cyan] waits for draft workers whose model folder is
    draft-v2. Start them afterwards. The canary begins with the first of them, and no other request uses them.

    [cyan]outrider canary start --num-speculative-tokens 3 --duration 2h[/cyan] tries shorter blocks.

    [bold]Exit status[/bold]

    0: begun; 1: another canary is in force, or Redis does not answer; 2: a flag is wrong.
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
            model=model,
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
    TerminalConsole().print(report.page(asked))


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
    """Show both arms side by side with confidence intervals, and the rule's decision.

    Every request gives one value per figure. The intervals are at 95 %, for a single look. Those of means,
    differences and acceptance account for correlated requests of one key; those of quantiles and shares do not. The
    rule's own bounds do, and stay valid however often one looks, so the rule needs more data than the table suggests.
    `?` is a bound that too few requests or keys determine. Quantiles are exact to 1 %.

    [bold]Words[/bold]

    TTFT is the time from arrival at the coordinator to the first token, TPOT that between later ones, both of a
    request; acceptance is accepted over verified hints. failed: a worker was lost, or a bug; late: the request's
    deadline passed; left: the client disconnected; departures: late and left; refused: overload or an invalid
    request, counted in no figure.

    [bold]Exit status[/bold]

    0: promoted, or promotion is recommended; 3: undecided; 4: aborted, or aborting is recommended; 5: there is no
    canary; 1: Redis does not answer; 2: a flag is wrong.
    """
    view = _with_store(redis_url, redis_url_file, lambda store: _look(store, as_json, every if watch else None))
    raise typer.Exit(report.exit_status(view))


async def _look(store: CanaryStore, as_json: bool, every_s: float | None) -> CanaryView:
    """Prints the state once, or repeatedly until it is decided; returns the last view."""
    console = TerminalConsole()
    is_live = every_s is not None and not as_json
    with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
        while True:
            view = await store.exchange()
            if as_json:
                print_line(json.dumps(report.as_dict(view)))
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
    """Give all traffic the canary's arm within seconds, until it is aborted. The rule need not agree.

    Redis keeps it across restarts of the coordinator. Set the flags of workers and coordinator to the same values,
    then clear the canary.

    [bold]Exit status[/bold]

    0: promoted; 1: no canary runs, or Redis does not answer; 2: a flag is wrong.
    """
    _decide(redis_url, redis_url_file, CanaryState.PROMOTED, reason or "by hand")


@canary.command()
def abort(
    redis_url: options.RedisUrl = None,
    redis_url_file: options.RedisUrlFile = None,
    reason: options.Reason = "",
) -> None:
    """Return all traffic to control within seconds, even from a promoted canary.

    Draft workers of the canary's model get no requests until the canary is cleared or another one begins: they may be
    the reason for the abort.

    [bold]Exit status[/bold]

    0: aborted; 1: no canary is in force, or Redis does not answer; 2: a flag is wrong.
    """
    _decide(redis_url, redis_url_file, CanaryState.ABORTED, reason or "by hand")


@canary.command()
def clear(redis_url: options.RedisUrl = None, redis_url_file: options.RedisUrlFile = None) -> None:
    """Forget a canary that has ended, or that was promoted and is now set by the flags.

    Its draft workers serve all requests again.

    [bold]Exit status[/bold]

    0: there is none now; 1: it is still in force, or Redis does not answer; 2: a flag is wrong.
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
    TerminalConsole().print(report.page(decided))


async def decide(store: CanaryStore, state: CanaryState, reason: str) -> CanaryView:
    """Promotes or aborts the canary in force and returns the new view. Raises ConfigurationError if there is none."""
    view = await store.exchange()
    found = view.canary
    if found is None or found.has_ended(view.clock_ms):
        raise ConfigurationError("there is no canary in force; `outrider canary status` shows the last one")
    if state is CanaryState.PROMOTED and found.state is not CanaryState.RUNNING:
        raise ConfigurationError(
            f"the canary {found.plan.canary_id} is {found.state}; only one that runs can be promoted"
        )
    if not await store.decide(found, state, reason):
        raise ConfigurationError(
            f"the canary {found.plan.canary_id} was decided on meanwhile; check with `outrider canary status`"
        )
    return await store.exchange()


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 90s, 30m, 24h or 7d. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or not 0 < float(found[1]) * _UNITS_S[found[2]] <= DURATION_MAX_S:
        raise ValueError(f"{text!r} is not a time of up to {DURATION_MAX_S / 86400:g}d, such as 90s, 30m or 24h")
    return float(found[1]) * _UNITS_S[found[2]]


def _first_line(error: ValueError) -> str:
    """The first error that pydantic found, without its frame."""
    return str(error).partition("Value error, ")[2].partition(" [type=")[0] or str(error)


def _redis_url_file_here() -> Path:
    """The file of the one system that runs on this machine. Raises ConfigurationError for none and for several."""
    files = redis_url_files()
    if not files:
        raise ConfigurationError(
            "no `outrider serve` of yours runs on this machine; name the coordinator's Redis with --redis-url, "
            "--redis-url-file or OUTRIDER_REDIS_URL"
        )
    if len(files) > 1:
        raise ConfigurationError(
            f"several systems run on this machine; choose one with --redis-url-file: {', '.join(map(str, files))}"
        )
    return files[0]


def _with_store(
    redis_url: str | None, redis_url_file: Path | None, work: Callable[[CanaryStore], Awaitable[ResultT]]
) -> ResultT:
    """Opens the store. Raises RegistryUnavailable, and typer's usage error for an invalid Redis URL."""

    async def run() -> ResultT:
        try:
            url = redis_url_from(redis_url, redis_url_file) or redis_url_from(None, _redis_url_file_here())
            assert url is not None
            registry = Registry(url)
        except ConfigurationError as error:
            raise typer.BadParameter(error.message) from None
        try:
            return await work(CanaryStore(registry))
        finally:
            await registry.close()

    return asyncio.run(run())
