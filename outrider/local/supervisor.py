"""Starts, watches, restarts and stops child processes together.

Invariant: whatever ends the supervisor (a return, an exception, a signal, SIGKILL), no process started through it is
left. Every child runs under a tether (`outrider/local/tether.py`) in a session of its own, so a terminal's Ctrl-C
reaches the supervisor alone, and the supervisor chooses the order in which children stop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.local.child import Child
from outrider.local.child_log import ChildLog
from outrider.local.child_spec import ChildEvent, ChildSpec, RestartPolicy


class Supervisor:
    """Starts children in groups, in parallel within one; stops them in reverse order."""

    def __init__(
        self,
        log_dir: Path,
        policy: RestartPolicy | None = None,
        on_event: Callable[[ChildEvent], None] = lambda event: None,
        echo: Callable[[str, str], None] | None = None,
    ) -> None:
        self._log_dir = log_dir
        self._policy = policy or RestartPolicy()
        self._on_event = on_event
        self._echo = echo
        self._children: list[Child] = []

    async def start(self, specs: Sequence[ChildSpec]) -> list[dict[str, Any]]:
        """Starts `specs` in parallel and returns their ready lines in the same order.

        Raises the first StartError; children that did start are left for `stop`.
        """
        self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        children = [
            Child(spec, ChildLog(spec.name, self._log_dir, self._echo), self._policy, self._on_event) for spec in specs
        ]
        self._children += children
        starts = [asyncio.create_task(child.start()) for child in children]
        try:
            return await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def stop(self) -> None:
        """Stops every child; roles stop in reverse order of their start."""
        for _, group in itertools.groupby(self._children[::-1], key=lambda child: child.spec.role):
            await asyncio.gather(*(child.stop() for child in group))
        self._children.clear()

    def hurry(self) -> None:
        """Kills every child at once, without the grace periods of `stop`."""
        for child in self._children:
            child.hurry()

    def pids(self) -> dict[str, int]:
        """The pid that each ready child reported, by name."""
        return {child.spec.name: int(child.ready_line.get("pid", 0)) for child in self._children}
