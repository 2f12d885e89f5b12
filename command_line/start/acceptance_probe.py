"""Whether the draft is of any use, asked of a system that has just started: a few short texts, hints always on.

A draft that loads and is never accepted looks like one that works, only slower. The coordinator notices it over the
first requests (`coordinator.speculation.acceptance_watch`); who starts a system by hand should see it before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import httpx

PROMPTS: Final = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "Once upon a time there was a king who had three sons. One day he",
    "import os\nimport sys\n\n\ndef main():\n",
)
NUM_TOKENS: Final = 48  # of each text
TIMEOUT_S: Final = 120.0
NUM_ROUNDS_MAX: Final = 3  # of all texts
NUM_STEPS_WANTED: Final = 24  # steps with hints, after which no further text is asked for
NUM_STEPS_MIN: Final = 8
"""Fewer make no verdict."""
USELESS_BELOW: Final = 0.02
"""Tokens gained per step with hints."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Sums over the texts."""

    num_spec_steps: int = 0  # steps that verified hints
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def is_useless(self) -> bool:
        """Whether there were hints enough to say so, and hardly one held."""
        if self.num_spec_steps < NUM_STEPS_MIN:
            return False
        return self.num_accepted_draft_tokens < USELESS_BELOW * self.num_spec_steps

    def report(self, draft: str) -> str:
        """One line for the operator."""
        counts = f"{self.num_accepted_draft_tokens} of {self.num_draft_tokens} hints in a short probe"
        if self.num_spec_steps < NUM_STEPS_MIN:
            return (
                f"The draft {draft} was accepted for {counts}, which is too few to tell: it is slower than the target, "
                "or the machine is busy."
            )
        if not self.is_useless:
            gain = self.num_accepted_draft_tokens / self.num_spec_steps
            return f"The draft {draft} was accepted for {counts}, {gain:.1f} tokens a step."
        return (
            f"The draft {draft} is of no use: it was accepted for {counts}. It loads and has the right tokenizer, but "
            "says other things than the target. Is it a draft for another model, or were its weights damaged by their "
            "quantization? Requests are answered all the same, without a gain."
        )


async def probe(client: httpx.AsyncClient, model: str) -> ProbeResult | None:
    """Asks an OpenAI API whose address, without /v1, the client has. None where it gives no usable answer."""
    steps = drafted = accepted = 0
    try:
        for prompt in PROMPTS * NUM_ROUNDS_MAX:
            if steps >= NUM_STEPS_WANTED:
                break
            body = {
                "model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
                "speculation": {"enabled": True, "always": True},
            }  # fmt: skip
            response = await client.post("/v1/completions", json=body, timeout=TIMEOUT_S)
            response.raise_for_status()
            stats = response.json()["metrics"]["speculative_decoding"]
            steps += stats["num_spec_steps"]
            drafted += stats["num_draft_tokens"]
            accepted += stats["num_accepted_draft_tokens"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return ProbeResult(steps, drafted, accepted)
