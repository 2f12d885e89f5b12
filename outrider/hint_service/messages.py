"""Messages between draft workers and the owner of a session, as events and actions. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.hints.hint_tree import Hint

StreamId = int


@dataclass(frozen=True, slots=True)
class SubscribeDraft:
    """A draft worker asks for a session's commits; it knows the first `known_len` committed tokens.

    One that runs a draft head asks for features, too; it knows those of `num_features` positions.
    """

    stream_id: StreamId
    session_id: str
    known_len: int
    num_features: int | None = None
    is_memory: bool = False  # it is a memory worker


@dataclass(frozen=True, slots=True)
class UnsubscribeDraft:
    """A draft worker wants no more commits of a session."""

    stream_id: StreamId
    session_id: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    """A draft worker's stream has ended, with all of its subscriptions."""

    stream_id: StreamId


@dataclass(frozen=True, slots=True)
class HintsArrived:
    """Hints of a draft worker for the positions from `base_len` on."""

    session_id: str
    attachment: int
    base_len: int
    hints: list[Hint]
    arrived_at: float  # shell's clock, seconds; the event may be handled a whole step later
    num_bytes: int = 0  # size of the message
    is_memory: bool = False  # they are a memory worker's
    match_len: int = 0  # of a memory worker: tokens before the root that its hints followed before
    stream_id: StreamId = 0  # on which they came
    peer: str = ""  # address of the stream's connection


@dataclass(frozen=True, slots=True)
class CommitPublished:
    """A commit message for one draft worker's stream."""

    stream_id: StreamId
    session_id: str
    from_len: int
    token_ids: list[int]
    accepts_hints: bool
    is_finished: bool
    num_verified: int = 0  # the draft worker's hints that were verified for these tokens
    num_matched: int = 0  # the leading ones of them that were accepted
    features_from: int = 0  # first position whose features are sent
    feature_slots: npt.NDArray[np.int64] | None = None  # of the KV entries that have them
    features: bytes = b""  # as on the wire


HintEvent = SubscribeDraft | UnsubscribeDraft | CloseStream | HintsArrived
