"""The network of the only node: a bridge, a namespace with an address for each pod, and the rules in it.

All of it lies in the network and mount namespaces of this process (`isolation`) and goes with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outrider.errors import OutriderError

BRIDGE: Final = "cluster0"
NODE: Final = "10.244.0.1"
_PODS: Final = "10.244.0."
_SERVICES: Final = "10.96.0."
NUM_ADDRESSES_MAX: Final = 254
COMMAND_TIMEOUT_S: Final = 30.0


class CommandError(OutriderError):
    """A command of the system failed; the message has what it said."""


async def command(*words: str, text: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Runs a command of the system with a text as its input; returns its output. Raises CommandError, TimeoutError."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(text.encode())
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode:
        raise CommandError(f"{' '.join(words)} ended with {process.returncode}: {output.decode()}\n{text}")
    return output.decode()


def inside(name: str) -> list[str]:
    """The words before a command that is to run in a network namespace."""
    return ["nsenter", f"--net=/run/netns/{name}"]


class Network:
    """Addresses and namespaces. `open` comes first."""

    def __init__(self) -> None:
        self._num_pods = self._num_services = 1  # the bridge has the first address
        self._loaded: dict[str, str] = {}  # rules by the name of the namespace
        self._changing = asyncio.Lock()

    async def open(self) -> None:
        lines = (
            "link set lo up",
            f"link add {BRIDGE} type bridge",
            f"address add {NODE}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        )
        await command("ip", "-batch", "-", text="\n".join(lines))

    async def add(self, name: str) -> str:
        """Makes a namespace; returns its address."""
        address = self._next(_PODS)
        link = f"veth{address.rpartition('.')[2]}"
        await command("ip", "netns", "add", name)
        outside = (
            f"link add {link} type veth peer name eth0 netns {name}",
            f"link set {link} master {BRIDGE} up",
        )
        inside_it = (
            "link set lo up",
            f"address add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {NODE}",  # by which addresses of services have a way, until they are translated
        )
        await command("ip", "-batch", "-", text="\n".join(outside))
        await command("ip", "-netns", name, "-batch", "-", text="\n".join(inside_it))
        self._loaded[name] = ""
        return address

    async def remove(self, name: str) -> None:
        async with self._changing:
            del self._loaded[name]
            await command("ip", "netns", "delete", name)

    async def load(self, name: str, rules: str) -> None:
        """Replaces the rules of a namespace, if it is there and they are others."""
        async with self._changing:
            if self._loaded.get(name, rules) != rules:
                await command(*inside(name), "nft", "-f", "-", text=rules)
                self._loaded[name] = rules

    def service_address(self) -> str:
        """A new address for a service; no machine has it."""
        return self._next(_SERVICES)

    def _next(self, prefix: str) -> str:
        if prefix == _PODS:
            self._num_pods += 1
            number = self._num_pods
        else:
            self._num_services += 1
            number = self._num_services
        if number > NUM_ADDRESSES_MAX:
            raise CommandError(f"all addresses of {prefix}0/24 are used up")
        return f"{prefix}{number}"


async def reachable(name: str, targets: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
    """Whether connections from a namespace to these addresses and ports are answered in time, be it by a refusal."""
    script = Path(__file__).with_name("dial.py")
    words = [f"{address}:{port}" for address, port in targets]
    output = await command(*inside(name), "python3", "-I", "-S", str(script), str(timeout_s), *words)
    return [line == "open" for line in output.splitlines()]
