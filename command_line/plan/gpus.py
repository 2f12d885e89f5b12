"""Memory of GPU types and sizes of memory in words."""

from __future__ import annotations

import re
from typing import Final

from outrider.engine.kv.kv_plan import GIB

GPUS: Final = {
    "t4": 14,
    "a10g": 22,
    "l4": 22,
    "a100-40gb": 39,
    "l40s": 44,
    "a100": 78,
    "h100": 78,
    "h200": 139,
    "b200": 178,
}
"""GiB by type: about what its driver reports, rounded down; none was measured here."""
_PREFIXES: Final = "KMGT"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", re.IGNORECASE)


def gpu_memory(name: str) -> int:
    """Bytes of a type of GPU. Raises ValueError naming those that are known."""
    if name.lower() not in GPUS:
        raise ValueError(f"{name!r} is not known; known are {', '.join(GPUS)}. Give the memory of another by its size")
    return GPUS[name.lower()] * GIB


def parse_size(text: str) -> int:
    """Bytes of a size such as 80GiB or 80GB. KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB of 1000, with
    or without the B. Raises ValueError, also for a number without a unit."""
    found = _SIZE.fullmatch(text.strip())
    size = 0.0
    if found is not None:
        prefix, binary = (found[2] or "").upper(), found[3]
        size = float(found[1]) * ((1024 if binary else 1000) ** (1 + _PREFIXES.index(prefix)) if prefix else 1)
    if size < 1:
        wanted = f"{text.strip()}GiB or {text.strip()}GB" if re.fullmatch(r"\d+", text.strip()) else "80GiB or 80GB"
        raise ValueError(f"{text!r} is not a size with its unit, such as {wanted}")
    return int(size)


def is_gpu(text: str) -> bool:
    """Whether it is the name of a type, and no size."""
    return text.strip()[:1].isalpha()


def parse_memory(text: str) -> int:
    """Bytes of a size, or of a type of GPU. Raises ValueError."""
    return gpu_memory(text.strip()) if is_gpu(text) else parse_size(text)
