"""Names of draft workers: one stands for all addresses that it resolves to, such as those of a headless service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from outrider.addresses import join_address, split_address

logger = logging.getLogger(__name__)

REFRESH_S: Final = 5.0
"""Interval of the look-ups."""
TIMEOUT_S: Final = 5.0
"""Longest look-up; the addresses that were found before stay."""

Resolve = Callable[[str], Awaitable[list[str]]]


def is_literal(address: str) -> bool:
    """Whether the host is an IP address."""
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return False
    return True


async def resolve(address: str) -> list[str]:
    """All addresses of a name, of one family: IPv4 where there are some, so that no worker counts twice. Raises OSError
    and TimeoutError."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({join_address(str(where[0]), port) for family, *_, where in found if family == wanted})


class DraftNames:
    """Follows what names resolve to, and tells whoever chooses among the workers."""

    def __init__(self, addresses: Sequence[str], tell: Callable[[list[str]], None], resolve: Resolve = resolve) -> None:
        """`tell` gets all addresses, as often as they are looked up."""
        self._found = {address: [address] if is_literal(address) else [] for address in addresses}
        self._tell = tell
        self._resolve = resolve
        self._failed: set[str] = set()  # names whose last look-up failed
        tell(self._all())

    @property
    def has_names(self) -> bool:
        return not all(map(is_literal, self._found))

    def _all(self) -> list[str]:
        return [each for found in self._found.values() for each in found]

    async def keep_looking(self) -> None:
        """Looks up all names again and again, without end."""
        names = [address for address in self._found if not is_literal(address)]
        while True:
            await asyncio.gather(*map(self._look, names))
            self._tell(self._all())
            await asyncio.sleep(REFRESH_S)

    async def _look(self, name: str) -> None:
        try:
            self._found[name] = await self._resolve(name)
        except (OSError, TimeoutError, UnicodeError) as error:  # the last: no host has such a name
            if name not in self._failed:
                logger.warning("the draft workers at %s are not found: %s", name, error or "no answer")
            self._failed.add(name)
        else:
            if name in self._failed:
                logger.info("the draft workers at %s are found again", name)
            self._failed.discard(name)
