"""One run of `outrider bench`, under way: what was asked for, what has been measured, the line that says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Console

from outrider.cli.bench.cells import TurnResult
from outrider.cli.bench.load import Plan, Turn
from outrider.cli.bench.prompts import Workload
from outrider.cli.bench.requests import Server
from outrider.cli.bench.runner import ready_servers, run_turns
from outrider.cli.bench.summary import Slo
from outrider.cli.progress import Progress


@dataclass
class Run:
    """What has been measured stays here when the run is interrupted."""

    servers: tuple[Server, ...]  # without models until they are known
    plan: Plan
    workload: Workload
    slo: Slo
    timeout_s: float
    began_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    measured: list[TurnResult] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of the servers, in the order of their indices."""
        return [server.name for server in self.servers]


async def measure(run: Run, *, model: str | None, api_key: str | None) -> int:
    """Fills `run.measured`, turn by turn; returns exit status 0. Raises ConfigurationError for a dead server."""
    with Progress(Console(stderr=True, highlight=False)) as progress:

        def on_request(turn: Turn, num_ended: int) -> None:
            wanted = run.plan.num_requests_at(turn.level)
            progress.update(
                f"{run.names[turn.server]}, {turn.level}, round {turn.number + 1} of {run.plan.num_rounds}: "
                f"{num_ended}{f' of {wanted}' if wanted else ''} requests."
            )

        progress.say(f"Looking for {', '.join(server.url for server in run.servers)}.")
        waiting = ready_servers(run.servers, model=model, api_key=api_key, timeout_s=run.timeout_s)
        async with waiting as (client, servers):
            run.servers = servers
            progress.say(f"Measuring {', '.join(f'{each.name} ({each.model})' for each in servers)}.")
            async for each in run_turns(
                client, servers, run.plan, run.workload, timeout_s=run.timeout_s, on_request=on_request
            ):
                run.measured.append(each)
    return 0
