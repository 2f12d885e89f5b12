"""Relative prices and memory bandwidths of devices. Pure.

Prices say what an hour costs, in units of an L4's. The defaults are rough ratios of large clouds' list prices; nobody
pays exactly these, so `--prices` replaces any of them. Bandwidths are from the makers' data sheets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from command_line.tune.times import StepTimes

CORE: Final = "core"
PRICES: Final[Mapping[str, float]] = {
    CORE: 0.06,
    "t4": 0.5,
    "l4": 1.0,
    "a10g": 1.4,
    "l40s": 2.6,
    "a100-40gb": 5.0,
    "a100": 7.0,
    "h100": 14.0,
    "h200": 15.0,
    "b200": 20.0,
}
GB_PER_S: Final[Mapping[str, float]] = {
    "t4": 320.0,
    "l4": 300.0,
    "a10g": 600.0,
    "l40s": 864.0,
    "a100-40gb": 1555.0,
    "a100": 2039.0,
    "h100": 3350.0,
    "h200": 4800.0,
    "b200": 8000.0,
}


def gpu_type(name: str) -> str | None:
    """The type of a GPU by the name that its driver reports; None where it is not known."""
    lowered = name.lower()
    if "a100" in lowered and "40gb" in lowered:
        return "a100-40gb"
    found = [each for each in GB_PER_S if each in lowered]
    return max(found, key=len, default=None)


def parse_prices(text: str) -> dict[str, float]:
    """Prices by device: the defaults, and what a list such as `h100=10,l4=1` replaces. Raises ValueError."""
    prices = dict(PRICES)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        name = name.strip().lower()
        if name not in PRICES:
            raise ValueError(f"{name!r} is no known device; known are {', '.join(PRICES)}")
        try:
            price = float(value)
        except ValueError:
            price = math.nan
        if not 0.0 < price < math.inf:
            raise ValueError(f"{part!r} is not a name and a price above 0, such as h100=10")
        prices[name] = price
    return prices


def on_another_gpu(times: StepTimes, measured: str, other: str) -> StepTimes:
    """Step times that a model of few rows would have on another type of GPU: its steps are bound by reading weights, so
    they take as much longer as the bandwidth is lower. They are never taken to be faster, as short steps are bound by
    launching kernels."""
    factor = max(1.0, GB_PER_S[measured] / GB_PER_S[other])
    return StepTimes(times.num_tokens, tuple(factor * each for each in times.step_ms), factor * times.sequence_ms)
