"""Clients that ask for much and read little or nothing, over sockets that hold as little as the system allows.

Everything here blocks, and is run in threads: a client that does not read has nothing to wait for.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import grpc

from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.chaos.client import is_own_word

SOCKET_BYTES: Final = 4096
CONNECT_TIMEOUT_S: Final = 20.0
NUM_LOGPROBS: Final = 20
NUM_CHOICES: Final = 8
NUM_TOKENS: Final = 500
CALL_TIMEOUT_S: Final = 180.0
_READ_BYTES: Final = 1 << 16
_BEGINNING_BYTES: Final = 64


@dataclass(frozen=True)
class Ending:
    """How an answer ended for its client."""

    what: str
    """complete, cut (the connection was taken away), told (slow_reader or ABORTED), refused, with the words, hung
    (nothing came), or left (the client had enough)."""
    words: str = ""
    num_bytes: int = 0  # read of it


class UnreadHttp:
    """A streamed completion over HTTP/1.1."""

    def __init__(self, url: str, key: str | None, context: ssl.SSLContext | None, prompt: str) -> None:
        """Connects and asks; raises OSError. `context` for an https URL."""
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        plain.settimeout(CONNECT_TIMEOUT_S)
        self._socket = plain
        try:
            plain.connect((address.hostname, address.port))
            if context is not None:
                self._socket = context.wrap_socket(plain, server_hostname="localhost")
            self._socket.sendall(_request(address.netloc, key, prompt))
        except OSError:
            self.close()
            raise
        self._num_bytes = 0
        self._end = b""  # of what came

    def read_beginning(self, timeout_s: float) -> Ending | None:
        """Reads until the first event is there; the end where it comes before."""
        until_s = time.monotonic() + timeout_s
        while b"\ndata: " not in self._end:
            if time.monotonic() > until_s:
                return Ending("hung", f"no beginning within {timeout_s:g} s", self._num_bytes)
            if (ending := self._read(_BEGINNING_BYTES)) is not None:
                return ending
        return None

    def read_slowly(self, bytes_per_s: int, until_s: float) -> Ending | None:
        """Reads so much a second, which may be nothing, until a moment of the monotonic clock; the end where it comes
        before."""
        while time.monotonic() < until_s:
            if bytes_per_s and (ending := self._read(bytes_per_s)) is not None:
                return ending
            time.sleep(1.0)
        return None

    def read_rest(self, timeout_s: float) -> Ending:
        """Reads whatever still comes; `left` where that goes on for longer."""
        until_s, before = time.monotonic() + timeout_s, self._num_bytes
        while time.monotonic() < until_s:
            if (ending := self._read(_READ_BYTES)) is not None:
                return ending
        what = "left" if self._num_bytes > before else "hung"
        return Ending(what, f"no end within {timeout_s:g} s", self._num_bytes)

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> Ending | None:
        self._socket.settimeout(1.0)
        try:
            part = self._socket.recv(num_bytes)
        except TimeoutError:
            return None
        except OSError as error:  # a reset, or TLS that ends in the middle
            return Ending("cut", f"{type(error).__name__}: {error}", self._num_bytes)
        self._num_bytes += len(part)
        self._end = (self._end + part)[-_READ_BYTES:]
        return None if part else self._ended()

    def _ended(self) -> Ending:
        """The connection was closed in good order, as it is after one answer."""
        text = self._end.decode(errors="replace")
        status = text.partition("\r\n")[0] if self._num_bytes == len(self._end) else "HTTP/1.1 200 OK"
        if " 200 " not in f"{status} ":
            return Ending("refused", f"{status} {text.rpartition(chr(10))[2][:300]}", self._num_bytes)
        if '"slow_reader"' in text:
            return Ending("told", "slow_reader", self._num_bytes)
        if "data: [DONE]" in text:
            return Ending("complete", "", self._num_bytes)
        _, error, words = text.rpartition('data: {"error"')
        return Ending("refused" if error else "cut", words[:300] or "no end", self._num_bytes)


class UnreadGrpc:
    """The same over gRPC, where what is not asked for stays in the channel's window."""

    def __init__(self, address: str, key: str | None, credentials: grpc.ChannelCredentials | None, prompt: str) -> None:
        # One connection for each: calls on one channel would share its window.
        options = [
            *(("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)),
            ("grpc.http2.lookahead_bytes", SOCKET_BYTES),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        message = generation_pb2.GenerationRequest(
            prompt=prompt,
            n=NUM_CHOICES,
            sampling=common_pb2.SamplingParams(
                temperature=0, top_p=1, max_tokens=NUM_TOKENS, num_logprobs=NUM_LOGPROBS, ignore_eos=True
            ),
        )
        metadata = [] if key is None else [("authorization", f"Bearer {key}")]
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._call = stub.Generate(message, timeout=CALL_TIMEOUT_S, metadata=metadata)
        self._num_bytes = 0

    def read_beginning(self, timeout_s: float) -> Ending | None:
        """The first message, which is there before a deadline of the call's; the end where it comes before."""
        return self._read()

    def read_slowly(self, bytes_per_s: int, until_s: float) -> Ending | None:
        """A message now and then, which comes to so much a second."""
        while (left_s := until_s - time.monotonic()) > 0:
            before = self._num_bytes
            if bytes_per_s and (ending := self._read()) is not None:
                return ending
            wait_s = (self._num_bytes - before) / bytes_per_s if bytes_per_s else left_s
            time.sleep(min(wait_s, left_s))
        return None

    def read_rest(self, timeout_s: float) -> Ending:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if (ending := self._read()) is not None:
                return ending
        return Ending("left", f"no end within {timeout_s:g} s", self._num_bytes)

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()

    def _read(self) -> Ending | None:
        try:
            self._num_bytes += next(self._call).ByteSize()
        except StopIteration:
            return Ending("complete", "", self._num_bytes)
        except grpc.RpcError as error:
            code, words = error.code(), f"{error.code().name}: {error.details()}"
            if code is grpc.StatusCode.ABORTED:
                return Ending("told", words, self._num_bytes)
            is_reset = code is grpc.StatusCode.UNAVAILABLE and not is_own_word(error.details() or "")
            is_reset = is_reset and self._num_bytes > 0
            return Ending("cut" if is_reset else "refused", words, self._num_bytes)
        return None


Unread = UnreadHttp | UnreadGrpc


def _request(host: str, key: str | None, prompt: str) -> bytes:
    body: Mapping[str, Any] = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "n": NUM_CHOICES,
        "logprobs": NUM_LOGPROBS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        *(f"Host: {host}", "Content-Type: application/json", f"Content-Length: {len(content)}"),
        *([] if key is None else [f"Authorization: Bearer {key}"]),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content
