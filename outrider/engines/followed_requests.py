"""The engine's open requests as draft workers see them: sessions with committed tokens and followers. Pure.

A hint server learns of a request from the engine (`open`). A target worker knows it before its engine does: it calls
`expect`, and hints that come before the engine has opened the request wait for it.

What the engine is to be told is no queue: `take_hints` says it as it is then, a frame at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.engines.frames import MAX_FRAME_NODES, MAX_FRAME_REQUESTS
from outrider.hint_service.messages import (
    CloseStream,
    CommitPublished,
    HintEvent,
    HintsArrived,
    StreamId,
    SubscribeDraft,
    UnsubscribeDraft,
)
from outrider.hint_service.pending_hints import PendingHints, WaitingHints
from outrider.hint_service.session_names import session_name
from outrider.hints.hint_wire import HintEncoder
from protos.outrider.v1 import draft_pb2, hints_pb2

_NODE_ID_MAX: Final = (1 << 32) - 1
"""Above it an id fits into no message. A draft worker may choose its first one so that later ones are."""


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """One open request."""

    number: int  # the engine's; 0: it has not opened the request
    name: str  # `session_name`
    announcement: draft_pb2.AttachRequest  # its tokens are those of its beginning
    token_ids: list[int]  # committed
    attachment: int = 0  # of the draft worker that follows it; 0: none
    told_attachment: int = 0  # that the engine knows of
    is_paused: bool = False  # by the engine
    is_on: bool = True  # the caller permits hints
    waiting: WaitingHints = field(default_factory=WaitingHints)
    followers: dict[StreamId, int] = field(default_factory=dict)  # stream -> committed tokens sent on it
    encoder: HintEncoder = field(default_factory=HintEncoder)

    @property
    def accepts_hints(self) -> bool:
        return self.is_on and not self.is_paused


class FollowedRequests:
    """All open requests of one engine."""

    def __init__(self) -> None:
        self._by_number: dict[int, FollowedRequest] = {}
        self._by_name: dict[str, FollowedRequest] = {}
        self._pending = PendingHints[FollowedRequest]()
        self._changed: dict[FollowedRequest, None] = {}  # the engine may know of another attachment
        self.num_dropped = 0  # hints beyond what a tree holds

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def named(self, name: str) -> FollowedRequest | None:
        """The open request of this name."""
        return self._by_name.get(name)

    def take_hints(self) -> tuple[hints_pb2.HintFrame, float] | None:
        """Returns the next frame for the engine, and when its newest hints arrived, seconds (0.0 without hints). None
        when there is nothing to be told, or too much of it was not taken yet."""
        frame, newest_at = hints_pb2.HintFrame(), 0.0
        for request in list(self._changed)[:MAX_FRAME_REQUESTS]:
            del self._changed[request]
            self._tell_attachment(frame, request)
        # Hints come after their subscription.
        chosen = [] if self._changed else self._pending.take(MAX_FRAME_NODES, MAX_FRAME_REQUESTS, len(self))
        for request, hints in chosen:
            request.encoder.encode(frame.nodes.add(channel=request.number), request.waiting.base_len, hints)
            newest_at = max(newest_at, request.waiting.arrived_at)
        if not (frame.nodes or frame.subscribe or frame.unsubscribe):
            return None
        self._pending.sent(chosen)
        return frame, newest_at

    def _tell_attachment(self, frame: hints_pb2.HintFrame, request: FollowedRequest) -> None:
        if request.attachment == request.told_attachment:
            return  # it has changed, and changed back
        if request.told_attachment:
            frame.unsubscribe.append(str(request.number))
        if request.attachment:
            request.encoder = HintEncoder()
            frame.subscribe.add(channel=request.number, attachment=request.attachment)
        request.told_attachment = request.attachment

    def taken(self, num_frames: int) -> None:
        """Notes that the engine has taken so many more frames."""
        self._pending.taken(num_frames)

    def open(self, number: int, announcement: draft_pb2.AttachRequest) -> FollowedRequest:
        """Adds a request that the engine announced, or takes its number if it was expected."""
        name = session_name(announcement.session_id, announcement.hint_token)
        request = self._by_name.get(name) or FollowedRequest(number, name, announcement, list(announcement.token_ids))
        request.number, request.is_paused = number, False
        self._by_number[number] = self._by_name[name] = request
        self._queue(request)
        return request

    def expect(self, name: str, token_ids: list[int], *, is_on: bool) -> None:
        """Adds a request that the engine will announce. is_on: whether hints are permitted."""
        self._by_name[name] = FollowedRequest(0, name, draft_pb2.AttachRequest(), list(token_ids), is_on=is_on)

    def switch(self, name: str, *, is_on: bool) -> list[CommitPublished]:
        """Permits hints for a request, or no longer."""
        request = self._by_name.get(name)
        if request is None or request.is_on == is_on:
            return []
        request.is_on = is_on
        if not is_on:
            self._detach(request)
        return [self._publish(request, stream_id) for stream_id in request.followers]

    def close(self, name: str) -> list[CommitPublished]:
        """Removes a request that has ended, unless the engine has said so already."""
        request = self._by_name.pop(name, None)
        if request is None:
            return []
        self._forget(request)
        end = hints_pb2.SessionCommit(is_finished=True)
        return [self._publish(request, stream_id, end) for stream_id in request.followers]

    def lose_engine(self) -> list[CommitPublished]:
        """The link to the engine is lost: no hints reach it until it announces its requests anew."""
        self._pending.lose_engine()
        self._changed.clear()
        self._by_number.clear()
        actions = []
        for request in self._by_name.values():
            self._pending.clear(request)
            request.number, request.attachment, request.told_attachment, request.is_paused = 0, 0, 0, True
            actions += [self._publish(request, stream_id) for stream_id in request.followers]
        return actions

    def committed_by(self, number: int) -> list[int]:
        """The committed tokens of a request; [] once it has ended."""
        request = self._by_number.get(number)
        return [] if request is None else request.token_ids

    def take_commits(self, frame: hints_pb2.CommitFrame) -> tuple[list[CommitPublished], list[int]]:
        """Takes the engine's commits; returns the messages for draft workers, and the numbers of ended requests."""
        actions: list[CommitPublished] = []
        ended: list[int] = []
        for commit in frame.commits:
            request = self._by_number.get(commit.channel)
            if request is None:
                continue
            was_paused, request.is_paused = request.is_paused, commit.is_paused
            request.token_ids += commit.token_ids[max(len(request.token_ids) - commit.from_len, 0) :]
            self._pending.commit(request, request.token_ids)
            # A paused draft worker gets no tokens until that changes.
            if not (was_paused and commit.is_paused) or commit.is_finished:
                actions += [self._publish(request, stream_id, commit) for stream_id in request.followers]
            if commit.is_finished:
                ended.append(request.number)
                self._forget(request)
        return actions, ended

    def _forget(self, request: FollowedRequest) -> None:
        self._by_number.pop(request.number, None)
        self._by_name.pop(request.name, None)
        self._changed.pop(request, None)
        self._pending.clear(request)

    def _publish(
        self, request: FollowedRequest, stream_id: StreamId, commit: hints_pb2.SessionCommit | None = None
    ) -> CommitPublished:
        from_len = request.followers[stream_id]
        request.followers[stream_id] = len(request.token_ids)
        return CommitPublished(
            stream_id,
            request.name,
            from_len,
            request.token_ids[from_len:],
            accepts_hints=request.accepts_hints,
            is_finished=commit is not None and commit.is_finished,
            num_verified=0 if commit is None else commit.num_tried_hints,
            num_matched=0 if commit is None else commit.num_held_hints,
        )

    def handle(self, event: HintEvent) -> list[CommitPublished]:
        """Takes what a draft worker sent. About a session that is not open here it is dropped."""
        match event:
            case SubscribeDraft():
                request = self._by_name.get(event.session_id)
                if request is not None:
                    request.followers[event.stream_id] = min(event.known_len, len(request.token_ids))
                    return [self._publish(request, event.stream_id)]
            case UnsubscribeDraft():
                request = self._by_name.get(event.session_id)
                if request is not None:
                    self._leave(request, event.stream_id)
            case CloseStream():
                for request in self._by_name.values():
                    self._leave(request, event.stream_id)
            case HintsArrived():
                self._add_hints(event)
        return []

    def _leave(self, request: FollowedRequest, stream_id: StreamId) -> None:
        if request.followers.pop(stream_id, None) is not None and not request.followers:
            self._detach(request)

    def _detach(self, request: FollowedRequest) -> None:
        """No hints follow for a request."""
        self._pending.clear(request)
        request.attachment = 0
        self._queue(request)

    def _queue(self, request: FollowedRequest) -> None:
        """Has the engine told of a request, if it knows it."""
        if request.number:
            if request.attachment != request.told_attachment:
                self._changed[request] = None
            self._pending.queue(request)

    def _add_hints(self, event: HintsArrived) -> None:
        request = self._by_name.get(event.session_id)
        if request is None or not event.hints or not request.accepts_hints or event.attachment < request.attachment:
            return
        if event.attachment != request.attachment:
            self._pending.clear(request)
            request.attachment = event.attachment
        # The engine samples without distributions: there a hint counts as certain.
        hints = [
            hint if hint.distribution is None else hint._replace(distribution=None)
            for hint in event.hints
            if hint.node_id <= _NODE_ID_MAX
        ]
        peer = event.peer or event.stream_id
        self.num_dropped += self._pending.add(request, peer, event.base_len, hints, event.arrived_at)
        self._queue(request)
