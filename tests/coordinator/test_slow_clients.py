"""Clients that do not read, or hardly: nobody waits for them, and what they hold is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.api.grpc import grpc_api
from coordinator.api.grpc.grpc_ingress import Pace, timed
from coordinator.api.http.application import create_app
from coordinator.output import output_queue
from outrider.errors import OutriderError
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.test_resumption import Memory, events_of, said

# As little as the system allows to wait in sockets. Beside it uvicorn holds 64 KiB.
_SOCKET_BYTES: Final = 4096
_WITHIN_S: Final = 30.0
# Twenty log probabilities of each token are 2 KiB as JSON.
GREEDY: Final = {"prompt": "import", "temperature": 0, "ignore_eos": True}
LONG: Final = GREEDY | {"max_tokens": 900, "stream": True, "logprobs": 20}


def behind_serve(app: ASGIApp) -> ASGIApp:
    """The application as a replica of Serve calls it: what it receives and sends goes through Serve's wrappers."""
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_user_message(message: Message) -> None:
            await send(message)

        receive_proxy = ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
        fetching = receive_proxy.fetch_until_disconnect_task()
        try:
            await app(scope, receive_proxy, send_user_message)
        finally:
            fetching.cancel()

    return call


@asynccontextmanager
async def listening(cluster: Cluster, hosted: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AsyncIterator[int]:
    """The coordinator behind a real server with small socket buffers, its port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)  # of what it accepts, too
    listener.bind(("127.0.0.1", 0))
    app = hosted(create_app(cluster.service))
    config = uvicorn.Config(app, lifespan="off", access_log=False, log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await eventually(lambda: server.started, "the server listens", _WITHIN_S)
        yield listener.getsockname()[1]
    finally:
        server.force_exit = server.should_exit = True
        await serving


class RawClient:
    """Sends a request and reads of its answer what it is told to."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        self._socket.setblocking(False)
        self._port = port

    async def post(self, **body: Any) -> None:
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        await loop.sock_sendall(self._socket, head.encode() + content)

    async def read(self, num_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)

    async def rest(self) -> bytes:
        """All that still comes. Raises ConnectionResetError where the server has cut the connection."""
        content = b""
        async with asyncio.timeout(_WITHIN_S):
            while part := await self.read(1 << 16):
                content += part
        return content

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def raw_client(port: int, **body: Any) -> AsyncIterator[RawClient]:
    client = RawClient(port)
    try:
        await client.post(**body)
        yield client
    finally:
        client.close()


def num_slow(cluster: Cluster, ended: str) -> int:
    return int(cluster.service.environment.metrics.slow_readers.labels(ended)._value.get())


async def until_idle(cluster: Cluster) -> None:
    await eventually(lambda: cluster.num_open == 0, "every worker is free", _WITHIN_S)


class TestOverHttp:
    async def test_the_deadline_of_one_who_does_not_read_runs_out(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with (
            clusters.open([target], max_num_seqs=1, max_num_waiting=0) as cluster,
            listening(cluster) as port,
            raw_client(port, **LONG, deadline_ms=1000),
        ):
            await eventually(lambda: target.num_open == 1, "it runs", _WITHIN_S)
            await until_idle(cluster)
            assert num_slow(cluster, "request") == 0, "the pace's limit is far away"
            answer = await cluster.complete()
            assert answer.status_code == 200, "its place is somebody else's"

    @pytest.mark.parametrize("hosted", [lambda app: app, behind_serve], ids=["uvicorn", "serve"])
    async def test_one_who_does_not_read_is_cut_off(
        self, clusters: ClusterFactory, hosted: Callable[[ASGIApp], ASGIApp]
    ) -> None:
        target = clusters.target()
        async with (
            clusters.open([target], settings={"client_stall_max_s": 0.3}) as cluster,
            listening(cluster, hosted) as port,
            raw_client(port, **LONG, n=4) as client,
        ):
            await eventually(lambda: num_slow(cluster, "request") == 1, "its request is ended", _WITHIN_S)
            await until_idle(cluster)
            await eventually(lambda: num_slow(cluster, "connection") == 1, "it is cut off", _WITHIN_S)
            await eventually(lambda: cluster.service.num_active == 0, "nothing is left of it", _WITHIN_S)
            with pytest.raises(ConnectionResetError):
                await client.rest()

    async def test_one_who_reads_again_is_told_how_to_go_on(self, clusters: ClusterFactory) -> None:
        memory, target = Memory(), clusters.target()
        settings = {"client_stall_max_s": 1.0}
        body = LONG | {"request_id": "mine", "stream_options": {"include_event_ids": True}}
        async with (
            clusters.open([target], settings=settings, registry=memory) as cluster,  # type: ignore[arg-type]
            listening(cluster) as port,
        ):
            async with raw_client(port, **body) as raw:
                await eventually(lambda: num_slow(cluster, "request") == 1, "its request is ended", _WITHIN_S)
                content = await raw.rest()
            first = events_of(dechunked(content))
            error = json.loads(first[-2][1])["error"]
            assert (error["code"], first[-1][1]) == ("slow_reader", "[DONE]")
            assert "Last-Event-ID" in error["message"]
            assert not first[-2][0], "the last event that said something keeps its id"
            last_id = next(id for id, _ in reversed(first) if id)
            headers = {"Last-Event-ID": last_id}
            rest = events_of((await cluster.client.get("/v1/streams/mine", headers=headers)).text)
        whole = said(first[:-2] + rest)[0]
        expected = (clusters.script * 900)[:900]
        assert len(whole["logprobs"]) == 900, "no token is lost or repeated"
        assert whole["text"] == clusters.tokenizer.decode(expected)
        assert whole["ends"] == ["length"]

    @pytest.mark.thorough
    async def test_a_slow_link_is_none_of_our_business(self, clusters: ClusterFactory) -> None:
        target = clusters.target(step_s=0.002)
        async with (
            clusters.open([target], settings={"client_stall_max_s": 2.0}) as cluster,
            listening(cluster) as port,
            raw_client(port, **GREEDY, max_tokens=600, stream=True) as client,
        ):
            content = b""
            while b"[DONE]" not in content:  # a little at a time, and a pause
                content += await client.read(512)
                await asyncio.sleep(0.001)
            assert num_slow(cluster, "request") == num_slow(cluster, "connection") == 0
        assert len(said(events_of(dechunked(content)))[0]["text"]) == len(
            clusters.tokenizer.decode((clusters.script * 600)[:600])
        )

    async def test_an_answer_that_is_no_stream_is_not_kept_for_one_who_does_not_read(
        self, clusters: ClusterFactory
    ) -> None:
        target = clusters.target(tokens_per_step=50)
        async with (
            clusters.open([target], settings={"client_stall_max_s": 0.3}) as cluster,
            listening(cluster) as port,
            raw_client(port, **(LONG | {"stream": False})) as client,
        ):
            await eventually(lambda: num_slow(cluster, "connection") == 1, "it is cut off", _WITHIN_S)
            with pytest.raises(ConnectionResetError):
                await client.rest()

    async def test_the_end_of_an_answer_is_not_kept_either(self, clusters: ClusterFactory) -> None:
        """uvicorn keeps the output that it has accepted for as long as the connection lasts."""
        target = clusters.target(tokens_per_step=50)
        async with (
            clusters.open([target], settings={"client_stall_max_s": 0.3}) as cluster,
            listening(cluster) as port,
            raw_client(port, **GREEDY, max_tokens=120, logprobs=20) as client,
        ):
            await eventually(lambda: num_slow(cluster, "connection") == 1, "it is cut off", _WITHIN_S)
            with pytest.raises(ConnectionResetError):
                await client.rest()

    async def test_one_who_reads_on_gets_all_of_a_large_answer(self, clusters: ClusterFactory) -> None:
        target = clusters.target(tokens_per_step=50)
        async with (
            clusters.open([target]) as cluster,
            listening(cluster) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_WITHIN_S) as client,
        ):
            answer = (await client.post("/v1/completions", json=LONG | {"stream": False})).json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 900


class TestWhatIsKeptWhole:
    """Data that is kept beside the output that waits for a reader: answers that are not streamed, candidates, and the
    prompt's log probabilities."""

    @pytest.fixture(autouse=True)
    def little(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(output_queue, "GATHERED_BYTES_MAX", 256 << 10)

    @pytest.mark.parametrize("changes", [{}, {"best_of": 2}])
    async def test_an_answer_that_grows_too_large_is_refused_with_the_way_out(
        self, clusters: ClusterFactory, changes: dict[str, Any]
    ) -> None:
        body = GREEDY | {"max_tokens": 900, "logprobs": 20, "temperature": 1}
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post("/v1/completions", json=body | changes)
            await until_idle(cluster)
            small = await cluster.client.post("/v1/completions", json=body | changes | {"max_tokens": 20})
        assert answer.status_code == 400
        assert "max_tokens, n, best_of, logprobs" in answer.json()["error"]["message"]
        assert small.status_code == 200

    async def test_what_it_takes_to_write_an_answer_is_counted_too(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(output_queue, "GATHERED_BYTES_MAX", 1 << 20)
        body = GREEDY | {
            "max_tokens": 200,
            "logprobs": 20,
        }  # 400 KB of output, more than another MiB to write
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post("/v1/completions", json=body)
            stream = await cluster.client.post("/v1/completions", json=body | {"stream": True})
        assert answer.status_code == 400, answer.text
        assert "MiB of memory that there are for one request" in answer.json()["error"]["message"]
        assert len(said(events_of(stream.text))[0]["logprobs"]) == 200

    async def test_a_stream_may_be_as_long_as_it_likes(self, clusters: ClusterFactory) -> None:
        async with clusters.open([clusters.target()]) as cluster:
            answer = await cluster.client.post("/v1/completions", json=LONG)
        assert len(said(events_of(answer.text))[0]["logprobs"]) == 900

    async def test_what_is_said_of_the_prompt_is_bounded_before_any_work(self, clusters: ClusterFactory) -> None:
        body = {"prompt": "import " * 60, "max_tokens": 1, "stream": True, "prompt_logprobs": 5, "n": 64}
        async with clusters.open([clusters.target()], max_num_seqs=64) as cluster:
            answer = await cluster.client.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert not cluster.targets[0].requests
            assert (await cluster.client.post("/v1/completions", json=body | {"n": 1})).status_code == 200


def dechunked(content: bytes) -> str:
    """The body of an answer in HTTP's chunks, as far as it came."""
    body, rest = b"", content.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body.decode()


@asynccontextmanager
async def grpc_channel(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    """To the coordinator as a replica serves it, with as little in between as gRPC allows."""
    pace = Pace(
        cluster.service.environment.settings.client_stall_max_s,
        cluster.service.environment.metrics.slow_readers.labels("connection").inc,
    )

    async def generate(request: generation_pb2.GenerationRequest, context: Any) -> AsyncIterator[bytes]:
        try:
            async for chunk in grpc_api.generate(cluster.service, request):
                yield chunk.SerializeToString()
        except OutriderError as error:
            await context.abort(grpc.StatusCode[error.grpc_code], error.message)

    handler = grpc.unary_stream_rpc_method_handler(
        timed(generate, lambda: pace),  # type: ignore[arg-type]
        request_deserializer=generation_pb2.GenerationRequest.FromString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("outrider.v1.Generation", {"Generate": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", _SOCKET_BYTES)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield channel
    finally:
        await server.stop(None)


def calling(channel: grpc.aio.Channel, deadline_ms: int = 0) -> Any:
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=900, num_logprobs=20, ignore_eos=True)
    request = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, n=4, deadline_ms=deadline_ms)
    method = channel.unary_stream(
        "/outrider.v1.Generation/Generate",
        request_serializer=generation_pb2.GenerationRequest.SerializeToString,
        response_deserializer=generation_pb2.GenerationChunk.FromString,
    )
    return method(request)


async def rest_of(call: Any) -> list[generation_pb2.GenerationChunk]:
    """All that still comes. Raises AioRpcError."""
    chunks = []
    while isinstance(chunk := await call.read(), generation_pb2.GenerationChunk):
        chunks.append(chunk)
    return chunks


class TestOverGrpc:
    async def test_the_deadline_of_one_who_does_not_read_runs_out(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with (
            clusters.open([target], max_num_seqs=4, max_num_waiting=0) as cluster,
            grpc_channel(cluster) as channel,
        ):
            call = calling(channel, deadline_ms=1000)
            await call.read()
            await eventually(lambda: len(target.requests) == 4, "it runs", _WITHIN_S)
            answer = await cluster.complete()
            assert answer.status_code == 200, "its places are somebody else's"
            assert num_slow(cluster, "request") == 0
            call.cancel()

    async def test_one_who_does_not_read_is_ended_and_told_how_to_go_on(self, clusters: ClusterFactory) -> None:
        target = clusters.target()
        async with (
            clusters.open([target], settings={"client_stall_max_s": 0.3}) as cluster,
            grpc_channel(cluster) as channel,
        ):
            call = calling(channel)
            await call.read()
            await eventually(lambda: num_slow(cluster, "request") == 1, "its request is ended", _WITHIN_S)
            await until_idle(cluster)
            await eventually(lambda: num_slow(cluster, "connection") == 1, "its call is ended", _WITHIN_S)
            await eventually(lambda: cluster.service.num_active == 0, "nothing is left of it", _WITHIN_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(rest_of(call), _WITHIN_S)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "resume_from" in (caught.value.details() or "")
