"""A run of `outrider bench` in progress: its settings, its results so far and its status line."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from command_line.bench.cells import TurnResult
from command_line.bench.runner import ready_servers, run_turns
from command_line.load.load import Plan, Turn
from command_line.load.prompts import Workload
from command_line.load.requests import Server
from command_line.load.summary import Slo
from command_line.progress import Progress
from command_line.terminal import TerminalConsole


@dataclass
class Run:
    """Settings and results of a run. The results survive an interruption."""

    servers: tuple[Server, ...]  # without models until the servers have answered
    plan: Plan
    workload: Workload
    slo: Slo
    timeout_s: float
    began_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    measured: list[TurnResult] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the servers, in the order of their indices."""
        return [server.name for server in self.servers]


async def measure(run: Run, *, model: str | None, api_key: str | None) -> int:
    """Fills `run.measured` turn by turn and returns exit status 0. Raises ConfigurationError for a server that is
    down."""
    with Progress(TerminalConsole(stderr=True)) as progress:

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
