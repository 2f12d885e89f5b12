"""The network between simulated hosts: it delays, reorders across streams, breaks and partitions.

What a process that has died had under way is gone, and its peers learn of it: at once where its machine still answers
for it, by their keepalive where it does not. Where nothing gets from one host to another, in one direction or both,
everything waits until it does again, or fails by keepalive. What comes to a process that is stopped lies in its
sockets until it goes on.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from google.protobuf.message import Message

from tests.simulation.calls import (
    EOF,
    GONE,
    KEEPALIVE_S,
    LOSSES,
    RESET,
    SILENT,
    Call,
    Held,
    Method,
    Question,
    Work,
)
from tests.simulation.clock import SimulatedLoop
from tests.simulation.process import NOBODY, Process, make_task

__all__ = ["EOF", "LOSSES", "Call", "Method", "Network", "Process", "make_task"]

_EVERYBODY: Final = "*"
_SERVER_KEEPALIVE_S: Final = 8.0
"""Servers ask less often than their clients whether somebody is there."""


@dataclass
class Network:
    """Hosts, named after the one process that each of them runs."""

    loop: SimulatedLoop
    chance: random.Random
    on_bug: Callable[[str, BaseException], None]
    slow_share: float = 0.02  # of messages that take up to `slow_s`
    slow_s: float = 0.3
    window: int = 256  # messages of a stream that may lie unread, in each direction
    processes: dict[str, Process] = field(default_factory=dict)
    lost_hosts: set[str] = field(default_factory=set)  # machines that are gone and refuse nothing
    _cuts: set[tuple[str, str]] = field(default_factory=set)  # from whom, to whom
    _held: list[Held] = field(default_factory=list)  # by cuts, in the order in which it came
    num_messages: int = 0
    on_blocked: Callable[[Call], None] = lambda call: None  # a server waits for its client to read

    def arrival_s(self, not_before_s: float) -> float:
        """When what is sent now arrives, behind what the stream has sent before."""
        self.num_messages += 1
        delay_s = self.chance.uniform(0.0001, 0.002)
        if self.chance.random() < self.slow_share:
            delay_s = self.chance.uniform(0.0, self.slow_s)
        return max(self.loop.time() + delay_s, not_before_s + 1e-6)  # asyncio mixes up what is due at once

    def come_in(self, held: Held) -> None:
        """Something arrives, unless its way is cut."""
        if self._cuts and not self._cuts.isdisjoint(_ways(held)):
            self._held.append(held)
            return
        call = held.call
        receiver = call.server if held.to_server else call.client
        if receiver is None:  # this is what opens the call
            held.deliver()
        elif receiver.is_alive:
            receiver.receive(held.deliver)

    # Calls.

    def stream(self, client: Process, address: str, method: str, request: Message | None,
               response_type: type[Message], timeout_s: float | None = None) -> Call:  # fmt: skip
        call = Call(self, client, address, method, timeout_s)
        call.open(request, response_type)
        return call

    async def unary(self, client: Process, address: str, method: str, request: Message,
                    response_type: type[Message], timeout_s: float) -> Any:  # fmt: skip
        call = self.stream(client, address, method, request, response_type, timeout_s)
        try:
            return await call.read()
        finally:
            call.cancel()

    @asynccontextmanager
    async def dial(
        self, client: Process, address: str, method: str, response_type: type[Message]
    ) -> AsyncIterator[Call]:
        """A call that is open as long as the context."""
        call = self.stream(client, address, method, None, response_type)
        try:
            yield call
        finally:
            call.cancel()

    async def ask(self, client: Process, host: str, work: Work, timeout_s: float) -> Any:
        """Raises ConnectionError."""
        return await Question(self, client, host, work, timeout_s).answer()

    # Faults.

    def start(self, process: Process) -> None:
        """It listens from now on, in the place of an earlier one of its name."""
        self.processes[process.name] = process
        self.lost_hosts.discard(process.name)

    def end(self, process: Process, *, is_machine_lost: bool = False) -> None:
        """A process is killed, or vanishes with its machine."""
        calls = list(process.calls)
        process.end()
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
            if is_machine_lost:
                self.lost_hosts.add(process.name)
        for call in calls:
            survivor = call.server if call.client is process else call.client
            if survivor is not None and survivor is not process:
                delay_s = KEEPALIVE_S if is_machine_lost else self.chance.uniform(0.0001, 0.01)
                told = partial(survivor.receive, partial(call.lose, survivor, GONE))
                self.loop.call_later(delay_s, told, context=NOBODY)

    def freeze(self, process: Process) -> None:
        """SIGSTOP. Its peers learn of it by their keepalive; its kernel takes in what they send."""
        process.freeze()
        self.loop.call_later(KEEPALIVE_S, self._miss, process, True, context=NOBODY)
        self.loop.call_later(_SERVER_KEEPALIVE_S, self._miss, process, False, context=NOBODY)

    def cut(self, one: str, other: str = _EVERYBODY, *, is_one_way: bool = False) -> None:
        """From now on nothing gets through between two hosts, or to and from one; nobody is told. Where that
        `is_one_way`, what the other sends still comes."""
        for way in ((one, other),) if is_one_way else ((one, other), (other, one)):
            if way not in self._cuts:
                self._cuts.add(way)
                self.loop.call_later(KEEPALIVE_S, self._expire, way, context=NOBODY)

    def join(self, one: str, other: str = _EVERYBODY) -> None:
        """Ends a cut: held messages arrive now, unless their stream has ended meanwhile or another cut holds them."""
        self._cuts -= {(one, other), (other, one)}
        held_before, self._held = self._held, []
        for held in held_before:
            self.come_in(held)

    def reset(self, one: str, other: str = _EVERYBODY, details: str = RESET) -> None:
        """Every stream between two hosts breaks."""
        for call in self._calls_between(one, other):
            for end in (call.client, call.server):
                if end is not None:
                    end.receive(partial(call.lose, end, details))

    def _calls_between(self, one: str, other: str) -> list[Call]:
        found: dict[Call, None] = {}
        for process in self.processes.values():
            for call in process.calls:
                ends = (call.client.name, call.host)
                if one in ends and (other == _EVERYBODY or other in ends):
                    found[call] = None
        return list(found)

    def _expire(self, way: tuple[str, str]) -> None:
        """Pings need both directions: either end of each stream finds out, and what was held of it is lost."""
        if way not in self._cuts:
            return
        one, other = way if way[0] != _EVERYBODY else way[::-1]
        held_before, self._held = self._held, []
        for held in held_before:
            ends = (held.call.client.name, held.call.host)
            if one in ends and (other == _EVERYBODY or other in ends):
                client = held.call.client
                client.receive(partial(held.call.lose, client, SILENT))
            else:
                self._held.append(held)
        self.reset(one, other, details=SILENT)
        self.loop.call_later(KEEPALIVE_S, self._expire, way, context=NOBODY)

    def _miss(self, process: Process, is_client_asking: bool) -> None:
        """Whoever asks for a sign of life of one that is still stopped gives its streams up."""
        if not process.is_frozen or not process.is_alive:
            return
        for call in list(process.calls):
            peer = call.client if call.server is process else call.server
            if peer is None or (call.client is peer) != is_client_asking:
                continue
            peer.receive(partial(call.lose, peer, SILENT))
            process.receive(partial(call.lose, process, SILENT))
        every_s = KEEPALIVE_S if is_client_asking else _SERVER_KEEPALIVE_S
        self.loop.call_later(every_s, self._miss, process, is_client_asking, context=NOBODY)


def _ways(held: Held) -> tuple[tuple[str, str], ...]:
    """The cuts that would hold it."""
    client, server = held.call.client.name, held.call.host
    one, other = (client, server) if held.to_server else (server, client)
    return (one, other), (one, _EVERYBODY), (_EVERYBODY, other)
