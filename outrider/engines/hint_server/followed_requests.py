"""The engine's open requests as draft workers see them: sessions with committed tokens and followers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.hint_service.messages import (
    CloseStream,
    CommitPublished,
    HintEvent,
    HintsArrived,
    StreamId,
    SubscribeDraft,
    UnsubscribeDraft,
)
from outrider.hint_service.session_names import session_name
from outrider.hints.hint_wire import HintEncoder
from protos.outrider.v1 import draft_pb2, hints_pb2


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """One open request."""

    number: int
    name: str  # `session_name`
    announcement: draft_pb2.AttachRequest  # its tokens are those of its beginning
    token_ids: list[int]  # committed
    attachment: int = 0  # told to the engine; 0: none
    is_paused: bool = False
    followers: dict[StreamId, int] = field(default_factory=dict)  # stream -> committed tokens sent on it
    encoder: HintEncoder = field(default_factory=HintEncoder)


class FollowedRequests:
    """All open requests of one engine. What the engine is to be told gathers in `hints`."""

    def __init__(self) -> None:
        self._by_number: dict[int, FollowedRequest] = {}
        self._by_name: dict[str, FollowedRequest] = {}
        self.hints = hints_pb2.HintFrame()

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def take_hints(self) -> hints_pb2.HintFrame:
        """Returns what the engine is to be told, and begins anew."""
        hints, self.hints = self.hints, hints_pb2.HintFrame()
        return hints

    def open(self, number: int, announcement: draft_pb2.AttachRequest) -> FollowedRequest:
        """Adds a request that the engine announced."""
        name = session_name(announcement.session_id, announcement.hint_token)
        request = FollowedRequest(number, name, announcement, list(announcement.token_ids))
        self._by_number[number] = self._by_name[name] = request
        return request

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
            # A paused draft worker gets no tokens until that changes.
            if not (was_paused and commit.is_paused) or commit.is_finished:
                actions += [self._publish(request, stream_id, commit) for stream_id in request.followers]
            if commit.is_finished:
                ended.append(request.number)
                del self._by_number[request.number], self._by_name[request.name]
        return actions, ended

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
            accepts_hints=not request.is_paused,
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
                for request in self._by_number.values():
                    self._leave(request, event.stream_id)
            case HintsArrived():
                self._add_hints(event)
        return []

    def _leave(self, request: FollowedRequest, stream_id: StreamId) -> None:
        if request.followers.pop(stream_id, None) is not None and not request.followers and request.attachment:
            kept = [each for each in self.hints.subscribe if each.channel != request.number]
            del self.hints.subscribe[:]
            self.hints.subscribe.extend(kept)
            self.hints.unsubscribe.append(str(request.number))
            request.attachment = 0

    def _add_hints(self, event: HintsArrived) -> None:
        request = self._by_name.get(event.session_id)
        if request is None or not event.hints or event.attachment < request.attachment:
            return
        if event.attachment != request.attachment:
            request.attachment, request.encoder = event.attachment, HintEncoder()
            self.hints.subscribe.add(channel=request.number, attachment=event.attachment)
        request.encoder.encode(self.hints.nodes.add(channel=request.number), event.base_len, event.hints)
