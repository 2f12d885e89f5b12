"""SGLang's entry point to Outrider: it registers the speculative algorithm OUTRIDER.

SGLang calls it in each of its processes, whichever algorithm is used. It imports nothing that SGLang has not.
"""

from __future__ import annotations


def register() -> None:
    """Registers the algorithm, for `--speculative-algorithm OUTRIDER`."""
    from outrider.engines.sglang.algorithm import register_algorithm

    register_algorithm()
