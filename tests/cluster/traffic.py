"""Starts clients (`client.py`) in their network namespace, and counts their answers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.cluster.container import FILES
from tests.cluster.installation import CLIENT
from tests.cluster.network import CommandError, command, inside

HOSTS: Final = FILES / "client-hosts"
LOG: Final = FILES / "logs" / "client.log"
KINDS: Final = ("http", "grpc")
END_TIMEOUT_S: Final = 90.0
_FAILURES_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Access:
    """Addresses and a key, with which clients ask."""

    host: str
    grpc_host: str
    gateway: str  # its address
    authority: Path
    key: str
    model: str

    def words(self, what: str) -> list[str]:
        """The command line of clients, in their namespace, with the names that they know."""
        HOSTS.write_text(f"127.0.0.1 localhost\n{self.gateway} {self.host} {self.grpc_host}\n")
        flags = {"url": f"https://{self.host}", "grpc": f"{self.grpc_host}:443", "key": self.key, "model": self.model}
        program = [sys.executable, "-m", "tests.cluster.client", what, f"--authority={self.authority}"]
        program += [f"--{name}={value}" for name, value in flags.items()]
        # gRPC's own resolver reads no hosts file that changed after its start; the system's does.
        script = f'mount --bind {HOSTS} /etc/hosts && exec env GRPC_DNS_RESOLVER=native "$@"'
        return [*inside(CLIENT), "unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *program]


@dataclass
class Tally:
    """Answers so far."""

    num_right: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_asking: bool = False

    def put(self, line: Mapping[str, Any]) -> None:
        if "cases" in line:
            self.is_asking = True
        elif line["error"]:
            if len(self.failures) < _FAILURES_MAX:
                self.failures.append(f"{line['kind']}: {line['error']}")
        else:
            self.num_right[line["kind"]] += 1
        self.changed.set()

    @property
    def num_answers(self) -> int:
        return self.num_right.total() + len(self.failures)

    async def more(self, number: int, timeout_s: float) -> None:
        """Waits until so many more requests of each kind have been answered rightly. Raises TimeoutError."""
        wanted = {kind: self.num_right[kind] + number for kind in KINDS}
        async with asyncio.timeout(timeout_s):
            while any(self.num_right[kind] < wanted[kind] for kind in KINDS):
                self.changed.clear()
                await self.changed.wait()


async def checked(access: Access) -> dict[str, Any]:
    """Runs `client.py check`; returns what it found. Raises CommandError."""
    found: dict[str, Any] = json.loads(
        (await command(*access.words("check"), timeout_s=END_TIMEOUT_S)).splitlines()[-1]
    )
    return found


@asynccontextmanager
async def asking(access: Access, prompts: list[tuple[str, int]], num_clients: int) -> AsyncIterator[Tally]:
    """Clients ask while the context is open, from when they know the right texts; what has begun is finished."""
    path = FILES / "prompts.json"
    path.write_text(json.dumps(prompts))
    words = [*access.words("ask"), f"--prompts={path}", f"--clients={num_clients}"]
    with LOG.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
        )
    tally = Tally()
    reading = asyncio.create_task(_read(process, tally))
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            while not tally.is_asking:
                if reading.done():
                    raise CommandError(f"the clients have ended:\n{LOG.read_text()[-3000:]}")
                tally.changed.clear()
                await asyncio.wait({reading, asyncio.create_task(tally.changed.wait())}, return_when="FIRST_COMPLETED")
        yield tally
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await reading
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    if process.returncode:
        raise CommandError(f"the clients ended with {process.returncode}:\n{LOG.read_text()[-3000:]}")


async def _read(process: asyncio.subprocess.Process, tally: Tally) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        tally.put(json.loads(line))
    tally.changed.set()
