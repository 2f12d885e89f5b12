"""vLLM's speculative method beside `HintScheduler`: a proposer that proposes nothing.

With it vLLM reserves room for hints and verifies those that the scheduler puts into a step. It is all of Outrider that
runs in each of vLLM's worker processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.engines.vllm import cpu_sampler


class NoDrafts:
    """A proposer for `--speculative-config '{"method": "custom_class", "model": "…no_drafts.NoDrafts", …}'`."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM requires the parameter."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Mends the sampler of this process; only vLLM's CPU runner calls it. Raises ConfigurationError."""
        cpu_sampler.mend_sampler()

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No draft tokens for each request."""
        return [[] for _ in sampled_token_ids]
