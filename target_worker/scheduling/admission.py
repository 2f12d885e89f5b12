"""Admits new sessions: refuses requests which this worker could never serve, gives others their local sources of hints.
Pure."""

from __future__ import annotations

from outrider.errors import InvalidRequest
from target_worker.hints.head_hints import HeadHints
from target_worker.hints.local_source import LocalSource
from target_worker.hints.lookup import LookupHints, RecentOutputs
from target_worker.hints.prediction import PredictionHints
from target_worker.limits import SchedulerLimits
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


def local_sources(
    event: StartSession, limits: SchedulerLimits, recent: RecentOutputs | None, head: HeadHints | None
) -> list[LocalSource]:
    """Returns the sources that the worker's limits and the request permit; `recent` is searched if not None."""
    if event.speculation.is_plain:
        return []
    sources: list[LocalSource] = []
    if limits.has_lookup:
        sources.append(LookupHints(recent, event.cache_salt))
    if event.prediction:  # longer than the context it could not come true
        sources.append(PredictionHints(event.prediction[: limits.max_model_len], event.num_prompt_tokens))
    if head is not None:
        sources.append(head)
    return sources
