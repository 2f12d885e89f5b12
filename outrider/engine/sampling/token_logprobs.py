"""One token's place in a distribution, as it travels to the client. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from protos.outrider.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms. `top` need not hold the token itself."""

    logprob: float  # -inf for a token that was ruled out
    rank: int  # 1 for the likeliest token
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), likeliest first

    def to_proto(self) -> common_pb2.TokenLogprobs:
        return common_pb2.TokenLogprobs(
            logprob=self.logprob,
            rank=self.rank,
            top_token_ids=[token_id for token_id, _ in self.top],
            top_logprobs=[logprob for _, logprob in self.top],
        )
