"""Matrix products that oneDNN compiles: one for every weight shape and number of rows, kept for the next time.

They are kept twice, by oneDNN for the process (every product has two entries there) and by torch for each thread. What
both keep is compiled once. Torch's own bound is 1024, far more than oneDNN's holds; with the same bound for both no
thread keeps what oneDNN has dropped long ago.
"""

from __future__ import annotations

import os
from typing import Final

PRODUCTS_MAX: Final = 512
PRODUCT_BYTES: Final = 768 << 10
"""What is planned for one. With AVX-512 600 KiB were measured, whatever the size of the weights: 512 took 306 MiB.
A quarter is added for processors with AMX, where five shapes of a small model left 83 MiB behind instead of 63.
"""
_BOUNDS: Final = {
    "LRU_CACHE_CAPACITY": PRODUCTS_MAX,  # torch's
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 2 * PRODUCTS_MAX,
}


def bound_products() -> None:
    """Bounds what is kept, where nobody has said otherwise. It counts for a process that has not multiplied yet."""
    for name, bound in _BOUNDS.items():
        os.environ.setdefault(name, str(bound))
