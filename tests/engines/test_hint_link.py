"""An engine never waits for its hint server, and outlives whatever that does."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from outrider.engines.frames import BYTES_MAX, FrameKind, FrameReader, pack, time_number
from outrider.engines.hint_link import MAX_UNSENT_BYTES, RESTART_S, SEND_BYTES, STUCK_S, TAKEN_S, HintLink
from protos.outrider.v1 import hints_pb2

LAST_RESORT_S = 60.0


class Peer:
    """The other end of a link, in this process; beside it stands a process that does nothing."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.links: list[HintLink] = []
        self.error: OSError | None = None

    def link(self, settings: dict[str, int] | None = None) -> HintLink:
        """A link to this peer, which the end of the test closes."""
        self.links.append(HintLink(settings or {}, self.start))
        return self.links[-1]

    def start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        if self.error is not None:
            raise self.error
        self.sockets.append(socket.fromfd(theirs.fileno(), theirs.family, theirs.type))
        self.sockets[-1].settimeout(LAST_RESORT_S)
        self.processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return self.processes[-1]

    def received(self, num_frames: int) -> list[tuple[FrameKind, int, bytes]]:
        reader, frames = FrameReader(), list[tuple[FrameKind, int, bytes]]()
        while len(frames) < num_frames:
            data = self.sockets[-1].recv(min(1 << 16, reader.room))
            assert data, "the link was closed"
            reader.feed(data)
            frames += reader.frames()
        return frames


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    for link in made.links:
        link.close()
    for each in made.sockets:
        each.close()
    for process in made.processes:
        process.kill()
        process.wait(LAST_RESORT_S)


