"""vLLM's speculative method beside `HintScheduler`: a proposer that proposes nothing.

With it vLLM reserves room for hints and verifies those that the scheduler puts into a step. It imports nothing of
vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NoDrafts:
    """A proposer for `--speculative-config '{"method": "custom_class", "model": "…no_drafts.NoDrafts", …}'`."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM requires the parameter."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing; vLLM's CPU runner calls it."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No draft tokens for each request."""
        return [[] for _ in sampled_token_ids]
