"""Checks that refuse requests which this worker could never serve. Pure."""

from __future__ import annotations

from outrider.errors import InvalidRequest
from target_worker.messages import StartSession


def check_request(event: StartSession, max_model_len: int, vocab_size: int) -> None:
    """Raises InvalidRequest for a request that this worker could never serve."""
    num_tokens = len(event.token_ids)
    if not 0 < event.num_prompt_tokens <= num_tokens:
        raise InvalidRequest("token_ids", f"{event.num_prompt_tokens} prompt tokens of {num_tokens} token ids")
    if num_tokens >= max_model_len:
        raise InvalidRequest(
            "token_ids",
            f"{num_tokens} tokens leave no room for output: the longest context is {max_model_len}",
        )
    if num_tokens - event.num_prompt_tokens >= event.sampling.max_tokens:
        raise InvalidRequest("max_tokens", "as many tokens as max_tokens permits are already committed")
    if not all(0 <= token_id < vocab_size for token_id in event.token_ids):
        raise InvalidRequest("token_ids", f"a token id is outside the vocabulary of {vocab_size}")
    if event.prediction and not 0 <= min(event.prediction) <= max(event.prediction) < vocab_size:
        raise InvalidRequest("prediction", f"a token id of prediction is outside the vocabulary of {vocab_size}")
    event.sampling.check_vocabulary(vocab_size)
