"""The whole system on this machine, from nothing to answering and back to nothing.

Invariant: leaving `running_system`, by whatever way, leaves no process and no temporary file.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from outrider.child_spec import ChildEvent
from outrider.cli import preflight
from outrider.cli.deployment import ROOT, Deployment, coordinator_spec, worker_specs
from outrider.errors import ConfigurationError
from outrider.free_ports import free_ports
from outrider.machine import usable_cores
from outrider.redis_server import EmbeddedRedis
from outrider.registry import check_redis
from outrider.supervisor import Supervisor

FIRST_ANSWER_TIMEOUT_S = 30.0
NUM_LOG_DIRS_KEPT = 10
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Addresses:
    """Where a running system listens."""

    http: str  # http://host:port
    grpc: str  # host:port
    log_dir: Path


def cache_dir() -> Path:
    """Where logs and grown models go: OUTRIDER_CACHE_DIR, else inside a checkout, else the user's cache."""
    named = os.environ.get("OUTRIDER_CACHE_DIR")
    if named:
        return Path(named)
    base = ROOT if (ROOT / "pyproject.toml").is_file() and os.access(ROOT, os.W_OK) else Path.home()
    return base / ".cache" / "outrider"


def new_log_dir() -> Path:
    """A fresh folder under the cache; the oldest ones go."""
    logs = cache_dir() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    earlier = sorted(path for path in logs.iterdir() if path.is_dir())
    for path in earlier[: max(0, len(earlier) - NUM_LOG_DIRS_KEPT + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    fresh = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    fresh.mkdir()
    return fresh


@asynccontextmanager
async def running_system(
    deployment: Deployment,
    *,
    redis_url: str | None,
    log_dir: Path,
    on_event: Callable[[ChildEvent], None],
    echo: Callable[[str, str], None] | None = None,
) -> AsyncIterator[Addresses]:
    """Checks, starts everything, yields once a request would be answered, stops everything.

    `redis_url` None starts an embedded Redis. Raises ConfigurationError when something cannot start.
    """
    preflight.check(deployment)
    if redis_url is not None:
        await check_redis(redis_url)
    scratch = _new_scratch_dir()
    redis = EmbeddedRedis(scratch) if redis_url is None else None
    supervisor = Supervisor(log_dir, on_event=on_event, echo=echo)
    loop = asyncio.get_running_loop()
    try:
        url = redis.start() if redis is not None else redis_url
        assert url is not None
        http_port, grpc_port = free_ports(2, deployment.host, besides=(deployment.port, deployment.grpc_port))
        deployment = replace(
            deployment,
            port=deployment.port or http_port,
            grpc_port=deployment.grpc_port or grpc_port,
        )
        specs = worker_specs(deployment, usable_cores(), secrets.token_hex(3))
        specs.append(coordinator_spec(deployment, scratch / "ray"))
        shared = _shared_environment(url)
        specs = [replace(spec, environment={**shared, **spec.environment}) for spec in specs]
        ready = (await supervisor.start(specs))[-1]
        await _wait_for_first_answer(str(ready["http"]), deployment.trust)
        yield Addresses(str(ready["http"]), str(ready["grpc"]), log_dir)
    finally:
        # From here on another Ctrl-C means: never mind the order.
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, supervisor.hurry)
        await supervisor.stop()
        if redis is not None:
            redis.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _new_scratch_dir() -> Path:
    """A folder for the life of one system; those whose maker was killed before it could tidy up go."""
    # Ray puts sockets below its folder, whose names the kernel bounds to 107 bytes: so a short path.
    base = Path("/tmp")
    for left in base.glob("outrider-*-*"):
        pid = left.name.split("-")[1]
        if pid.isdigit() and not _is_running(int(pid)) and left.stat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"outrider-{os.getpid()}-", dir=base))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _shared_environment(redis_url: str) -> dict[str, str]:
    """What every child gets. The Redis URL holds a password, which a command line would show to everybody."""
    inherited = os.environ.get("PYTHONPATH")
    return {
        "OUTRIDER_REDIS_URL": redis_url,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


async def _wait_for_first_answer(url: str, trust: ssl.SSLContext | bool) -> None:
    """Until /health says 200: the coordinator has seen a target worker."""
    deadline = time.monotonic() + FIRST_ANSWER_TIMEOUT_S
    last = "no answer"
    async with httpx.AsyncClient(timeout=2.0, trust_env=False, verify=trust) as client:
        while time.monotonic() < deadline:
            try:
                response = await client.get(f"{url}/health")
                if response.status_code == httpx.codes.OK:
                    return
                last = f"{response.status_code} {response.text[:200]}"
            except httpx.HTTPError as error:
                last = f"{type(error).__name__} {error}"
            await asyncio.sleep(0.05)
    raise ConfigurationError(f"{url}/health did not turn healthy within {FIRST_ANSWER_TIMEOUT_S:g} s: {last}")


def run_until_signalled(
    main: Callable[[], Awaitable[int]], end_early: Callable[[], bool] = lambda: False
) -> int:
    """Runs `main` to its end; SIGINT or SIGTERM cancel it, so that it cleans up. Returns its exit status,
    or 128 + n after signal n.

    `end_early` is called first: where it returns true, `main` ends by itself soon, and is not cancelled.
    """

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main())
        received: list[int] = []

        def cancel(number: int) -> None:
            if end_early():
                return
            received.append(number)
            task.cancel()

        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, cancel, number)
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            return 128 + received[0]

    return asyncio.run(guarded())
