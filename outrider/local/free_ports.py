"""Free ports for listeners that must know theirs before they bind."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

from outrider.addresses import bound_socket
from outrider.errors import detached

_PORTS: Final = range(21_000, 30_000)
"""Below Linux' range for outgoing connections (32768 to 60999), which might take a port before its listener binds,
seconds later; above that of Ray's workers, which ends at 19999."""
_TRIES_MAX: Final = 1000


def free_ports(count: int, host: str = "127.0.0.1", *, besides: Collection[int] = ()) -> list[int]:
    """Returns distinct ports that were free a moment ago. Raises OSError where there are too few.

    besides: ports that are reserved for listeners that have not bound yet.
    """
    found: list[int] = []
    refusal: OSError | None = None
    for port in random.SystemRandom().sample(_PORTS, min(_TRIES_MAX, len(_PORTS))):
        try:
            bound_socket(host, port, is_reusing=False).close()
        except OSError as error:
            refusal = detached(error)
            continue
        if port not in besides:
            found.append(port)
        if len(found) == count:
            return found
    raise refusal or OSError(f"of {len(_PORTS)} ports none is left")
