"""Compares vLLM's sampling kernels for CPUs with its Triton kernels, which GPUs run. It runs in vLLM's environment.

Triton's interpreter needs no GPU. vLLM uses Triton only where a driver is active, so one is claimed to be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

NUM_TRIALS: Final = 30
VOCAB_SIZE: Final = 50
MAX_HINTS: Final = 7


def _triton_sampler() -> Any:
    """vLLM's rejection sampler with the kernels of GPUs, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample import rejection_sampler

    assert HAS_TRITON
    return rejection_sampler


def differences() -> list[str]:
    """Returns what the kernels do differently, in random batches of greedy and sampled requests."""
    import torch

    sampler = _triton_sampler()
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    from outrider.engines.vllm import cpu_sampler

    current_platform.import_kernels()
    random = torch.Generator().manual_seed(2)
    found = []
    for trial in range(NUM_TRIALS):
        batch = _batch(random)
        of_gpu = dict(_results(batch, *_triton_kernels(sampler)))
        of_cpu = dict(
            _results(
                batch,
                cpu_triton_utils._sample_recovered_tokens_kernel_impl,
                cpu_triton_utils._rejection_random_sample_kernel_impl,
                cpu_triton_utils._rejection_greedy_sample_kernel_impl,
                cpu_sampler._expand,
            )
        )
        found += [f"trial {trial}: {name}" for name in of_gpu if not torch.equal(of_gpu[name], of_cpu[name])]
    return found


def _triton_kernels(sampler: Any) -> Iterator[Any]:
    """The Triton kernels, called as those for CPUs."""

    def recovered(*args: Any, **options: Any) -> None:
        *given, vocab_size = args
        sampler.sample_recovered_tokens_kernel[(len(args[1]), MAX_HINTS)](
            *given, vocab_size, BLOCK_SIZE=64, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False
        )

    def sampled(*args: Any, **options: Any) -> None:
        sampler.rejection_random_sample_kernel[(len(args[0]),)](*args, None, NO_DRAFT_PROBS=True, SYNTHETIC_MODE=False)

    def greedy(*args: Any, **options: Any) -> None:
        sampler.rejection_greedy_sample_kernel[(len(args[0]),)](*args, None, None, SYNTHETIC_MODE=False)

    def expand(*args: Any) -> None:
        sampler.expand_kernel[(len(args[1]),)](*args, MAX_NUM_TOKENS=128)

    yield from (recovered, sampled, greedy, expand)


def _batch(random: Any) -> dict[str, Any]:
    import torch

    num_hints = torch.randint(0, MAX_HINTS + 1, (6,), generator=random, dtype=torch.int32)
    num_tokens = int(num_hints.sum())
    logits = 3.0 * torch.randn(num_tokens, VOCAB_SIZE, generator=random)
    logits[logits < -3.0] = -torch.inf  # as top-k and top-p leave them
    probs = logits.softmax(dim=-1)
    hints = probs.argmax(dim=-1).to(torch.int32)
    is_other = torch.rand(num_tokens, generator=random) < 0.4
    others = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=random, dtype=torch.int32)
    return {
        "ends": num_hints.cumsum(0).to(torch.int32),
        "probs": probs,
        "hints": torch.where(is_other, others, hints),
        "bonus": torch.randint(0, VOCAB_SIZE, (6, 1), generator=random, dtype=torch.int32),
        "inverse_noise": torch.empty(6, VOCAB_SIZE).exponential_(generator=random).reciprocal(),
        "uniform": torch.rand(num_tokens, generator=random, dtype=torch.float64),
        "is_greedy": torch.rand(6, generator=random) < 0.3,
        "parameters": torch.randint(0, 3, (6,), generator=random).float(),
    }


def _results(
    batch: dict[str, Any], recovered: Any, sampled: Any, greedy: Any, expand: Any
) -> Iterator[tuple[str, Any]]:
    import torch

    ends, hints, probs, is_greedy = (batch[name] for name in ("ends", "hints", "probs", "is_greedy"))
    others = torch.zeros_like(hints)
    recovered(others, ends, hints, None, probs, batch["inverse_noise"], VOCAB_SIZE, NO_DRAFT_PROBS=True)
    yield "recovered tokens", others
    output = torch.full((len(ends), MAX_HINTS + 1), -1, dtype=torch.int32)
    greedy(output, ends, hints, probs.argmax(dim=-1), batch["bonus"], is_greedy, MAX_HINTS)
    sampled(
        output, ends, hints, None, probs, batch["bonus"], others, batch["uniform"], is_greedy, MAX_HINTS, VOCAB_SIZE,
        NO_DRAFT_PROBS=True,
    )  # fmt: skip
    yield "output tokens", output
    expanded = torch.zeros(len(hints))
    expand(expanded, batch["parameters"], ends, 0, 1)
    yield "parameters by token", expanded
