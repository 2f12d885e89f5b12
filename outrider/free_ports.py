"""Ports for listeners that are told theirs before they bind."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from typing import Final

_PORTS: Final = range(21_000, 30_000)
"""Below those that Linux gives to outgoing connections (32768 to 60999): one of these may be somebody's again by the
time that its listener binds, seconds later. And beyond those of Ray's workers, which end at 19999."""
_TRIES_MAX: Final = 1000


def free_ports(count: int, host: str = "127.0.0.1", *, besides: Collection[int] = ()) -> list[int]:
    """All different; nobody listened on them a moment ago. Raises OSError where there are too few.

    besides: ports that are meant for somebody who does not listen yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: list[int] = []
    refusal: OSError | None = None
    for port in random.SystemRandom().sample(_PORTS, min(_TRIES_MAX, len(_PORTS))):
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                refusal = error
                continue
        if port not in besides:
            found.append(port)
        if len(found) == count:
            return found
    raise refusal or OSError(f"of {len(_PORTS)} ports none is left")
