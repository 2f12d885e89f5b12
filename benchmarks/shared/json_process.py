"""A child process that answers lines of JSON, beginning with one that says it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.shared.machine import ROOT
from outrider.local import tether

START_TIMEOUT_S: Final = 180.0
ANSWER_TIMEOUT_S: Final = 180.0
_STOP_GRACE_S: Final = 15.0
_LINE_BYTES_MAX: Final = 1 << 26


class JsonProcess:
    """A running process, tethered to this one."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self._process = process

    @property
    def pid(self) -> int:
        """The process' own id, not its tether's."""
        return int(self.facts["pid"])

    async def read(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Reads the next line of JSON. Raises RuntimeError if the process has ended, TimeoutError if it hangs."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while line := await self._process.stdout.readline():
                if line.startswith(b"{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        raise RuntimeError(f"{self.name} has ended; its message is above")

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command and reads its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.read()

    def cpu_s(self) -> float:
        """Processor time of the process so far, user and system, in seconds."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Resident memory in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    async def stop(self) -> None:
        """Ends the process and its children; returns when they are gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(2 * _STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def running(
    module: str, *flags: str, environment: Mapping[str, str] | None = None, checkout: Path = ROOT
) -> AsyncIterator[JsonProcess]:
    """Runs a module of a checkout until the context ends. Raises RuntimeError if it does not start."""
    process = await asyncio.create_subprocess_exec(
        *(*tether.words(_STOP_GRACE_S), sys.executable, "-m", module, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), **(environment or {})},
        limit=_LINE_BYTES_MAX,
    )
    child = JsonProcess(module, process)
    try:
        child.facts = await child.read(START_TIMEOUT_S)
        yield child
    finally:
        await child.stop()
