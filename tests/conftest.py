"""Parts that tests of several folders share: a Redis server of their own, and the circle (`--circle`) that they belong
to."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings

from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from tests.circles import ROOT, changed_files, first_circle, left_out

# How long an example takes is the machine's doing, which may be elsewhere for a moment.
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


# A developer's own Redis is nothing to them.
for name in ("OUTRIDER_REDIS_URL", "OUTRIDER_REDIS_URL_FILE"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--circle",
        choices=("first", "second", "all"),
        default="all",
        help="which tests to run: `make test` runs the first circle, `make test-all` the second as well",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares the first circle the imports of tests that it leaves out as a whole."""
    if config.getoption("--circle") != "first" or not collection_path.is_relative_to(ROOT):
        return None
    name = collection_path.relative_to(ROOT).as_posix() + ("/" if collection_path.is_dir() else "")
    return True if name.startswith(left_out(changed_files())) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    circle = config.getoption("--circle")
    if circle == "all":
        return
    first = first_circle(items, changed_files())
    left_out = [item for item in items if (item in first) is (circle == "second")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if (item in first) is (circle == "first")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports without the garbage collector, which would take a quarter of the time, then excludes everything that was
    imported from collection: half of a small model's loading time was the collector's scan of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Excludes what earlier files left from collection as well: each load of a model collects."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the failures of tests that passed when they ran again (`.ci/run`): they are to be read, too."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"FAILED AND RUN AGAIN: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    yield server.start()
    server.stop()


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    """A registry on an empty Redis."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        await client.flushall()
    registry = Registry(redis_url)
    yield registry
    await registry.close()
