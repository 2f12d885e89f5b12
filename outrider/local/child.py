"""One supervised child process: started under a tether, watched, restarted when it dies, stopped.

A child reports that it is ready by one JSON line on stdout, `{"event": "ready", ...}`. If it ends before its first
ready line, the start fails; if it ends later, it is restarted after a growing, bounded delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from outrider.errors import ConfigurationError
from outrider.local import tether
from outrider.local.child_log import ChildLog
from outrider.local.child_spec import ChildEvent, ChildSpec, Phase, RestartPolicy, parse_ready_line

KILL_MARGIN_S = 5.0  # after a child's grace period, until its tether has killed the rest of the family
PUMP_DRAIN_S = 2.0  # for the last lines of an ended child
LINE_LEN_MAX = 1 << 20  # bytes of one line of output


class StartError(ConfigurationError):
    """A child could not start; the message holds the last lines it wrote."""


class Child:
    """One child over all its restarts. Only its task starts processes for it."""

    def __init__(
        self, spec: ChildSpec, log: ChildLog, policy: RestartPolicy, on_event: Callable[[ChildEvent], None]
    ) -> None:
        self.spec = spec
        self.log = log
        self.ready_line: dict[str, Any] = {}
        self._policy = policy
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._end = ""  # how the last process ended
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        """Returns the first ready line; raises StartError when the child ends or stays silent instead."""
        first_ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_running(first_ready), name=f"child {self.spec.name}")
        return await first_ready

    async def stop(self) -> None:
        """Sends SIGTERM, waits for the grace period, then sends SIGKILL. Returns when the child is gone; safe in any
        state."""
        self._is_stopping = True
        if self._task is None:
            return
        if self._process is None or self._process.returncode is not None:
            self._task.cancel()  # between two processes
        else:
            self._send(signal.SIGTERM)
        _, pending = await asyncio.wait({self._task}, timeout=self.spec.stop_grace_s + KILL_MARGIN_S)
        if pending:
            self._kill_group()
            self._task.cancel()
            await asyncio.wait(pending)
        was_killed = bool(pending) or signal.SIGKILL.name in self._end
        detail = f"killed, it did not end within {self.spec.stop_grace_s:g} s" if was_killed else ""
        self._on_event(ChildEvent(self.spec.name, Phase.STOPPED, detail))
        self.log.close()

    def hurry(self) -> None:
        """Kills the child and its family at once; `stop` then returns immediately."""
        self._is_stopping = True
        self._send(signal.SIGQUIT)

    async def _keep_running(self, first_ready: asyncio.Future[dict[str, Any]]) -> None:
        num_deaths = 0
        while True:
            self._on_event(ChildEvent(self.spec.name, Phase.STARTING))
            started_s = time.monotonic()
            try:
                end = await self._live(first_ready)
            except OSError as error:
                end = f"could not be started: {error}"
            self._end = end
            if not first_ready.done():
                first_ready.set_exception(StartError(self._explain(end)))
            if self._is_stopping or first_ready.cancelled() or first_ready.exception() is not None:
                return
            if time.monotonic() - started_s >= self._policy.stable_after_s:
                num_deaths = 0
            num_deaths += 1
            delay_s = self._policy.delay_s(num_deaths)
            self._on_event(ChildEvent(self.spec.name, Phase.DIED, f"{end}; starting it again in {delay_s:g} s"))
            await asyncio.sleep(delay_s)

    async def _live(self, first_ready: asyncio.Future[dict[str, Any]]) -> str:
        """Runs the process once. Returns how it ended, in words."""
        self._end = ""
        process = await self._spawn()
        is_ready = asyncio.Event()
        pumps = [
            asyncio.create_task(self._pump(process.stdout, is_ready, first_ready)),
            asyncio.create_task(self._pump(process.stderr, None, None)),
        ]
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(is_ready.wait())
        try:
            await asyncio.wait({ended, ready}, timeout=self.spec.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and not is_ready.is_set():
                self._send(signal.SIGTERM)
                await ended
                return f"was not ready within {self.spec.ready_timeout_s:g} s"
            await ended
            return describe_status(ended.result())
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.wait(pumps, timeout=PUMP_DRAIN_S)
            for pump in pumps:
                pump.cancel()
            if process.returncode is None:
                self._kill_group()

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *tether.words(self.spec.stop_grace_s),
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.spec.environment},
            start_new_session=True,
            limit=LINE_LEN_MAX,
        )
        return self._process

    async def _pump(
        self,
        stream: asyncio.StreamReader | None,
        is_ready: asyncio.Event | None,
        first_ready: asyncio.Future[dict[str, Any]] | None,
    ) -> None:
        """Copies lines to the log until the stream ends; extracts the ready line from stdout."""
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:
                self.log.write(f"(a line of more than {LINE_LEN_MAX} bytes was dropped)")
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip("\n")
            self.log.write(line)
            ready_line = parse_ready_line(line) if is_ready and not is_ready.is_set() else None
            if is_ready is not None and first_ready is not None and ready_line is not None:
                self.ready_line = ready_line
                is_ready.set()
                self._on_event(ChildEvent(self.spec.name, Phase.READY, str(ready_line.get("address", ""))))
                if not first_ready.done():
                    first_ready.set_result(ready_line)

    def _explain(self, end: str) -> str:
        tail = "\n".join(f"  {line}" for line in self.log.tail()) or "  (it wrote nothing)"
        return f"{self.spec.name} {end}. Its last lines ({self.log.path}):\n{tail}"

    def _send(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """An exit status in words, with the tether's 128 + n read back as a signal."""
    number = -status if status < 0 else status - 128
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit status {status}"
