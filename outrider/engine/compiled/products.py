"""Bounds the caches of matrix products that oneDNN compiles, one for every weight shape and number of rows.

They are cached twice: by oneDNN for the process (two entries per product) and by torch for each thread. Torch's default
bound is 1024, more than oneDNN's; with equal bounds no thread keeps what oneDNN has dropped.
"""

from __future__ import annotations

import os
from typing import Final

PRODUCTS_MAX: Final = 512
PRODUCT_BYTES: Final = 928 << 10
"""Memory planned per product. With AVX-512 600 KiB were measured, whatever the size of the weights: 512 took 306 MiB.
More is planned for processors with AMX, where five shapes of a small model took 83 MiB instead of 63, and for what the
C library cannot give back once products come and go: with AMX a draft worker grew by 449 MiB over 6,000 requests and
then no further (`python -m benchmarks memory_growth`)."""
_BOUNDS: Final = {
    "LRU_CACHE_CAPACITY": PRODUCTS_MAX,  # torch's
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 2 * PRODUCTS_MAX,
}


def bound_products() -> None:
    """Sets the bounds unless the environment does. Takes effect only before the process's first product."""
    for name, bound in _BOUNDS.items():
        os.environ.setdefault(name, str(bound))
