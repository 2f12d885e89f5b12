"""The whole system on this machine, from nothing to answering and back to nothing.

Invariant: leaving `running_system`, by whatever way, leaves no process and no temporary file.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from command_line.checkout import ROOT
from command_line.start import preflight
from command_line.start.deployment import Deployment, coordinator_spec, worker_specs
from coordinator.settings import CoordinatorSettings, Listen
from outrider.engine.loading.machine import usable_cores
from outrider.errors import ConfigurationError
from outrider.local.child_spec import ChildEvent
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from outrider.local.supervisor import Supervisor
from outrider.local.system_folder import new_system_folder, write_redis_url
from outrider.local.until_signalled import STOP_SIGNALS
from outrider.registry.registry import check_redis
from outrider.settings import settings_of

FIRST_ANSWER_TIMEOUT_S = 30.0
NUM_LOG_DIRS_KEPT = 10


@dataclass(frozen=True)
class Addresses:
    """Addresses of a running system, and where its logs and the URL of its Redis are."""

    http: str  # http://host:port
    grpc: str  # host:port
    log_dir: Path
    redis_url_file: Path  # exists while the system runs


def cache_dir() -> Path:
    """The folder of logs and grown models: OUTRIDER_CACHE_DIR, else inside a checkout, else the user's cache."""
    named = os.environ.get("OUTRIDER_CACHE_DIR")
    if named:
        return Path(named)
    base = ROOT if (ROOT / "pyproject.toml").is_file() and os.access(ROOT, os.W_OK) else Path.home()
    return base / ".cache" / "outrider"


def new_log_dir() -> Path:
    """A fresh folder under the cache; the oldest ones go."""
    logs = cache_dir() / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    earlier = sorted(path for path in logs.iterdir() if path.is_dir())
    for path in earlier[: max(0, len(earlier) - NUM_LOG_DIRS_KEPT + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    fresh, number = logs / name, 1
    while fresh.exists():  # of a system that this process started in the same second
        number += 1
        fresh = logs / f"{name}-{number}"
    fresh.mkdir(mode=0o700)
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
    memory = preflight.check(deployment)
    if redis_url is not None:
        await check_redis(redis_url)
    scratch = new_system_folder()
    redis = EmbeddedRedis(scratch) if redis_url is None else None
    supervisor = Supervisor(log_dir, on_event=on_event, echo=echo)
    loop = asyncio.get_running_loop()
    try:
        url = redis.start() if redis is not None else redis_url
        assert url is not None
        redis_url_file = write_redis_url(scratch, url)
        http_port, grpc_port = free_ports(2, deployment.host, besides=(deployment.port, deployment.grpc_port))
        deployment = replace(
            deployment,
            port=deployment.port or http_port,
            grpc_port=deployment.grpc_port or grpc_port,
        )
        specs = worker_specs(deployment, usable_cores(), secrets.token_hex(3), memory)
        specs.append(coordinator_spec(deployment, scratch / "ray"))
        shared = _shared_environment(url)
        specs = [replace(spec, environment={**shared, **spec.environment}) for spec in specs]
        ready = (await supervisor.start(specs))[-1]
        await _wait_for_first_answer(str(ready["http"]), deployment.trust)
        yield Addresses(str(ready["http"]), str(ready["grpc"]), log_dir, redis_url_file)
    finally:
        # From here on another Ctrl-C means: never mind the order.
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, supervisor.hurry)
        await supervisor.stop()
        if redis is not None:
            redis.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _shared_environment(redis_url: str) -> dict[str, str]:
    """Variables of every child. The Redis URL holds a password, which a command line would show to everybody."""
    inherited = os.environ.get("PYTHONPATH")
    told = (each.variable for owner in (CoordinatorSettings, Listen) for each in settings_of(owner).values())
    return {
        **{variable: "" for variable in told if variable},  # flags have said it
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
    raise ConfigurationError(f"{url}/health did not become healthy within {FIRST_ANSWER_TIMEOUT_S:g} s: {last}")
