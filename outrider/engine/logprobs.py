"""Log probabilities of what was said, from logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.token_logprobs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Row i's distribution at `token_ids[i]`, and its `num_top` likeliest tokens.

    logits: float32 [len(token_ids), vocab_size], of any scale: they are normalized here.
    """
    if not token_ids:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    said = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logprobs > said).sum(dim=-1) + 1
    values, indices = torch.topk(logprobs, min(num_top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, rank, row_ids, row_values in zip(
            said[:, 0].tolist(), ranks.tolist(), indices.tolist(), values.tolist(), strict=True
        )
    ]
