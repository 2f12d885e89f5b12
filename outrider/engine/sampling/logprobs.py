"""Log probabilities of tokens, from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Rows whose distributions are asked for `token_ids[i]` each, and for their `num_top` likeliest tokens."""

    logits: torch.Tensor  # float32 [num_rows, vocab_size], of any scale: they are normalized here
    token_ids: torch.Tensor  # int64 [num_rows]
    num_top: int

    def scores(self) -> tuple[torch.Tensor, ...]:
        """Log probabilities and ranks of the tokens, ids and log probabilities of the likeliest ones."""
        logprobs = torch.log_softmax(self.logits, dim=-1)
        own = logprobs.gather(1, self.token_ids.unsqueeze(-1))
        ranks = (logprobs > own).sum(dim=-1) + 1
        best = torch.topk(logprobs, min(self.num_top, logprobs.shape[-1]), dim=-1)
        return own, ranks, best.indices, best.values

    def read(self, scores: Sequence[Sequence[float]]) -> list[TokenLogprobs]:
        """Each row's log probabilities, from the elements of `scores` on the host."""
        own, ranks, indices, values = scores
        width = min(self.num_top, self.logits.shape[-1])
        return [
            TokenLogprobs(
                logprob,
                int(rank),
                tuple(
                    zip(
                        map(int, indices[row * width : (row + 1) * width]),
                        values[row * width : (row + 1) * width],
                        strict=True,
                    )
                ),
            )
            for row, (logprob, rank) in enumerate(zip(own, ranks, strict=True))
        ]
