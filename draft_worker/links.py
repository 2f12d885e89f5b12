"""Hint streams from this draft worker to target workers: one `Hints.Exchange` per target, for all sessions.

A link opens with the first session for its target and closes after the last one has left. A broken link reopens with
growing pauses, and `LinkOpened` tells the scheduler to resend its state. Hints that the target's next step could verify
leave at once. Others gather for a moment, because a message costs the target about the same whatever its size.
Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio

from draft_worker.distances import Distance, Distances
from draft_worker.messages import Action, CommitReceived, Event, LinkOpened, SendHints, Subscribe, Unsubscribe
from outrider.concurrency.background import end_tasks
from outrider.errors import InvalidRequest, OutriderError
from outrider.hints.hint_wire import HintEncoder
from outrider.security.tls import PLAINTEXT, Dialer, Role
from outrider.worker.rpc import CHANNEL_OPTIONS
from protos.outrider.v1 import hints_pb2, hints_pb2_grpc

logger = logging.getLogger(__name__)

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
MAX_PENDING_NODES = 8192  # per link; nodes beyond it are dropped and resent later
GATHERING_SHARE = 0.25  # of the time between two commits
MAX_INTERVAL_S = 0.1  # between commits; longer ones are pauses
PING_S = 2.0  # as often as the registry is updated
ROOM_S = 0.005  # how often a link that waits for room looks for it
MAX_FRAME_COMMITS = 4096  # the most that a target queues for a slow draft worker
NUM_CHANNELS = 16383  # two bytes of varint; far more than sessions on one stream


Dial = Callable[[str], AbstractAsyncContextManager[Any]]
"""Opens `Hints.Exchange` at an address and yields the grpc.aio call."""


class TargetDialer:
    """Opens a channel for every stream, with the current certificates."""

    def __init__(self, dialer: Dialer = PLAINTEXT) -> None:
        self._dialer = dialer

    @contextlib.asynccontextmanager
    async def __call__(self, address: str) -> AsyncIterator[Any]:
        async with self._dialer.open(address, Role.TARGET, CHANNEL_OPTIONS) as channel:
            yield hints_pb2_grpc.HintsStub(channel).Exchange()


class _Pace:
    """Mean time between two commit messages of a target; it sends one after each step."""

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._last_at: float | None = None

    def hear(self, now: float) -> None:
        if self._last_at is not None:
            self._interval_s += 0.1 * (min(now - self._last_at, MAX_INTERVAL_S) - self._interval_s)
        self._last_at = now

    @property
    def gathering_s(self) -> float:
        """How long hints that are not urgent wait for others, seconds."""
        return GATHERING_SHARE * self._interval_s


class TargetLink:
    """The stream to one target worker, reopened when it breaks."""

    def __init__(
        self,
        address: str,
        on_event: Callable[[Event], None],
        dial: Dial,
        distance: Distance,
        has_room: Callable[[], bool],
    ) -> None:
        self.address = address
        self._dial = dial
        self._distance = distance
        self._is_ping_due = False
        self.hint_tokens: dict[str, str] = {}  # session id -> token that its hints must carry
        self._on_event = on_event
        self._has_room = has_room
        self._channels: dict[str, int] = {}  # session id -> channel on this stream
        self._session_ids: dict[int, str] = {}  # channel -> session id
        self._encoders: dict[int, HintEncoder] = {}  # channel -> encoder
        self._last_channel = 0
        self._hints: list[tuple[int, SendHints]] = []
        self._forget_pending()
        self._has_dropped = False
        self._num_failures = 0
        self._wake = asyncio.Event()
        self._pace = _Pace()
        self._timer: asyncio.TimerHandle | None = None  # wakes the writer for hints that are not urgent
        self._task = asyncio.create_task(self._keep_open(), name=f"hints to {address}")

    def put(self, action: Subscribe | Unsubscribe | SendHints) -> None:
        """Adds an action to the next frame. Frames grow while the stream is busy and while nothing is urgent."""
        match action:
            case Subscribe():
                self._open_channel(action.session_id)
                if action.session_id in self._channels:
                    self._subscribe[action.session_id] = action
            case Unsubscribe():
                self.close_channel(action.session_id)
                self._unsubscribe.add(action.session_id)
            case SendHints() if self._num_pending_nodes >= MAX_PENDING_NODES:
                self._has_dropped = True
            case SendHints() if self._is_subscribed(action.session_id):
                self._num_pending_nodes += len(action.hints)
                self._hints.append((self._channels[action.session_id], action))
        if not isinstance(action, SendHints) or action.is_urgent:
            self._wake.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pace.gathering_s, self._wake.set)

    def _open_channel(self, session_id: str) -> None:
        """Assigns the next free channel number. Numbers cycle, so that one is reused long after its old hints have
        gone."""
        if session_id in self._channels or len(self._channels) >= NUM_CHANNELS:
            return
        while True:
            self._last_channel = self._last_channel % NUM_CHANNELS + 1
            if self._last_channel not in self._session_ids:
                break
        self._channels[session_id] = self._last_channel
        self._session_ids[self._last_channel] = session_id

    def _is_subscribed(self, session_id: str) -> bool:
        """Whether the target knows the session's channel, or learns it with the next frame. A target refuses hints on
        an unknown channel."""
        return session_id in self._subscribe or self._channels.get(session_id) in self._encoders

    def close_channel(self, session_id: str) -> None:
        """Ends a session's channel and drops its hints that were not sent."""
        closed = self._channels.pop(session_id, 0)
        self._session_ids.pop(closed, None)
        self._encoders.pop(closed, None)
        self._subscribe.pop(session_id, None)
        self._hints[:] = [(channel, hints) for channel, hints in self._hints if channel != closed]
        self._num_pending_nodes = sum(len(hints.hints) for _, hints in self._hints)

    async def close(self) -> None:
        self._forget_timer()
        await end_tasks(self._task)

    async def _keep_open(self) -> None:
        while True:
            try:
                async with self._dial(self.address) as call:
                    await self._ride(call)
                reason = "closed by the target"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name} {error.details()}"
            except OutriderError as error:  # an invalid message, or our own model thread is too far behind
                reason = error.message
            pause_s = RETRY_S[min(self._num_failures, len(RETRY_S) - 1)]
            self._num_failures += 1
            logger.info("hint stream to %s broke (%s); retrying in %.2f s", self.address, reason, pause_s)
            await asyncio.sleep(pause_s)

    async def _ride(self, call: Any) -> None:
        """Serves one stream from its opening to its end."""
        self._take_frame()  # what an earlier stream did not send is built anew
        self._encoders.clear()
        self._on_event(LinkOpened(self.address))
        # Not a request iterator: when its call breaks, grpc leaves one waiting, and it would take the next frame.
        writer = asyncio.create_task(self._write(call))
        pinger = asyncio.create_task(self._keep_pinging())
        try:
            async for frame in call:
                if frame is None:  # grpc yields None for a message it cannot parse
                    raise InvalidRequest("commits", "the target sent an invalid message")
                if len(frame.commits) > MAX_FRAME_COMMITS:
                    raise InvalidRequest("commits", f"the target sent {len(frame.commits)} commits at once")
                self._num_failures = 0
                now = asyncio.get_running_loop().time()
                if frame.pong:
                    self._distance.pong(frame.pong, now)
                if frame.commits:
                    self._pace.hear(now)
                while not self._has_room():  # noqa: ASYNC110 - another thread makes room
                    await asyncio.sleep(ROOM_S)
                for commit in frame.commits:
                    session_id = self._session_ids.get(commit.channel)
                    if session_id is not None:  # otherwise it has left meanwhile
                        self._on_event(_commit_event(session_id, commit))
        finally:
            call.cancel()
            writer.cancel()
            pinger.cancel()
            await asyncio.wait([writer, pinger])

    async def _keep_pinging(self) -> None:
        self._is_ping_due = True  # sent with the first frame
        while True:
            await asyncio.sleep(PING_S)
            self._is_ping_due = True
            self._wake.set()

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._has_dropped:  # children of dropped nodes would be stale for ever
                self._on_event(LinkOpened(self.address))
                self._has_dropped = False
            await call.write(self._take_frame())

    def _take_frame(self) -> hints_pb2.HintFrame:
        self._forget_timer()
        frame = hints_pb2.HintFrame(unsubscribe=sorted(self._unsubscribe))
        if self._is_ping_due:
            self._is_ping_due = False
            frame.ping = self._distance.ping(asyncio.get_running_loop().time())
        for action in self._subscribe.values():
            channel = self._channels[action.session_id]
            self._encoders[channel] = HintEncoder()  # the target's decoder of the channel starts anew, too
            frame.subscribe.add(
                session_id=action.session_id,
                attachment=action.attachment,
                known_len=action.known_len,
                known_features=action.known_features,
                head=action.head,
                is_memory=action.is_memory,
                channel=channel,
                hint_token=self.hint_tokens.get(action.session_id, ""),
            )
        for channel, hints in self._hints:
            encoder = self._encoders.setdefault(channel, HintEncoder())
            message = frame.nodes.add(channel=channel, match_len=hints.match_len)
            encoder.encode(message, hints.base_len, hints.hints)
        self._forget_pending()
        return frame

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget_pending(self) -> None:
        self._subscribe: dict[str, Subscribe] = {}
        self._unsubscribe: set[str] = set()
        self._hints = []
        self._num_pending_nodes = 0


