"""The draft workers that follow a session, and what is sent to each of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from outrider.engine.kv.kv_cache import KVSequence
from outrider.hint_service.messages import CommitPublished, StreamId

FEATURES_PER_COMMIT: Final = 32
"""Positions whose features one message has: a megabyte for states of 16,384 numbers."""


@dataclass(slots=True)
class Subscriber:
    """A draft or memory worker's stream that follows a session."""

    sent_len: int  # committed tokens sent to it
    is_paused: bool
    num_features: int | None = None  # leading positions whose features were sent; None: it wants none
    is_memory: bool = False  # it is never paused


class Followed(Protocol):
    """A session, as far as draft workers are told of it."""

    session_id: str
    token_ids: list[int]

    @property
    def accepts_hints(self) -> bool: ...

    @property
    def kv(self) -> KVSequence: ...


def commits_for(
    session: Followed,
    stream_id: StreamId,
    subscriber: Subscriber,
    outcome: tuple[int, int] = (0, 0),
    *,
    is_finished: bool = False,
) -> list[CommitPublished]:
    """The messages that bring a worker up to date: one with the new tokens, and more for features that do not fit into
    it. outcome: how many of its hints were verified, and how many of these accepted."""
    from_len, committed_len = subscriber.sent_len, len(session.token_ids)
    accepts_hints = subscriber.is_memory or session.accepts_hints
    subscriber.sent_len, subscriber.is_paused = committed_len, not accepts_hints
    commit = CommitPublished(
        stream_id,
        session.session_id,
        from_len,
        session.token_ids[from_len:],
        accepts_hints,
        is_finished=is_finished,
        num_verified=outcome[0],
        num_matched=outcome[1],
    )
    if subscriber.num_features is None or is_finished or not session.accepts_hints:
        return [commit]
    positions = range(subscriber.num_features, min(session.kv.length, committed_len - 1))
    if not positions:
        return [commit]
    subscriber.num_features = positions.stop
    parts = [positions[start : start + FEATURES_PER_COMMIT] for start in range(0, len(positions), FEATURES_PER_COMMIT)]
    later = replace(commit, from_len=committed_len, token_ids=[], num_verified=0, num_matched=0)
    return [
        _with_features(each, session.kv, part)
        for each, part in zip([commit, *[later] * len(parts)], parts, strict=False)
    ]


def _with_features(commit: CommitPublished, kv: KVSequence, positions: Sequence[int]) -> CommitPublished:
    first, end = positions[0], positions[-1] + 1
    return replace(commit, features_from=first, feature_slots=kv.slots(first, end))
