"""A server of contents with ranges, which breaks off, stalls, corrupts or refuses on request, and keeps a log."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECE_BYTES = 64 << 10


@dataclass(slots=True)
class Asked:
    """A request for content as it was answered."""

    path: str
    start: int  # first byte asked for
    num_sent: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Faults:
    """Faults that occur. Counters count down with each use."""

    break_after: dict[str, int] = field(default_factory=dict)  # bytes of the next response; then the connection breaks
    corrupt: Counter[str] = field(default_factory=Counter)  # responses of this path whose last byte is wrong
    busy: Counter[str] = field(default_factory=Counter)  # 503 so many times
    stall_after: int | None = None  # bytes of each response, after which it waits for `gate`
    gate: threading.Event = field(default_factory=threading.Event)
    has_ranges: bool = True


class ContentServer:
    """Base of servers: subclasses answer `respond`."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.asked: list[Asked] = []
        self.requests: list[str] = []  # method and path of everything
        self.faults = Faults()
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with suppress(ConnectionError):  # of clients that leave, or are killed
                    super().handle()

            def do_GET(self) -> None:
                owner.requests.append(f"{self.command} {self.path}")
                owner.respond(self)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        self.url = f"http://{address[0]}:{self._server.server_address[1]}"

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers a request."""
        raise NotImplementedError

    def sent(self, path: str) -> int:
        """Bytes of a file that were sent."""
        return sum(each.num_sent for each in self.asked if each.path == path)

    def starts(self, path: str) -> list[int]:
        """First bytes of the requests for a file, in their order."""
        return [each.start for each in self.asked if each.path == path]

    def send_content(
        self, handler: BaseHTTPRequestHandler, path: str, content: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Sends a content, or the range of it that is asked for, with the faults that are set."""
        faults = self.faults
        if faults.busy[path] > 0:
            faults.busy[path] -= 1
            answer(handler, 503, b"", {"Retry-After": "1"})
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", "")) if faults.has_ranges else None
        start = int(found[1]) if found else 0
        end = min(int(found[2]) + 1, len(content)) if found and found[2] else len(content)
        if found and start >= len(content):
            answer(handler, 416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        part = content[start:end]
        handler.send_response(206 if found else 200)
        if found:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        for name, value in ({"Content-Length": str(len(part)), "Accept-Ranges": "bytes"} | (headers or {})).items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if faults.corrupt[path] > 0:
            faults.corrupt[path] -= 1
            part = part[:-1] + bytes([part[-1] ^ 1])
        asked = Asked(path, start, headers={name.lower(): value for name, value in handler.headers.items()})
        with self._lock:
            self.asked.append(asked)
        self._send(handler, asked, part, faults.break_after.pop(path, None))

    def _send(self, handler: BaseHTTPRequestHandler, asked: Asked, part: bytes, break_after: int | None) -> None:
        faults = self.faults
        for at in range(0, len(part), PIECE_BYTES):
            if faults.stall_after is not None and at >= faults.stall_after:
                faults.gate.wait(60)
            if break_after is not None and at >= break_after:
                handler.close_connection = True
                handler.connection.shutdown(socket.SHUT_RDWR)
                return
            piece = part[at : at + PIECE_BYTES]
            handler.wfile.write(piece)
            asked.num_sent += len(piece)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serves meanwhile."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.faults.gate.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)


def answer(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """Answers with a body as it is."""
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
