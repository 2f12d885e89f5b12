"""grpc.health.v1 and reflection at Serve's gRPC servers: what kubelet, grpc_health_probe and grpcurl are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from coordinator.api.grpc import grpc_health
from coordinator.api.grpc.grpc_health import SERVICE, Health, add_HealthServicer_to_server
from coordinator.api.grpc.grpc_ingress import add_GenerationServicer_to_server
from coordinator.api.grpc.grpc_reflection import REFLECTED, SERVICES, add_ReflectionServicer_to_server
from outrider.security import call_admission
from outrider.security.call_admission import OPEN_CALLS_MAX
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.coordinator.serve_grpc import TIMEOUT_S, ask, serving

STATUS = health_pb2.HealthCheckResponse
CHECK, WATCH = f"/{SERVICE}/Check", f"/{SERVICE}/Watch"


@dataclass
class Replica:
    """State of a replica as the server's handlers see it; tests change it."""

    is_ready: bool = True
    is_leaving: bool = False
    is_gone: bool = False  # no replica takes the question
    hangs: bool = False
    num_asked: int = 0

    def handler(self, service_method: str, streaming_type: Any) -> Any:
        async def one(request: Any, context: Any) -> bytes:
            if service_method.startswith("/outrider.v1."):
                return b""
            assert context.invocation_metadata() == ()
            context.set_trailing_metadata((("request_id", "x"),))
            if service_method.endswith("/Healthz"):
                context.set_code(grpc.StatusCode.UNAVAILABLE if self.is_leaving else grpc.StatusCode.OK)
                return b""
            self.num_asked += 1
            if self.hangs:
                await asyncio.Event().wait()
            if self.is_gone:
                context.set_code(grpc.StatusCode.UNAVAILABLE)
                context.set_details("no replica")
                return b""
            return STATUS(status=STATUS.SERVING if self.is_ready else STATUS.NOT_SERVING).SerializeToString()

        return one


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest_asyncio.fixture
async def address(monkeypatch: pytest.MonkeyPatch, replica: Replica) -> AsyncIterator[str]:
    monkeypatch.setattr(Health, "__init__", _hurried(Health.__init__))
    functions = (add_GenerationServicer_to_server, add_HealthServicer_to_server, add_ReflectionServicer_to_server)
    async with serving(monkeypatch, replica.handler, *functions) as found:
        yield found


@pytest_asyncio.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as opened:
        yield opened


def _hurried(make: Any) -> Any:
    def __init__(self: Health, **handlers: Any) -> None:
        make(self, **handlers, fresh_s=0.01)

    return __init__


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)).status)


