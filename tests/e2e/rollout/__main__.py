"""Replaces everything in an installation under load, and counts what fails. `make rollout`

Two coordinators, two targets, two draft workers, Redis, Prometheus and a load balancer, each a process of its own on
this machine, with certificates between all of them and API keys for clients. While clients of three kinds ask without a
pause, each pool is replaced one by one as a rolling update does, and all certificates are. At last the target's model
is replaced by another one: two targets of new weights under a new name stand beside the old ones, clients move, the old
ones are drained. Every answer is compared with the text of plain decoding by the model that it named. Exit status: 0
where no request failed, 1 where one did, 2 where it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from command_line.checkout import DEMO_TARGET
from demo.corpus import held_out_prompts
from outrider.errors import OutriderError
from outrider.local.free_ports import free_ports
from outrider.security.tls import AUTHORITY, Role
from tests.e2e.load_balancers import Backend
from tests.e2e.rollout.balancer import SecuredHAProxy
from tests.e2e.rollout.load import Clients, Tally, Traffic, asking, install_node_modules, plain_cases
from tests.e2e.rollout.new_model import change_model, write_new_model
from tests.e2e.rollout.prometheus import Prometheus
from tests.e2e.secured import SecuredOptions, SecuredSystem

NODE_MODULES: Final = Path(".cache/rollout")
SETTLED_S: Final = 3.0  # between two replacements, as minReadySeconds is


async def roll(
    system: SecuredSystem,
    balancer: SecuredHAProxy,
    prometheus: Prometheus | None,
    tally: Tally,
    traffic: Traffic,
    new_model: Path,
    pause_s: float,
    *,
    is_model_alone: bool,
) -> None:
    """Each pool, one by one, then all certificates, then the model. Says what it does."""

    async def step(text: str, work: Callable[[], Awaitable[object]]) -> None:
        before, began_s = sum(tally.done.values()), time.monotonic()
        await work()
        if prometheus is not None:
            prometheus.tell()
        await asyncio.sleep(pause_s)
        num_done = sum(tally.done.values()) - before
        failed = f"{len(tally.failures)} failed so far"
        print(f"{text}: {time.monotonic() - began_s:.1f} s, {num_done} answers meanwhile, {failed}", flush=True)

    async def replace_worker(kind: str, name: str) -> None:
        await system.start_another(kind)
        await asyncio.sleep(SETTLED_S)
        await system.retire(name)

    async def replace_coordinator(index: int) -> None:
        await balancer.drain(index)
        await system.restart_coordinator(index)
        await balancer.undrain(index)

    async def replace_certificates() -> None:
        for role in Role:
            system.issue(role)
        await asyncio.to_thread(balancer.reload)
        await system.until_certificates_are_shown()

    if not is_model_alone:
        for kind in ("target", "draft"):
            for name in system.names(kind):
                await step(f"replaced {name}", lambda kind=kind, name=name: replace_worker(kind, name))  # type: ignore[misc]
        for index in range(len(system.names("coordinator"))):
            await step(f"replaced coordinator-{index}", lambda index=index: replace_coordinator(index))  # type: ignore[misc]
        await step("replaced all certificates", replace_certificates)
        for kind in ("target", "draft"):  # which have to find each other with the new ones
            name = system.names(kind)[0]
            await step(f"replaced {name} once more", lambda kind=kind, name=name: replace_worker(kind, name))  # type: ignore[misc]
    await change_model(system, traffic, new_model, step)


async def run(
    clients: Clients, pause_s: float, program: str | None, folder: Path, *, is_model_alone: bool = False
) -> int:
    """Everything; returns the exit status."""
    options = SecuredOptions(num_targets=2, num_drafts=2, num_coordinators=2, log_format="json")
    async with SecuredSystem(options, folder / "logs") as system:
        new_model = write_new_model(folder / f"{DEMO_TARGET.name}-v2")
        cases = await plain_cases(system, DEMO_TARGET.name, held_out_prompts(24), 60)
        traffic = Traffic(cases, folder / "cases.json")
        (port,) = free_ports(1)
        (folder / "balancer").mkdir()
        (folder / "prometheus").mkdir()
        backends = [
            Backend(int(system.url(i).rpartition(":")[2]), int(system.grpc_address(i).rpartition(":")[2]))
            for i in range(2)
        ]
        balancer = SecuredHAProxy(
            folder / "balancer", port, backends, system.authority, system.certificates / AUTHORITY
        )
        prometheus = None if program is None else Prometheus(program, system, folder / "prometheus")
        try:
            await asyncio.to_thread(balancer.start)
            if prometheus is not None:
                await prometheus.until_ready()
            print(f"up: {', '.join(system.children)}, Redis, HAProxy" + (", Prometheus" if prometheus else ""))
            async with asking(system, balancer.url, balancer.address, traffic, clients) as tally:
                await asyncio.sleep(pause_s)
                await roll(
                    system,
                    balancer,
                    prometheus,
                    tally,
                    traffic,
                    new_model,
                    pause_s,
                    is_model_alone=is_model_alone,
                )
            await report(tally, prometheus, system)
        finally:
            balancer.stop()
            if prometheus is not None:
                prometheus.stop()
        return 1 if tally.failures or system.ends else 0


async def report(tally: Tally, prometheus: Prometheus | None, system: SecuredSystem) -> None:
    """Prints the results of the clients, and figures from Prometheus."""
    counted = ", ".join(f"{count} by {kind}" for kind, count in sorted(tally.done.items()))
    print(f"{sum(tally.done.values())} answers ({counted}), {len(tally.failures)} failed")
    for failure in tally.failures[:20]:
        print(f"  {failure}")
    for end in system.ends:
        print(f"  ended by itself: {end}")
    if prometheus is None:
        return
    await asyncio.sleep(5)  # for the last scrape
    for text, query in (
        ("processes scraped, by job", "count by (job) (up == 1)"),
        ("hints accepted, share", "sum(outrider_spec_decode_num_accepted_tokens_total{job='outrider-target'})"
         " / sum(outrider_spec_decode_num_draft_tokens_total{job='outrider-target'})"),
        ("texts moved to another target", "sum(max_over_time(outrider_target_replays_total[1h]))"),
    ):  # fmt: skip
        shown = {name: round(value, 3) for name, value in (await prometheus.ask(query)).items()}
        print(f"Prometheus, {text}: {shown.get('', shown)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make rollout", description=__doc__)
    parser.add_argument("--openai", type=int, default=3, help="clients of the openai package (default %(default)s)")
    parser.add_argument("--grpc", type=int, default=2, help="clients over gRPC in Python (default %(default)s)")
    parser.add_argument("--think-s", type=float, default=0.2, help="of a client, between answers (default %(default)s)")
    parser.add_argument("--pause-s", type=float, default=5.0, help="between two replacements (default %(default)s)")
    parser.add_argument("--logs", type=Path, help="keep all logs in this new folder")
    parser.add_argument("--no-node", action="store_true", help="no client in JavaScript, which needs node and npm")
    parser.add_argument("--only-model", action="store_true", help="change the target's model and replace nothing else")
    parser.add_argument("--no-prometheus", action="store_true", help="without a Prometheus")
    given = parser.parse_args(arguments)
    program = None if given.no_prometheus else shutil.which("prometheus")
    if program is None and not given.no_prometheus:
        hint = "Debian: apt-get install prometheus; or: --no-prometheus"
        print(f"prometheus is not in the PATH ({hint})", file=sys.stderr)
        return 2
    modules = None if given.no_node else NODE_MODULES.resolve()
    try:
        if modules is not None and not (modules / "node_modules").is_dir():
            install_node_modules(modules)
        with tempfile.TemporaryDirectory(prefix="rollout-") as scratch:
            folder = given.logs or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            return asyncio.run(
                run(
                    Clients(given.openai, given.grpc, given.think_s, modules),
                    given.pause_s,
                    program,
                    folder,
                    is_model_alone=given.only_model,
                )
            )
    except (OutriderError, OSError) as error:
        print(f"rollout: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
