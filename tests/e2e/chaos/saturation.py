"""How full the targets are while things break: a fault that meets a half-empty system shows little."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING, WAITING, KV = (
    f"outrider_{each}" for each in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
)
KV_FULL = 0.9  # of the blocks: less than the next text needs
PERIOD_S = 1.0


@dataclass
class Saturation:
    """Counts of the looks at targets, and of those that found every slot busy or the KV cache full."""

    num_slots: int
    num_looks: int = 0
    num_slots_busy: int = 0
    num_kv_full: int = 0
    num_both: int = 0

    def add(self, page: str) -> None:
        """Adds a look at a target's metrics. A page without them does not count."""
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name in (RUNNING, WAITING, KV)
        }
        if len(values) < 3:
            return
        # What waits at a target has a slot, and waits for blocks.
        is_busy = values[RUNNING] + values[WAITING] >= self.num_slots
        is_full = values[KV] >= KV_FULL or values[WAITING] > 0
        self.num_looks += 1
        self.num_slots_busy += is_busy
        self.num_kv_full += is_full
        self.num_both += is_busy and is_full

    def to_json(self) -> dict[str, float]:
        """The number of looks, and shares of them."""
        looks = max(1, self.num_looks)
        return {
            "num_looks": self.num_looks,
            "every_slot_busy": round(self.num_slots_busy / looks, 3),
            "kv_full": round(self.num_kv_full / looks, 3),
            "both": round(self.num_both / looks, 3),
        }

    def __str__(self) -> str:
        shares = self.to_json()
        return (
            f"targets had every slot busy at {shares['every_slot_busy']:.0%} of {self.num_looks} looks, KV full at "
            f"{shares['kv_full']:.0%}, both at {shares['both']:.0%}"
        )


async def watch(saturation: Saturation, targets: Callable[[], Awaitable[Mapping[str, str]]]) -> None:
    """Looks at every target again and again, until it is cancelled."""
    while True:
        for page in (await targets()).values():
            saturation.add(page)
        await asyncio.sleep(PERIOD_S)
