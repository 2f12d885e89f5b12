"""The sources of a session's hints, and what arrives for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.hints.confidence import Calibration
from outrider.sampling_params import DecodingMode
from target_worker.hints.head_hints import HeadHints
from target_worker.hints.local_source import LocalSource
from target_worker.hints.lookup import LookupHints, RecentOutputs
from target_worker.hints.memory import MemoryHints
from target_worker.hints.prediction import PredictionHints
from target_worker.limits import SchedulerLimits
from target_worker.messages import HintsArrived, StartSession
from target_worker.scheduling.session import Session
from target_worker.scheduling.session_statistics import add_up_to_limit


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


def take_hints(session: Session, event: HintsArrived, calibrations: Mapping[DecodingMode, Calibration]) -> bool:
    """Adds hints that arrived to a session's tree for them; returns whether a draft worker sent them and they are
    accepted. calibrations: of memory workers' confidence."""
    if event.is_memory:
        if not session.speculation.is_plain:
            _memory_of(session, calibrations).add(session.token_ids, event)
    elif session.accepts_hints:
        session.tree.add(session.token_ids, event.attachment, event.base_len, event.hints)
    else:
        session.tree.num_stale += len(event.hints)
        return False
    add_up_to_limit(session.stats, "num_hint_bytes", event.num_bytes)
    return not event.is_memory


def _memory_of(session: Session, calibrations: Mapping[DecodingMode, Calibration]) -> MemoryHints:
    """The session's source of memory workers' hints, which it gets with the first of them."""
    if session.memory is None:
        session.memory = MemoryHints(session.committed_len, calibrations.get(session.decoding_mode))
        session.local = [*session.local, session.memory]
    return session.memory
