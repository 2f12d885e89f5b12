"""What a step says for a session. Plain data, and loads without torch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step says for one session: accepted hints, then one token more unless the last hint held, too.

    Empty where the parameters leave no token at the first position.
    """

    token_ids: list[int]
    num_accepted: int  # of the hints that were fed to the model
    num_matched: int  # of all hints, one that was not fed included
    logprobs: list[TokenLogprobs] | None = None  # one per token, where the request asks for them
