"""The local sources of hints that a new session gets. Pure."""

from __future__ import annotations

from target_worker.hints.local_source import LocalSource
from target_worker.hints.lookup import LookupHints, RecentOutputs
from target_worker.hints.prediction import PredictionHints
from target_worker.limits import SchedulerLimits
from target_worker.messages import StartSession


def local_sources(event: StartSession, limits: SchedulerLimits, recent: RecentOutputs | None) -> list[LocalSource]:
    """Returns the sources that the worker's limits and the request permit; `recent` is searched if not None."""
    if event.speculation.is_plain:
        return []
    sources: list[LocalSource] = []
    if limits.has_lookup:
        sources.append(LookupHints(recent, event.cache_salt))
    if event.prediction:  # longer than the context it could not come true
        sources.append(PredictionHints(event.prediction[: limits.max_model_len], event.num_prompt_tokens))
    return sources
