"""The gRPC service for draft workers, outrider.v1.Hints: hints come in, commits go out. Runs on the event loop.

A target worker serves it, and so does whatever else verifies hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc.aio

from outrider.errors import InvalidRequest, OutriderError, Overloaded, detached
from outrider.hint_service.connections import Connection, Connections
from outrider.hint_service.messages import (
    CloseStream,
    CommitPublished,
    HintEvent,
    HintsArrived,
    StreamId,
    SubscribeDraft,
    UnsubscribeDraft,
)
from outrider.hint_service.session_names import session_id_of, session_name
from outrider.hints.hint_wire import HintDecoder
from outrider.message_sizes import MAX_MESSAGE_BYTES
from outrider.observability.telemetry import TargetMetrics
from outrider.worker.rpc import abort
from outrider.worker.session_checks import is_session_id
from protos.outrider.v1 import hints_pb2, hints_pb2_grpc

logger = logging.getLogger(__name__)

MAX_CHANNEL = 65535
MAX_FRAME_MESSAGES = 16384
MAX_FRAME_NODES = 16384  # twice as many as a draft worker gathers
MAX_COMMITS_PER_FRAME = 256
MAX_PENDING_COMMITS = 4096  # per draft stream; one that exceeds it is closed
MAX_PENDING_BYTES = 1 << 27  # the same
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES // 2  # of commits, unless the first one alone has more
MAX_COMMIT_TOKENS = MAX_FRAME_BYTES // 16  # a varint has five bytes at most; features of a commit have room beside them
ENDED_CHANNELS_KEPT = 256  # per draft stream: hints of the sessions that ended last may still be on their way

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class HintChannel:
    """One session on a draft worker's stream."""

    name: str  # `session_name`
    attachment: int
    is_memory: bool
    decoder: HintDecoder = field(default_factory=HintDecoder)


class DraftStream:
    """Commits on their way to one draft worker, batched into frames while it reads slowly."""

    def __init__(self, stream_id: StreamId, address: str = "") -> None:
        """address: of its connection."""
        self.stream_id = stream_id
        self.address = address
        self.channels: dict[int, HintChannel] = {}  # by number
        self.followed: dict[str, int] = {}  # session id -> the channel that its commits go to
        self._ended: deque[tuple[int, HintChannel]] = deque()  # those that nobody follows any more, oldest first
        self._pending: list[hints_pb2.SessionCommit] = []
        self._num_bytes = 0  # of those pending
        self._pong = 0
        self._wake = asyncio.Event()
        self.is_overrun = False

    def follow(self, subscribe: hints_pb2.Subscribe) -> tuple[str, str | None]:
        """Opens a channel for a session. Returns the session's name, and the name of the session that the channel of
        this number was for so far, if that loses its channel."""
        number, name = subscribe.channel, session_name(subscribe.session_id, subscribe.hint_token)
        left: str | None = None
        if (before := self.channels.get(number)) is not None:
            session_id = session_id_of(before.name)
            if self.followed.get(session_id) == number:
                del self.followed[session_id]  # its commits would be taken for the new session's
                left = before.name if before.name != name else None
        self.channels[number] = HintChannel(name, subscribe.attachment, subscribe.is_memory)
        self.followed[subscribe.session_id] = number
        return name, left

    def end(self, session_id: str) -> HintChannel | None:
        """Stops following a session; returns its channel. That is forgotten after `ENDED_CHANNELS_KEPT` others."""
        number = self.followed.pop(session_id, -1)
        channel = self.channels.get(number)
        if channel is not None:
            self._ended.append((number, channel))
        if len(self._ended) > ENDED_CHANNELS_KEPT:
            number, ended = self._ended.popleft()
            if self.channels.get(number) is ended:  # otherwise another session has it by now
                del self.channels[number]
        return channel

    def put(self, commit: hints_pb2.SessionCommit) -> bool:
        """Queues a commit; false if too many are unread, which ends the stream."""
        self._wake.set()
        num_bytes = self._num_bytes + commit.ByteSize()
        if len(self._pending) >= MAX_PENDING_COMMITS or num_bytes > MAX_PENDING_BYTES:
            self.is_overrun = True
            return False
        self._pending.append(commit)
        self._num_bytes = num_bytes
        return True

    def answer_ping(self, ping: int) -> None:
        """Answers at once, because the draft worker measures the round trip."""
        self._pong = ping
        self._wake.set()

    def close(self) -> None:
        """Wakes the writer, so that it notices the end of the stream."""
        self._wake.set()

    async def next_frame(self) -> hints_pb2.CommitFrame:
        """Waits for commits or a ping, and returns the next frame."""
        await self._wake.wait()
        self._wake.clear()
        count = num_bytes = 0
        for commit in self._pending[:MAX_COMMITS_PER_FRAME]:
            size = commit.ByteSize()
            if count and num_bytes + size > MAX_FRAME_BYTES:
                break
            num_bytes += size
            count += 1
        frame = hints_pb2.CommitFrame(commits=self._pending[:count], pong=self._pong)
        del self._pending[:count]
        self._num_bytes -= num_bytes
        self._pong = 0
        if self._pending:
            self._wake.set()
        return frame


