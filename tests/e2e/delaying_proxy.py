"""A bad network between workers: every piece of data is held back for a random moment. Order is kept, time is not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

from benchmarks.shared.delaying_proxy import proxy


@contextlib.asynccontextmanager
async def delaying_proxy(target_address: str, *, delay_s_max: float, seed: int = 0) -> AsyncIterator[str]:
    """Forwards connections to `target_address`; yields the proxy's own host:port."""
    rng = random.Random(seed)
    async with proxy(target_address, lambda: rng.uniform(0.0, delay_s_max)) as address:
        yield address
