"""Requests whose coordinator is lost, behind the balancers with the files that `k8s/load_balancers` offers.

The balancers are real and the coordinators are not: what becomes of those is decided for each request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from outrider.local.free_ports import free_ports
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.certificates import Authority
from tests.e2e.chaos.stranger import Ending, Stranger
from tests.e2e.fake_coordinators import FakeCoordinators, Fate, fake_coordinators
from tests.e2e.load_balancers import BALANCERS, Balancer, Nginx

KEPT_BYTES = 60_000
"""The number of bytes of a request body that every balancer keeps until the answer begins."""
ATTEMPTS_MAX = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BALANCERS, ids=lambda kind: kind.name)
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Balancer, FakeCoordinators]]:
    kind: type[Balancer] = request.param
    if kind.program() is None:
        pytest.skip(f"there is no {kind.name} here: {kind.how_to_get}")
    authority = Authority(tmp_path_factory.mktemp("authority"))
    (port,) = free_ports(1)
    async with fake_coordinators() as fakes:
        balancer = kind(tmp_path_factory.mktemp(kind.name), port, fakes.backends, authority)
        try:
            await asyncio.to_thread(balancer.start)
            await until_it_asks_both(balancer, fakes)
            yield balancer, fakes
        finally:
            await asyncio.to_thread(balancer.stop)


@pytest_asyncio.fixture(loop_scope="module")
async def fakes(behind: tuple[Balancer, FakeCoordinators]) -> FakeCoordinators:
    """As they were in the beginning."""
    balancer, fakes = behind
    fakes.fate_of = lambda number: Fate.ANSWERS
    await until_it_asks_both(balancer, fakes)  # also who died a moment ago
    fakes.taken.clear()
    fakes.request_ids.clear()
    return fakes


@pytest.fixture
def balancer(behind: tuple[Balancer, FakeCoordinators]) -> Balancer:
    return behind[0]


def client_of(balancer: Balancer, *, http2: bool = False) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=balancer.url, verify=balancer.trusted(), http2=http2, timeout=20, trust_env=False)


async def until_it_asks_both(balancer: Balancer, fakes: FakeCoordinators) -> None:
    fakes.reached.clear()
    async with asyncio.timeout(20), client_of(balancer) as client:
        while len(fakes.reached) < 2:
            await client.get("/v1/models")
            await asyncio.sleep(0.02)


def the_first_dies(number: int) -> Fate:
    return Fate.DIES if number == 0 else Fate.ANSWERS


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(60),
]


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
@pytest.mark.parametrize("num_bytes", [100, KEPT_BYTES])
async def test_a_request_goes_to_another_coordinator_as_long_as_nothing_of_its_answer_was_said(
    balancer: Balancer, fakes: FakeCoordinators, http2: bool, num_bytes: int
) -> None:
    fakes.fate_of = the_first_dies
    chosen = uuid.uuid4().hex
    async with client_of(balancer, http2=http2) as client:
        await client.get("/v1/models")  # on a connection that has been used it is no other way
        answer = await client.post("/v1/completions", content=b"x" * num_bytes, headers={"X-Request-Id": chosen})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "2"), balancer.log
    assert set(fakes.taken) == {0, 1}, "the other one answered"
    assert fakes.request_ids == [chosen] * 2, "it is the same request to whoever reads the logs"


async def test_a_call_over_grpc_does_so_too(balancer: Balancer, fakes: FakeCoordinators) -> None:
    fakes.fate_of = the_first_dies
    credentials = grpc.ssl_channel_credentials(balancer.authority.path.read_bytes())
    async with grpc.aio.secure_channel(balancer.address, credentials) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(generation_pb2.GenerationRequest(prompt="x"), timeout=20)
        if isinstance(balancer, Nginx):  # it passes a call on as it comes, and keeps nothing that it could send again
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await call.read()
            assert told.value.code() is grpc.StatusCode.UNAVAILABLE, "so that its client tries again"
            assert "no coordinator is ready" in (told.value.details() or ""), "in its own words"
            assert len(fakes.taken) == 1
            return
        chunks = [chunk async for chunk in call]
    assert [chunk.text for chunk in chunks] == ["2"]
    assert set(fakes.taken) == {0, 1}, "the other one answered"


async def test_an_answer_that_has_begun_is_not_begun_again(balancer: Balancer, fakes: FakeCoordinators) -> None:
    fakes.fate_of = lambda number: Fate.DIES_LATER
    async with client_of(balancer) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/completions", content=b"x")
    assert len(fakes.taken) == 1


async def test_a_request_that_brings_coordinators_down_meets_three_at_most(
    balancer: Balancer, fakes: FakeCoordinators
) -> None:
    fakes.fate_of = lambda number: Fate.DIES
    async with client_of(balancer) as client:
        answer = await client.post("/v1/completions", content=b"x")
    assert answer.status_code in (502, 503), answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert int(answer.headers["Retry-After"]) >= 1
    assert 2 <= len(fakes.taken) <= ATTEMPTS_MAX


async def test_a_longer_request_is_repeated_or_its_client_is_told(balancer: Balancer, fakes: FakeCoordinators) -> None:
    """A balancer keeps request bodies up to a bounded size. For longer ones, clients with their own retries send the
    request again."""
    fakes.fate_of = the_first_dies
    async with Stranger(balancer.url, "none", balancer.trusted()) as stranger:
        seen = await stranger.ask("x" * (4 << 20), 1, False)
    assert seen.ending is Ending.COMPLETE, (seen, balancer.log)
    assert seen.statuses in ([200], [502, 200], [503, 200])
    assert len(fakes.taken) == 2


@pytest.mark.slow
async def test_a_slow_body_has_longer_than_a_slow_head(balancer: Balancer, fakes: FakeCoordinators) -> None:
    """A body that is kept has to arrive first, and has as long as a coordinator permits: one minute instead of ten
    seconds."""

    async def first_line(sent: bytes, rest: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", balancer.port, ssl=balancer.trusted(), server_hostname="localhost"
        )
        try:
            writer.write(sent)
            await asyncio.sleep(12)  # longer than a head may take
            writer.write(rest)
            return await reader.readline()
        finally:
            writer.close()

    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n"
    of_body, of_head = await asyncio.gather(
        first_line(head + b"\r\nhello", b"world"), first_line(head, b"\r\nhelloworld")
    )
    assert of_body.startswith(b"HTTP/1.1 200"), of_body
    if isinstance(balancer, Nginx):  # it closes the connection without a word
        assert of_head == b""
    else:
        assert of_head.startswith(b"HTTP/1.1 408"), of_head
    assert len(fakes.taken) == 1
