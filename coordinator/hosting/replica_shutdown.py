"""The moment at which a replica that stops has to end its requests itself.

Serve (2.60) lets the requests of a replica that leaves run for `graceful_shutdown_timeout_s`. Then it cuts their
connections: a stream ends in the middle, without a word, and its client cannot tell that from a broken network. Serve
tells a deployment nothing of that before it is too late, so its own shutdown is extended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from ray.serve._private import replica

MARGIN_S: Final = 2.0
"""Time that the last errors have to reach clients."""


def before_the_end(end_requests: Callable[[], object]) -> None:
    """Patches this process's replica: `end_requests` is called MARGIN_S before Serve cuts what is left, perhaps on
    another thread than the deployment's."""
    drain = replica.Replica._drain_ongoing_requests

    async def drain_and_end(self: Any, *arguments: Any, **named: Any) -> None:
        grace_s = self._deployment_config.graceful_shutdown_timeout_s
        timer = asyncio.get_running_loop().call_later(max(grace_s - MARGIN_S, grace_s / 2), end_requests)
        try:
            await drain(self, *arguments, **named)
        finally:
            timer.cancel()

    replica.Replica._drain_ongoing_requests = drain_and_end
