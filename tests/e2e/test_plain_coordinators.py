"""Two coordinators without Ray over one Redis: either continues what the other has begun, also after SIGKILL."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import httpx
import pytest

from coordinator.settings import Hosting
from tests.e2e.replicas import Coordinator, Replicas, running_replicas
from tests.e2e.streams import Stream, grpc_stream, http_stream
from tests.e2e.system import eventually, needs_the_pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_the_pair]

NUM_STREAMS = 4  # at each coordinator, half of them over gRPC
BODY: dict[str, Any] = {
    "prompt": "def read_file(path):\n",
    "max_tokens": 300,
    "ignore_eos": True,
    "speculation": {"always": True},
}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with running_replicas(tmp_path_factory.mktemp("replicas"), 2, Hosting.PLAIN) as running:
        yield running


@pytest.fixture
def channels(replicas: Replicas) -> Iterator[list[grpc.Channel]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(grpc.insecure_channel(coordinator.grpc_address))
            for coordinator in replicas.coordinators
        ]


def text_of(coordinator: Coordinator) -> str:
    body = {"temperature": 0, **BODY}
    response = httpx.post(f"{coordinator.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def begun_at(coordinator: Coordinator, channel: grpc.Channel) -> list[Stream]:
    streams = []
    for number in range(NUM_STREAMS):
        name = uuid.uuid4().hex
        is_http = number % 2 == 0
        streams.append(http_stream(coordinator, name, BODY) if is_http else grpc_stream(channel, name, BODY))
    return [stream.start() for stream in streams]


def resumed_at(coordinator: Coordinator, channel: grpc.Channel, stream: Stream, *, is_http: bool) -> Stream:
    """The same stream, read from another coordinator, from the last piece that its client has."""
    name = stream.request_id
    moved = http_stream(coordinator, name, BODY) if is_http else grpc_stream(channel, name, BODY)
    moved.pieces = list(stream.pieces)
    return moved.start()


def test_what_a_killed_coordinator_had_begun_goes_on_at_the_other(
    replicas: Replicas, channels: list[grpc.Channel]
) -> None:
    dying, living = replicas.coordinators
    expected = text_of(living)
    with replicas.frozen_target():
        lost, kept = (begun_at(each, channel) for each, channel in zip((dying, living), channels, strict=True))
        for count, coordinator in ((NUM_STREAMS, dying), (NUM_STREAMS, living)):
            eventually(coordinator.num_requests, partial(int.__eq__, count), f"{coordinator.name} has its requests")
        with replicas.thawed_target():
            for stream in (*lost, *kept):
                stream.eventually(partial(getattr, stream, "num_tokens"), "a token")
        for stream in (*lost, *kept):
            stream.eventually(partial(replicas.num_journaled, stream.request_id), "a journal")
            assert not stream.has_ended, "the text was over too soon for this test to mean anything"
        dying.kill()
    for stream in lost:
        stream.wait()
        assert stream.error is not None
    moved = [
        resumed_at(living, channels[1], stream, is_http=is_http)
        for stream, is_http in zip(lost, itertools.cycle((True, False)), strict=False)
    ]
    for stream in (*moved, *kept):
        stream.wait()
        assert stream.error is None, stream.error
        assert stream.text == expected, "a token was lost, repeated or changed"
        assert stream.num_tokens == BODY["max_tokens"]
    eventually(living.num_requests, partial(int.__eq__, 0), "no request is left")
    replicas.expect_idle()


def test_one_that_comes_back_serves_again_and_ends_well(replicas: Replicas) -> None:
    first, second = replicas.coordinators
    if first.command is not None and first.command.process.poll() is not None:
        first.start()
        first.wait_until_ready()
    eventually(first.num_workers, lambda seen: seen == (1, 1), f"{first.name} knows a target and a draft")
    assert text_of(first) == text_of(second)
    assert first.command is not None
    assert first.command.stop() == 0
    assert first.command.processes() == {}
