"""Clients of a stream that may break: each reads in a thread of its own, and can go on where it stopped."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, Self

import grpc
import httpx

from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.system import eventually

READ_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Piece:
    """A part of an output, and the number of its tokens up to its end."""

    text: str
    num_tokens: int
    is_last: bool = False
    run: str = ""  # the fingerprint of what it belongs to


Read = Callable[[Piece | None], Generator[Piece]]
"""Iterates over the pieces that follow a given one, from the beginning if there is none. Raises what the client's
library does."""


class Stream:
    """An output as it arrives. `error` is what ended the reading before the output's end."""

    def __init__(self, request_id: str, read: Read) -> None:
        self.request_id = request_id
        self.pieces: list[Piece] = []
        self.error: Exception | None = None
        self._read = read
        self._is_leaving = False
        self._thread = threading.Thread(target=self._follow)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        return self.pieces[-1].num_tokens if self.pieces else 0

    @property
    def has_ended(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].is_last

    def start(self) -> Self:
        self._thread.start()
        return self

    def eventually(self, holds: Callable[[], object], what: str) -> None:
        """Waits until the condition holds; fails with the stream's error if it breaks before."""

        def seen() -> bool:
            assert self.error is None, f"{self.request_id} broke: {self.error}"
            return bool(holds())

        eventually(seen, bool, f"{self.request_id}: {what}")

    def leave(self) -> None:
        """Closes the stream at its next piece, as a client does that has read enough."""
        self._is_leaving = True

    def wait(self) -> None:
        """Waits until the stream has ended, or broken, or was left."""
        self._thread.join(READ_TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self.request_id} stands still after {self.num_tokens} tokens"

    def resume(self) -> None:
        """Reads the rest, all of it in the beginning. Raises what the client's library does."""
        with closing(self._read(self.pieces[-1] if self.pieces else None)) as pieces:
            for piece in pieces:
                self.pieces.append(piece)
                if self._is_leaving:
                    return

    def _follow(self) -> None:
        try:
            self.resume()
        except (httpx.HTTPError, grpc.RpcError) as error:
            self.error = error


class HttpServer(Protocol):
    """A balancer, or a coordinator itself."""

    @property
    def url(self) -> str:
        """Its address."""

    def trusted(self) -> ssl.SSLContext:
        """By which its certificate is known."""


def http_stream(server: HttpServer, request_id: str, body: dict[str, Any], *, http2: bool = False) -> Stream:
    """A stream of `/v1/completions`."""
    asked = {"temperature": 0, "stream": True, "stream_options": {"include_event_ids": True}} | body

    def read(seen: Piece | None) -> Generator[Piece]:
        with httpx.Client(
            base_url=server.url,
            verify=server.trusted(),
            http2=http2,
            timeout=READ_TIMEOUT_S,
            trust_env=False,
        ) as client:
            if seen is None:
                opened = client.stream("POST", "/v1/completions", json=asked, headers={"X-Request-Id": request_id})
            else:
                headers = {"Last-Event-ID": f"{seen.run}:{seen.num_tokens}"}
                opened = client.stream("GET", f"/v1/streams/{request_id}", headers=headers)
            with opened as response:
                if response.status_code != 200:
                    response.read()
                    response.raise_for_status()
                assert response.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
                yield from _pieces(response.iter_lines())

    return Stream(request_id, read)


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    run, num_tokens = "", 0
    for line in lines:
        if line.startswith("id: "):
            run, _, place = line.removeprefix("id: ").partition(":")
            num_tokens = int(place.rstrip("e"))
        elif line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "choices" in event, event
            for choice in event["choices"]:
                yield Piece(choice["text"], num_tokens, choice["finish_reason"] is not None, run)


def grpc_request(body: dict[str, Any]) -> generation_pb2.GenerationRequest:
    """The body of a greedy completion as a gRPC request: prompt, speculation, and the rest as sampling parameters."""
    sampling = {name: value for name, value in body.items() if name not in ("prompt", "speculation")}
    return generation_pb2.GenerationRequest(
        prompt=body["prompt"],
        sampling=common_pb2.SamplingParams(temperature=0, top_p=1, **sampling),
        speculation=common_pb2.SpeculationParams(**body["speculation"]),
    )


def grpc_stream(channel: grpc.Channel, request_id: str, body: dict[str, Any]) -> Stream:
    """A stream over gRPC; `body` is as over HTTP."""
    stub = generation_pb2_grpc.GenerationStub(channel)

    def read(seen: Piece | None) -> Generator[Piece]:
        request = grpc_request(body) if seen is None else generation_pb2.GenerationRequest()
        request.request_id = request_id
        num_tokens = 0
        if seen is not None:
            num_tokens = seen.num_tokens
            request.resume_from.add(num_tokens=num_tokens, has_begun=True)
            request.run = seen.run
        call = stub.Generate(request, timeout=READ_TIMEOUT_S)
        try:
            for chunk in call:
                num_tokens += len(chunk.token_ids)
                yield Piece(chunk.text, num_tokens, chunk.HasField("finished"), chunk.run)
        finally:
            call.cancel()  # which an ended call ignores

    return Stream(request_id, read)
