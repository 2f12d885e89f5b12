"""Mends two faults of vLLM 0.32's sampler on a CPU without Triton, which end or falsify sampled requests.

Every kind of speculation meets them, also where a step has no draft token:

- `expand_kernel`'s fallback writes into a copy, so that drafts are judged with parameters that were never written.
- `top_k` takes the maximum of nothing in a step without draft tokens, which ends the engine (vllm#55005).

The first is mended through vLLM's own registry of kernels for platforms, the second by one name of its rejection
sampler. Nothing is touched on other platforms, or where a trial shows that a fault is not there. vLLM is imported only
inside.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from outrider.errors import ConfigurationError

logger = logging.getLogger(__name__)

EXPAND: Final = "expand_kernel writes into a copy"
TOP_K: Final = "top_k fails in a step without draft tokens"


def mend_sampler() -> None:
    """Mends the sampler of this process, one of vLLM's workers. Raises ConfigurationError if a fault is left."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or not current_platform.is_cpu():
        return
    found = list(faults())
    if EXPAND in found:
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})
    if TOP_K in found:
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.apply_top_k_top_p = _unless_empty(rejection_sampler.apply_top_k_top_p)
    if found:
        logger.info("mended vLLM's sampler for a CPU without Triton: %s", "; ".join(found))
    if left := list(faults()):
        raise ConfigurationError(
            f"with speculation this vLLM cannot serve sampled requests on a CPU ({'; '.join(left)}): install triton-cpu"
        )


def faults() -> Iterator[str]:
    """Yields the faults that a trial of this process' sampler shows. The kernels must have been registered."""
    import torch
    from vllm.v1.sample import rejection_sampler

    given = torch.tensor([3.0, 0.0, 5.0])
    expanded = rejection_sampler.expand_batch_to_tokens(given, torch.tensor([2, 2, 5]), 5, replace_from=3, replace_to=4)
    if expanded.tolist() != [4.0, 4.0, 5.0, 5.0, 5.0]:
        yield EXPAND
    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        yield TOP_K


def _expand(output: Any, input_val: Any, cu_num_tokens: Any, replace_from: float, replace_to: float, *_: Any) -> None:
    """Writes each request's value for each of its tokens. cu_num_tokens: tokens up to and with each request."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts, output_size=len(output)))


def _unless_empty(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def guarded(logits: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(logits, *args, **kwargs) if len(logits) else logits

    return guarded