class Submit(Protocol):
    def __call__(self, event: HintEvent, *, is_release: bool = False, peer: str | None = None) -> None: ...


class DraftStreams(hints_pb2_grpc.HintsServicer):
    """Serves outrider.v1.Hints."""

    def __init__(
        self,
        submit: Submit,
        metrics: TargetMetrics,
        vocab_size: int,
        now: Callable[[], float],
        has_room: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        """`submit` sends an event to the scheduler, or raises Overloaded; `now` is its clock, seconds; `has_room`
        tells whether it has room for more from a connection, which otherwise waits."""
        self._submit = submit
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._now = now
        self._has_room = has_room
        self._streams: dict[StreamId, DraftStream] = {}
        self._next_stream_id = 1
        self._connections = Connections()
        self._head = ""
        self._foreign_heads: set[str] = set()

    def use_head(self, fingerprint: str) -> None:
        """Names the draft head whose features commits may have."""
        self._head = fingerprint

    def __len__(self) -> int:
        """The number of open streams."""
        return len(self._streams)

    def publish(self, action: CommitPublished) -> int:
        """Sends a commit to the draft worker that follows its session; returns the number of bytes, 0 for none."""
        stream = self._streams.get(action.stream_id)
        session_id = session_id_of(action.session_id)
        channel = stream.followed.get(session_id) if stream is not None else None
        if stream is None or channel is None:
            return 0
        messages = _commit_messages(action, channel)
        if action.is_finished:
            stream.end(session_id)
        if not all(map(stream.put, messages)):
            return 0
        num_bytes = sum(message.ByteSize() for message in messages)
        self._metrics.num_commit_bytes.inc(num_bytes)
        return num_bytes

    async def Exchange(
        self, request_iterator: AsyncIterator[hints_pb2.HintFrame], context: Context
    ) -> AsyncIterator[hints_pb2.CommitFrame]:
        stream = self._streams[self._next_stream_id] = DraftStream(self._next_stream_id, context.peer())
        self._next_stream_id += 1
        connection = self._connections.join(stream.address)
        reader = asyncio.create_task(self._read_hints(request_iterator, stream, connection))
        reader.add_done_callback(lambda _: stream.close())
        try:
            while not reader.done():
                frame = await stream.next_frame()
                if stream.is_overrun:
                    await self._end(context, Overloaded("this draft worker does not read its commits"))
                if frame.commits or frame.pong:
                    self._metrics.num_commit_frames.inc()
                    yield frame
            if (error := reader.exception()) is not None:
                logger.info("a draft worker's stream broke: %s", error)
            elif (refusal := reader.result()) is not None:
                await self._end(context, refusal)
        finally:
            reader.cancel()
            self._connections.leave(connection)
            del self._streams[stream.stream_id]
            self._submit(CloseStream(stream.stream_id), is_release=True, peer=stream.address)

    async def _end(self, context: Context, error: OutriderError) -> None:
        """Ends a stream with an error; never returns."""
        self._connections.note("the stream of the draft worker at %s is ended: %s", context.peer(), error.message)
        await abort(context, error)

    async def _read_hints(
        self, frames: AsyncIterator[hints_pb2.HintFrame], stream: DraftStream, connection: Connection
    ) -> OutriderError | None:
        """Takes frames until the stream ends; returns the error to end it with, if there is one.

        Calls that have ended hang in cycles of references in grpc until the garbage collector comes. So that a refused
        message, of megabytes, does not hang there too, its reader is closed, and no traceback refers to it.
        """
        receiver: Any = aiter(frames)
        try:
            await self._take_frames(receiver, stream, connection)
            return None
        except OutriderError as error:
            return detached(error)
        finally:
            await receiver.aclose()

    async def _take_frames(
        self, frames: AsyncIterator[hints_pb2.HintFrame], stream: DraftStream, connection: Connection
    ) -> None:
        while True:
            await self._connections.until_due(connection)
            frame = await anext(frames, None)
            if frame is None:
                return
            await self._connections.take(connection, self._take_frame(frame, stream), self._has_room)

    def _num_features(self, subscribe: hints_pb2.Subscribe) -> int | None:
        """Leading positions whose features the draft worker has; None if it gets none."""
        if subscribe.head == self._head != "":
            return subscribe.known_features
        if subscribe.head and subscribe.head not in self._foreign_heads:
            self._foreign_heads = {subscribe.head}  # one line for each, not for each session
            logger.warning(
                "a draft worker runs the draft head %s, and gets no features: the head here is %s",
                *(subscribe.head[:16], self._head[:16] or "none (--draft-head)"),
            )
        return None

    def _take_frame(self, frame: hints_pb2.HintFrame, stream: DraftStream) -> Iterator[None]:
        """Takes a frame, and yields after each of its messages, none of which takes long. Raises InvalidRequest
        for one that is too large as a whole, before it takes anything of it."""
        self._metrics.num_hint_frames.inc()
        check_frame(frame)
        if frame.ping:
            stream.answer_ping(frame.ping)
        for session_id in dict.fromkeys(frame.unsubscribe):
            channel = stream.end(session_id)
            name = session_id if channel is None else channel.name
            self._submit(UnsubscribeDraft(stream.stream_id, name), peer=stream.address)
            yield
        # Of many subscriptions to one session only the last counts.
        for subscribe in {each.session_id: each for each in frame.subscribe}.values():
            if is_session_id(subscribe.session_id) and subscribe.channel <= MAX_CHANNEL:
                name, left = stream.follow(subscribe)
                if left is not None:
                    self._submit(UnsubscribeDraft(stream.stream_id, left), peer=stream.address)
                told = subscribe.known_len, self._num_features(subscribe), subscribe.is_memory
                self._submit(SubscribeDraft(stream.stream_id, name, *told), peer=stream.address)
            yield
        for nodes in frame.nodes:
            channel = stream.channels.get(nodes.channel)
            event = None
            if channel is not None:
                event = parse_hints(nodes, channel, self._vocab_size, self._now(), stream)
            self._metrics.num_hint_bytes.inc(nodes.ByteSize())
            if event is None:
                self._metrics.num_bad_hints.inc()
            else:
                self._submit(event, peer=stream.address)
            yield


def check_frame(frame: hints_pb2.HintFrame) -> None:
    """Raises InvalidRequest for a frame with more than any draft worker has to say at once."""
    num_messages = len(frame.subscribe) + len(frame.nodes) + len(frame.unsubscribe)
    if num_messages > MAX_FRAME_MESSAGES:
        raise InvalidRequest("nodes", f"a frame of {num_messages} messages; permitted: at most {MAX_FRAME_MESSAGES}")
    num_nodes = sum(len(nodes.parent_ids) for nodes in frame.nodes)
    if num_nodes > MAX_FRAME_NODES:
        raise InvalidRequest("nodes", f"a frame of {num_nodes} nodes; permitted: at most {MAX_FRAME_NODES}")


def parse_hints(
    message: hints_pb2.HintNodes, channel: HintChannel, vocab_size: int, arrived_at: float, stream: DraftStream
) -> HintsArrived | None:
    """Decodes hints; None when the message is empty or invalid."""
    hints = channel.decoder.decode(message, vocab_size) if message.parent_ids else None
    if hints is None:
        return None
    return HintsArrived(
        channel.name,
        channel.attachment,
        channel.decoder.base_len,
        hints,
        arrived_at,
        message.ByteSize(),
        channel.is_memory,
        message.match_len,
        stream.stream_id,
        stream.address,
    )


def _commit_messages(action: CommitPublished, channel: int) -> list[hints_pb2.SessionCommit]:
    """A commit in as few messages as fit into frames. What is said of the session comes with the last of them."""
    token_ids, from_len, messages = action.token_ids, action.from_len, list[hints_pb2.SessionCommit]()
    while len(token_ids) > MAX_COMMIT_TOKENS:
        part, token_ids = token_ids[:MAX_COMMIT_TOKENS], token_ids[MAX_COMMIT_TOKENS:]
        is_paused = not action.accepts_hints
        messages.append(
            hints_pb2.SessionCommit(channel=channel, from_len=from_len, token_ids=part, is_paused=is_paused)
        )
        from_len += len(part)
    last = hints_pb2.SessionCommit(
        channel=channel,
        from_len=from_len,
        token_ids=token_ids,
        is_paused=not action.accepts_hints,
        is_finished=action.is_finished,
        num_tried_hints=action.num_verified,
        num_held_hints=action.num_matched,
        features=action.features,
        features_from=action.features_from,
    )
    return [*messages, last]