async def until(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await check(channel) != status:
            pass


def watch(channel: grpc.aio.Channel, service: str = "") -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.details()
    return caught.value.code()


class TestCheck:
    @pytest.mark.parametrize("service", ["", "outrider.v1.Generation"])
    async def test_it_serves_while_a_target_is_usable(
        self, channel: grpc.aio.Channel, replica: Replica, service: str
    ) -> None:
        assert await check(channel, service) == STATUS.SERVING
        replica.is_ready = False
        await until(channel, STATUS.NOT_SERVING)
        assert await check(channel, service) == STATUS.NOT_SERVING
        replica.is_ready = True
        await until(channel, STATUS.SERVING)

    @pytest.mark.parametrize("what", ["is_leaving", "is_gone", "hangs"])
    async def test_nobody_is_sent_to_a_server_that_is_leaving_or_has_no_replica(
        self, channel: grpc.aio.Channel, replica: Replica, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grpc_health, "ANSWER_MAX_S", 0.05)
        setattr(replica, what, True)
        assert await check(channel) == STATUS.NOT_SERVING
        assert await check(channel, "liveness") == STATUS.SERVING
        setattr(replica, what, False)
        await until(channel, STATUS.SERVING)

    async def test_an_unknown_service_is_not_found(self, channel: grpc.aio.Channel) -> None:
        assert await code_of(check(channel, "outrider.v1.Target")) is grpc.StatusCode.NOT_FOUND

    async def test_many_callers_ask_a_replica_once(self, replica: Replica) -> None:
        health = Health(is_here=replica.handler("/Healthz", None), is_ready=replica.handler(CHECK, None))
        states = await asyncio.gather(*(health.state() for _ in range(100)))
        assert {state.is_ready for state in states} == {True}
        assert replica.num_asked == 1

    @pytest.mark.thorough
    async def test_a_caller_that_leaves_takes_no_answer_from_others(self, replica: Replica) -> None:
        replica.hangs = True
        health = Health(is_here=replica.handler("/Healthz", None), is_ready=replica.handler(CHECK, None))
        leaving, waiting = (asyncio.create_task(health.state()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert not (await waiting).is_ready


class TestWatch:
    async def test_it_tells_the_status_at_once_and_its_changes(
        self, channel: grpc.aio.Channel, replica: Replica
    ) -> None:
        seen = []
        async for answer in watch(channel):
            seen.append(answer.status)
            replica.is_ready = not replica.is_ready
            if len(seen) == 4:
                break
        assert seen == [STATUS.SERVING, STATUS.NOT_SERVING] * 2

    async def test_it_ends_when_the_server_leaves_and_does_not_delay_it(
        self, channel: grpc.aio.Channel, replica: Replica
    ) -> None:
        call = watch(channel, "outrider.v1.Generation")
        assert (await call.read()).status == STATUS.SERVING
        replica.is_leaving = True
        assert (await call.read()).status == STATUS.NOT_SERVING
        assert await code_of(call.read()) is grpc.StatusCode.UNAVAILABLE

    async def test_a_client_that_checks_health_itself_sends_calls_while_a_target_is_usable(
        self, address: str, replica: Replica
    ) -> None:
        """By gRPC's own means: a service configuration that names the service to watch."""
        configuration = {
            "healthCheckConfig": {"serviceName": "outrider.v1.Generation"},
            "loadBalancingConfig": [{"round_robin": {}}],
        }
        options = [("grpc.service_config", json.dumps(configuration))]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            assert await self.code_of_a_call(channel) is grpc.StatusCode.OK
            replica.is_ready = False
            async with asyncio.timeout(TIMEOUT_S):
                while await self.code_of_a_call(channel) is not grpc.StatusCode.UNAVAILABLE:
                    pass
                replica.is_ready = True
                while await self.code_of_a_call(channel) is not grpc.StatusCode.OK:
                    pass

    async def code_of_a_call(self, channel: grpc.aio.Channel) -> grpc.StatusCode:
        stub = generation_pb2_grpc.GenerationStub(channel)
        return await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=TIMEOUT_S).code()

    async def test_an_unknown_service_is_watched_for_it_may_come(self, channel: grpc.aio.Channel) -> None:
        assert (await watch(channel, "who").read()).status == STATUS.SERVICE_UNKNOWN

    async def test_there_are_only_so_many_and_the_oldest_makes_room(
        self, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found: 256 watches without a key, and the next one was refused."""
        monkeypatch.setattr(call_admission, "MADE_ROOM_S", 0.0)
        async with grpc.aio.insecure_channel(address) as channel:
            watches = []
            for _ in range(OPEN_CALLS_MAX + 3):
                watches.append(watch(channel))
                assert (await watches[-1].read()).status == STATUS.SERVING
            assert await check(channel) == STATUS.SERVING
            for call in watches[:4]:
                assert await code_of(call.read()) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not watches[-1].done()

    async def test_it_lasts_a_bounded_time(self, replica: Replica) -> None:
        class Context:
            told: list[int]

            def __init__(self) -> None:
                self.told = []

            async def write(self, answer: Any) -> None:
                self.told.append(answer.status)

            async def abort(self, code: grpc.StatusCode, details: str) -> None:
                raise RuntimeError(code.name, details)

        handlers = {"is_here": replica.handler("/Healthz", None), "is_ready": replica.handler(CHECK, None)}
        health, context = Health(**handlers, watch_max_s=0.1, fresh_s=60), Context()
        assert (await health.state()).is_ready
        with pytest.raises(RuntimeError, match=r"UNAVAILABLE.*watch again"):
            await health.watch(health_pb2.HealthCheckRequest(), context)
        assert context.told == [STATUS.SERVING]


class TestReflection:
    @pytest.fixture(params=SERVICES)
    def reflect(self, channel: grpc.aio.Channel, request: pytest.FixtureRequest) -> Any:
        return cast(Any, channel).stream_stream(
            f"/{request.param}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(timeout=TIMEOUT_S)

    async def told(self, call: Any, **question: str) -> Any:
        await call.write(reflection_pb2.ServerReflectionRequest(**question))
        return await call.read()

    async def test_every_listed_service_is_described_with_what_it_needs(self, reflect: Any) -> None:
        """As grpcurl does it: one stream, whose questions come after the answers before."""
        listed = await self.told(reflect, list_services="")
        names = [each.name for each in listed.list_services_response.service]
        assert names == sorted(REFLECTED)
        for name in names:
            answer = await self.told(reflect, file_containing_symbol=name)
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(raw)
                for raw in answer.file_descriptor_response.file_descriptor_proto
            ]
            assert name in {f"{file.package}.{service.name}" for file in files for service in file.service}
            known = {file.name for file in files}
            assert all(known.issuperset(file.dependency) for file in files)

    async def test_what_else_the_process_has_loaded_is_not_shown(self, reflect: Any) -> None:
        for name in ("outrider.v1.Target", "ray.serve.RayServeAPIService"):
            assert (await self.told(reflect, file_containing_symbol=name)).HasField("error_response")


@pytest.mark.parametrize("path", [CHECK, WATCH, *(f"/{name}/ServerReflectionInfo" for name in SERVICES)])
@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x02\xff\xfe"], ids=["key", "UTF-8"])
async def test_bytes_that_are_no_question_are_the_clients_mistake(
    channel: grpc.aio.Channel, path: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert await code_of(ask(channel, path, raw)) is grpc.StatusCode.INVALID_ARGUMENT
    assert not caplog.records