class TargetLinks:
    """All links of one draft worker, opened and closed as sessions come and go."""

    def __init__(
        self,
        on_event: Callable[[Event, str], None],
        dial: Dial | None = None,
        has_room: Callable[[str], bool] = lambda address: True,
    ) -> None:
        """`on_event` takes an event and the target's address; `dial` None means plaintext connections; `has_room` tells
        whether there is room for more events of a target, whose stream is not read otherwise."""
        self._on_event = on_event
        self._has_room = has_room
        self._dial = dial or TargetDialer()
        self.distances = Distances()
        self._links: dict[str, TargetLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def join(self, address: str, session_id: str, hint_token: str = "") -> None:
        """Opens the link if necessary and registers the session. Must be followed by `leave`."""
        if address not in self._links:
            self._links[address] = TargetLink(
                address,
                lambda event: self._on_event(event, address),
                self._dial,
                self.distances.to(address),
                lambda: self._has_room(address),
            )
        self._links[address].hint_tokens[session_id] = hint_token

    def leave(self, address: str, session_id: str) -> None:
        """Ends a session's use of the link to its target; a link without sessions is closed later."""
        link = self._links.get(address)
        if link is None:
            return
        link.hint_tokens.pop(session_id, None)
        link.close_channel(session_id)
        if not link.hint_tokens:
            task = asyncio.create_task(self._close_if_idle(link))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_if_idle(self, link: TargetLink) -> None:
        await asyncio.sleep(IDLE_S)
        if not link.hint_tokens and self._links.get(link.address) is link:
            del self._links[link.address]
            await link.close()

    def put(self, action: Action) -> None:
        """Sends a subscription or hints to the target that the action names."""
        if isinstance(action, Subscribe | Unsubscribe | SendHints):
            link = self._links.get(action.target_address)
            if link is not None:
                link.put(action)

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()


IDLE_S = 10.0
"""How long a link outlives its last session, since the next one often comes soon."""


def _commit_event(session_id: str, commit: hints_pb2.SessionCommit) -> CommitReceived:
    return CommitReceived(
        session_id,
        commit.from_len,
        list(commit.token_ids),
        not commit.is_paused,
        commit.is_finished,
        commit.num_tried_hints,
        commit.num_held_hints,
        commit.features,
        commit.features_from,
    )