def largest(channel: int = 1, more: int = 0) -> bytes:
    """A frame with as many bytes as are permitted, and `more`."""
    frame = hints_pb2.HintFrame(subscribe=[hints_pb2.Subscribe(channel=channel)], unsubscribe=["", ""])
    lacking = BYTES_MAX[FrameKind.HINTS] - frame.ByteSize() + more
    frame.unsubscribe[:] = ["1" * (lacking // 2 - 1), "1" * (lacking - lacking // 2 - 1)]
    body = frame.SerializeToString()
    assert len(body) == BYTES_MAX[FrameKind.HINTS] + more
    return struct.pack("<IBI", len(body), FrameKind.HINTS, 0) + body


def hints(channel: int, at: float = 0.0) -> bytes:
    body = hints_pb2.HintFrame(unsubscribe=[str(channel)]).SerializeToString()
    return pack(FrameKind.HINTS, body, time_number(at))


def test_settings_come_first(peer: Peer) -> None:
    link = peer.link({"a": 1})
    assert link.open(0.0)
    link.send(FrameKind.OPEN, b"x", 5)
    link.flush(0.0)
    assert peer.received(2) == [(FrameKind.HELLO, 0, b'{"a": 1}'), (FrameKind.OPEN, 5, b"x")]


def test_hints_arrive(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    peer.sockets[0].sendall(hints(1) + hints(2)[:3])
    assert [frame.unsubscribe[0] for frame, _ in link.receive(0.0)] == ["1"]
    assert list(link.receive(0.0)) == []
    peer.sockets[0].sendall(hints(2)[3:])
    assert [frame.unsubscribe[0] for frame, _ in link.receive(0.0)] == ["2"]


def test_the_largest_frame_arrives_however_it_is_split(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    frame = largest()
    for split in range(1, len(frame)):
        peer.sockets[0].sendall(frame[:split])
        assert list(link.receive(0.0)) == []
        peer.sockets[0].sendall(frame[split:])
        assert [received.subscribe[0].channel for received, _ in link.receive(0.0)] == [1]
    assert link.num_starts == 1


def test_the_largest_frame_arrives_behind_others_that_were_not_taken(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    sender = threading.Thread(target=peer.sockets[0].sendall, args=(hints(1) * 500 + largest(2) * 100,))
    sender.start()
    channels = list[str]()
    while len(channels) < 600:
        for received, _ in link.receive(0.0):
            channels.append(received.unsubscribe[0][:1] if received.subscribe else "1")
            break  # one a step
    sender.join()
    assert link.is_open


def test_a_frame_of_one_byte_more_costs_its_connection_and_is_logged(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    link, other = peer.link(), peer.link()
    link.open(0.0)
    other.open(0.0)
    peer.sockets[0].sendall(largest(more=1))
    peer.sockets[1].sendall(largest())
    assert list(link.receive(0.0)) == []
    assert not link.is_open
    limit = BYTES_MAX[FrameKind.HINTS]
    assert f"HINTS with {limit + 1} bytes; permitted: {limit}" in caplog.text
    assert len(list(other.receive(0.0))) == 1, "and no other connection"
    assert link.open(RESTART_S[0])
    peer.sockets[2].sendall(hints(3))
    assert [received.unsubscribe[0] for received, _ in link.receive(RESTART_S[0])] == ["3"]


def test_what_a_step_does_not_take_is_there_for_the_next_and_ends_a_wait(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    peer.sockets[0].sendall(b"".join(hints(channel) for channel in range(5)))
    assert next(link.receive(0.0))[0].unsubscribe[0] == "0"
    link.wait(LAST_RESORT_S)
    assert [received.unsubscribe[0] for received, _ in link.receive(0.0)] == ["1", "2", "3", "4"]


def test_the_hint_server_is_told_how_many_frames_were_taken(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    peer.sockets[0].sendall(b"".join(hints(channel) for channel in range(5)))
    for _ in zip(range(3), link.receive(0.0), strict=False):
        pass
    link.send(FrameKind.COMMITS, b"")
    link.flush(0.0)
    assert peer.received(3)[1:] == [(FrameKind.COMMITS, 0, b""), (FrameKind.TAKEN, 3, b"")]
    assert len(list(link.receive(0.0))) == 2
    link.flush(TAKEN_S / 2)
    link.flush(TAKEN_S)  # nothing else is to be sent
    assert peer.received(1) == [(FrameKind.TAKEN, 2, b"")]


def test_one_step_sends_a_bounded_amount(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    link.flush(0.0)
    peer.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    num_bytes = BYTES_MAX[FrameKind.OPEN]
    link.send(FrameKind.OPEN, bytes(num_bytes))
    reading = threading.Thread(target=peer.received, args=(2,))
    reading.start()  # so that the socket always takes more
    num_flushes = 0
    while link.is_busy:
        before = len(link._unsent)
        link.flush(0.0)
        assert before - len(link._unsent) <= SEND_BYTES
        num_flushes += 1
    link.flush(0.0)
    link.send(FrameKind.COMMITS, b"")
    while link._unsent:
        link.flush(0.0)
    reading.join()
    assert num_flushes >= num_bytes // SEND_BYTES - 1


def test_a_request_that_is_too_long_to_be_announced_costs_no_other_its_hints(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    link = peer.link()
    link.open(0.0)
    link.send(FrameKind.OPEN, bytes(BYTES_MAX[FrameKind.OPEN] + 1), 1)
    link.send(FrameKind.OPEN, b"x", 2)
    link.flush(0.0)
    assert peer.received(2)[1:] == [(FrameKind.OPEN, 2, b"x")]
    assert "OPEN with" in caplog.text


def test_hints_come_with_the_moment_when_the_hint_server_had_them(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    peer.sockets[0].sendall(hints(1, at=9000.25))
    assert [at for _, at in link.receive(9000.5)] == [pytest.approx(9000.25)]


def test_a_wait_ends_when_hints_arrive(peer: Peer) -> None:
    link = peer.link()
    link.wait(LAST_RESORT_S)  # without a connection nothing can arrive
    link.open(0.0)
    link.wait(0.001)
    assert list(link.receive(0.0)) == []
    sender = threading.Timer(0.05, peer.sockets[0].sendall, [hints(1)])
    sender.start()
    link.wait(LAST_RESORT_S)
    sender.join()
    assert len(list(link.receive(0.0))) == 1


def test_what_cannot_be_sent_is_kept_within_a_bound(peer: Peer) -> None:
    link = peer.link()
    link.open(0.0)
    megabyte = bytes(1 << 20)
    for _ in range((MAX_UNSENT_BYTES >> 20) - 1):
        link.send(FrameKind.OPEN, megabyte)
        link.flush(0.0)
        assert link.is_open
    for _ in range(3):
        link.send(FrameKind.OPEN, megabyte)
    link.flush(0.0)
    assert not link.is_open, "a hint server that does not read is given up"
    assert peer.processes[0].wait(LAST_RESORT_S) != 0


def test_a_hint_server_that_reads_nothing_is_given_up_long_before_much_waits_for_it(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    link, now = peer.link(), 100.0
    link.open(now)
    while not link._unsent or len(link._unsent) < SEND_BYTES:
        link.send(FrameKind.COMMITS, bytes(1 << 16))
        link.flush(now)
    link.flush(now)
    waiting = len(link._unsent)
    link.flush(now + 0.9 * STUCK_S)
    assert len(link._unsent) == waiting, "it reads nothing, and is not given up yet"
    link.flush(now + STUCK_S)
    assert not link.is_open
    assert waiting < MAX_UNSENT_BYTES // 8
    assert "it does not read" in caplog.text


def test_a_hint_server_that_reads_slowly_is_not_given_up(peer: Peer) -> None:
    link, now = peer.link(), 100.0
    link.open(now)
    while len(link._unsent) < 4 * SEND_BYTES:
        link.send(FrameKind.COMMITS, bytes(1 << 16))
        link.flush(now)
    for _ in range(10):
        now += 0.6 * STUCK_S
        waiting, num_read = len(link._unsent), 0
        while num_read < SEND_BYTES // 4:
            num_read += len(peer.sockets[0].recv(SEND_BYTES // 4 - num_read))
        link.flush(now)
        assert len(link._unsent) < waiting
    now += 5 * STUCK_S  # nothing was to be done
    link.flush(now)
    assert link.is_open


@pytest.mark.parametrize("fault", ["closed", "no frame", "no message", "cannot start"])
def test_a_lost_hint_server_is_started_again_after_a_growing_pause(peer: Peer, fault: str) -> None:
    link = peer.link()
    now = 0.0
    for pause_s in RESTART_S[:3]:
        peer.error = OSError("no memory") if fault == "cannot start" else None
        assert link.open(now) is (fault != "cannot start")
        if fault == "closed":
            peer.sockets[-1].shutdown(socket.SHUT_RDWR)
        elif fault == "no frame":
            peer.sockets[-1].sendall(b"\xff" * 32)
        elif fault == "no message":
            peer.sockets[-1].sendall(pack(FrameKind.HINTS, b"\xff\xff\xff"))
        assert list(link.receive(now)) == []
        assert not link.is_open
        peer.error = None
        assert not link.open(now + 0.9 * pause_s)
        now += pause_s + 1e-6
    assert link.open(now)


def test_the_end_ends_the_hint_server() -> None:
    """A real one, which ends by itself when its engine closes the socket."""
    link = HintLink({})
    link.open(0.0)
    process = link._process
    assert process is not None
    link.close()
    assert process.poll() is not None
    assert not link.open(1e9), "it is over"
