"""With certificates and API keys nothing answers a stranger but health, and nobody does what is another's to do.

One system for all tests: Redis, a target worker, a draft worker and a coordinator, all of them real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import httpx
import psutil
import pytest
import pytest_asyncio
import redis.asyncio
import redis.exceptions
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.access.api_keys import digest
from outrider.security.tls import Role
from protos.outrider.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    hints_pb2,
    hints_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from tests.e2e.secured import SecuredOptions, SecuredSystem

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "The password of the vault is xylophone-4711"
LIMITS = "[tenants.bounded]\nrequests_per_minute = 3\n"
TIMEOUT_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredSystem]:
    async with SecuredSystem(SecuredOptions(limits=LIMITS), tmp_path_factory.mktemp("logs")) as running:
        yield running
        assert running.ends == []


async def answers(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | more
    return await client.post("/v1/completions", json=body)


async def test_whoever_has_a_key_is_served(system: SecuredSystem) -> None:
    """Without this none of the refusals below would prove anything."""
    async with system.http(system.key) as client:
        answer = await answers(client)
    assert answer.status_code == 200, answer.text
    async with system.channel(system.grpc_address()) as channel:
        chunks = await generate(channel, (("authorization", f"Bearer {system.key}"),))
    assert chunks[-1].finished.finish_reason


class TestHttp:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/target"),
            ("GET", "/v1/streams/some-id"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("GET", "/"),
            ("GET", "/docs"),
            ("GET", "/no/such/path"),
            ("OPTIONS", "/v1/completions"),
            ("GET", "/health/../metrics"),
            ("GET", "//metrics"),
            ("GET", "/health%2f..%2fmetrics"),
        ],
    )
    async def test_without_a_key_no_path_answers(self, system: SecuredSystem, method: str, path: str) -> None:
        async with system.http() as client:
            answer = await client.request(method, path)
        assert answer.status_code == 401, answer.text
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"

    @pytest.mark.parametrize(
        "disguise",
        [
            "another key",
            "its hash",
            "no scheme",
            "basic",
            "empty",
            "a query",
            "another header",
            "a cookie",
            "upper case",
            "cut",
        ],
    )
    async def test_a_key_in_no_other_form_opens(self, system: SecuredSystem, disguise: str) -> None:
        key = system.key
        headers = {
            "another key": {"Authorization": "Bearer or-" + "A" * 43},
            "its hash": {"Authorization": f"Bearer {digest(key)}"},
            "no scheme": {"Authorization": key},
            "basic": {"Authorization": f"Basic {key}"},
            "empty": {"Authorization": "Bearer"},
            "another header": {"X-Key": key},
            "a cookie": {"Cookie": f"Authorization=Bearer {key}"},
            "upper case": {"Authorization": f"Bearer {key.upper()}"},
            "cut": {"Authorization": f"Bearer {key[:-1]}"},
        }.get(disguise, {})
        async with system.http() as client:
            query = f"?api_key={key}" if disguise == "a query" else ""
            answer = await client.get(f"/v1/models{query}", headers=headers)
        assert answer.status_code == 401

    async def test_a_key_is_good_for_its_scopes_alone(self, system: SecuredSystem) -> None:
        async with system.http(system.metrics_key) as client:
            assert (await answers(client)).status_code == 403
            assert (await client.get("/metrics")).status_code == 200
        async with system.http(system.key) as client:
            for end in ("", "%0A", "%00", "/", ";x"):
                answer = await client.get(f"/metrics{end}")
                assert answer.status_code in (403, 404), end
                assert "location" not in answer.headers

    async def test_health_tells_strangers_nothing_but_itself(self, system: SecuredSystem) -> None:
        async with system.http() as client:
            assert (await client.get("/health")).json() == {"status": "ready"}
            assert (await client.get("/livez")).json() == {"status": "alive"}
            assert (await client.get("/-/healthz")).text == "success"

    async def test_nobody_is_told_which_applications_there_are(self, system: SecuredSystem) -> None:
        async with system.http(system.key) as client:
            assert (await client.get("/-/routes")).status_code == 404

    async def test_the_public_ports_speak_no_plain_text(self, system: SecuredSystem) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            for address in (system.url().removeprefix("https://"), system.grpc_address()):
                with pytest.raises(httpx.TransportError):
                    await client.get(f"http://{address}/health")

    async def test_old_protocols_are_not_spoken(self, system: SecuredSystem) -> None:
        context = system.context()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that is what this is about
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        host, _, port = system.url().removeprefix("https://").rpartition(":")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, int(port), ssl=context)

    async def test_a_stranger_is_refused_before_the_body_is_read(self, system: SecuredSystem) -> None:
        """The request has a body that does not end."""
        host, _, port = system.url().removeprefix("https://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=system.context())
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            async with asyncio.timeout(TIMEOUT_S):
                assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        finally:
            writer.close()


class TestTenants:
    async def test_bodies_that_do_not_come_leave_room_for_others(self, system: SecuredSystem) -> None:
        """A replica takes in 640 requests, and HAProxy passes on bodies of unknown length as they come."""
        host, _, port = system.url().removeprefix("https://").rpartition(":")
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            f"Authorization: Bearer {system.key}\r\n\r\n1\r\n{{\r\n"
        )
        statuses: list[bytes] = []
        has_answer = asyncio.Event()
        writers: list[asyncio.StreamWriter] = []

        async def send() -> None:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=system.context())
            writers.append(writer)
            writer.write(head.encode())
            with contextlib.suppress(ConnectionError):
                statuses.append((await reader.readline())[9:12])
                has_answer.set()

        sending = [asyncio.create_task(send()) for _ in range(700)]
        try:
            async with asyncio.timeout(6 * TIMEOUT_S):
                await has_answer.wait()  # some are refused; the others are waited for
            async with system.http(system.other_key) as client:
                for _ in range(3):
                    assert (await answers(client)).status_code == 200
                assert (await client.get("/livez")).status_code == 200
            assert set(statuses) <= {b"429", b"408"}, set(statuses)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            for writer in writers:
                writer.close()

    async def test_a_stream_is_resumed_by_its_own_tenant_alone(self, system: SecuredSystem) -> None:
        body = {
            "prompt": PROMPT,
            "max_tokens": 60,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_event_ids": True},
        }
        async with system.http(system.key) as client:
            answer = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "stream-1"})
            assert answer.status_code == 200
            await asyncio.sleep(0.5)  # the journal is written beside the request
            assert (await client.get("/v1/streams/stream-1")).status_code == 200
        async with system.http(system.other_key) as client:
            stolen = await client.get("/v1/streams/stream-1")
        assert (stolen.status_code, stolen.json()["error"]["code"]) == (404, "not_found")

    async def test_nor_over_grpc(self, system: SecuredSystem) -> None:
        request = generation_pb2.GenerationRequest(
            prompt=PROMPT,
            sampling=common_pb2.SamplingParams(temperature=0, max_tokens=60),
            request_id="stream-2",
        )
        async with system.channel(system.grpc_address()) as channel:
            chunks = await generate(channel, bearer(system.key), request)
            resume = generation_pb2.GenerationRequest(
                request_id="stream-2",
                resume_from=[generation_pb2.ResumePoint(num_tokens=1, has_begun=True)],
                run=chunks[0].run,
            )
            await asyncio.sleep(0.5)
            assert await generate(channel, bearer(system.key), resume)
            stolen = await code_of(generate(channel, bearer(system.other_key), resume))
            assert stolen is grpc.StatusCode.NOT_FOUND

    async def test_a_request_cannot_be_made_in_anothers_name(self, system: SecuredSystem) -> None:
        request = generation_pb2.GenerationRequest(
            prompt=PROMPT, sampling=common_pb2.SamplingParams(temperature=0, max_tokens=2), tenant="ads"
        )
        async with system.channel(system.grpc_address()) as channel:
            code = await code_of(generate(channel, bearer(system.key), request))
        assert code is grpc.StatusCode.PERMISSION_DENIED

    async def test_who_has_used_up_what_it_may_is_told_when_to_come_back(self, system: SecuredSystem) -> None:
        async with system.http(system.bounded_key) as client:
            codes = [(await answers(client, max_tokens=1)).status_code for _ in range(4)]
            refused = await answers(client, max_tokens=1)
        assert [*codes, refused.status_code] == [200, 200, 200, 429, 429]
        assert 1 <= int(refused.headers["Retry-After"]) <= 20
        async with system.http(system.key) as client:
            assert (await answers(client, max_tokens=1)).status_code == 200


async def generate(
    channel: grpc.aio.Channel,
    metadata: tuple[tuple[str, str], ...] = (),
    request: generation_pb2.GenerationRequest | None = None,
) -> list[generation_pb2.GenerationChunk]:
    request = request or generation_pb2.GenerationRequest(
        prompt=PROMPT, sampling=common_pb2.SamplingParams(temperature=0, max_tokens=8)
    )
    stub = generation_pb2_grpc.GenerationStub(channel)
    return [chunk async for chunk in stub.Generate(request, metadata=metadata, timeout=TIMEOUT_S)]


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


class TestGrpc:
    @pytest.mark.parametrize("disguise", ["nothing", "another key", "another name", "no scheme", "metrics"])
    async def test_without_a_key_nothing_is_generated(self, system: SecuredSystem, disguise: str) -> None:
        metadata = {
            "another key": bearer("or-" + "A" * 43),
            "another name": (("x-api-key", system.key),),
            "no scheme": (("authorization", system.key),),
            "metrics": bearer(system.metrics_key),
        }.get(disguise, ())
        expected = grpc.StatusCode.PERMISSION_DENIED if disguise == "metrics" else grpc.StatusCode.UNAUTHENTICATED
        async with system.channel(system.grpc_address()) as channel:
            assert await code_of(generate(channel, metadata)) is expected

    async def test_nor_are_models_listed(self, system: SecuredSystem) -> None:
        async with system.channel(system.grpc_address()) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            call = stub.ListModels(generation_pb2.ListModelsRequest(), timeout=TIMEOUT_S)
            assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED

    @pytest.mark.parametrize(
        "method",
        [
            "/ray.serve.RayServeAPIService/ListApplications",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "/outrider.v1.Target/GetInfo",
            "/outrider.v1.Draft/GetInfo",
            "/no.such.Service/Method",
        ],
    )
    async def test_no_other_service_is_there(self, system: SecuredSystem, method: str) -> None:
        async with system.channel(system.grpc_address()) as channel:
            # In one piece: a refusal that comes before the last of the request is followed by a reset of the stream.
            call: Any = cast(Any, channel).unary_stream(method)(b"", timeout=TIMEOUT_S)
            assert await call.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)

    async def test_health_needs_no_key(self, system: SecuredSystem) -> None:
        async with system.channel(system.grpc_address()) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="outrider.v1.Generation"), timeout=TIMEOUT_S
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def test_in_the_clear_nothing_answers(self, system: SecuredSystem) -> None:
        async with grpc.aio.insecure_channel(system.grpc_address()) as channel:
            assert await code_of(generate(channel, bearer(system.key))) is grpc.StatusCode.UNAVAILABLE


GENERATE = target_pb2.GenerateRequest(
    session_id="intruder",
    token_ids=[1, 2, 3],
    sampling=common_pb2.SamplingParams(max_tokens=4, top_p=1),
)
ATTACH = draft_pb2.AttachRequest(
    session_id="intruder",
    attachment=1,
    target_address="127.0.0.1:9",
    token_ids=[1],
    sampling=common_pb2.SamplingParams(max_tokens=4, top_p=1),
)
CALLS: dict[str, tuple[str, Role, Any]] = {
    "Target.Generate": (
        "target-0",
        Role.TARGET,
        lambda channel: _read(target_pb2_grpc.TargetStub(channel).Generate(GENERATE, timeout=TIMEOUT_S)),
    ),
    "Target.SetSpeculation": (
        "target-0",
        Role.TARGET,
        lambda channel: target_pb2_grpc.TargetStub(channel).SetSpeculation(
            target_pb2.SetSpeculationRequest(session_id="intruder"), timeout=TIMEOUT_S
        ),
    ),
    "Target.GetInfo": (
        "target-0",
        Role.TARGET,
        lambda channel: target_pb2_grpc.TargetStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=TIMEOUT_S),
    ),
    "Hints.Exchange": (
        "target-0",
        Role.TARGET,
        lambda channel: _read(hints_pb2_grpc.HintsStub(channel).Exchange(timeout=TIMEOUT_S)),
    ),
    "Target health": (
        "target-0",
        Role.TARGET,
        lambda channel: health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S),
    ),
    "Draft.Attach": (
        "draft-0",
        Role.DRAFT,
        lambda channel: _read(draft_pb2_grpc.DraftStub(channel).Attach(ATTACH, timeout=TIMEOUT_S)),
    ),
    "Draft.GetInfo": (
        "draft-0",
        Role.DRAFT,
        lambda channel: draft_pb2_grpc.DraftStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=TIMEOUT_S),
    ),
}


async def _read(call: Any) -> None:
    async for _ in call:
        return


class TestWorkers:
    @pytest.mark.parametrize("name", CALLS)
    async def test_without_a_certificate_nothing_answers(self, system: SecuredSystem, name: str) -> None:
        process, expected, call = CALLS[name]
        address = system.ready(process)["address"]
        async with system.channel(address, expected) as channel:
            assert await code_of(call(channel)) is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(address) as channel:
            assert await code_of(call(channel)) is grpc.StatusCode.UNAVAILABLE

    @pytest.mark.parametrize(
        ("name", "role"),
        [
            ("Target.Generate", Role.DRAFT),
            ("Target.Generate", Role.TARGET),
            ("Target.Generate", Role.OPERATOR),
            ("Target.Generate", Role.CLIENT),
            ("Target.Generate", Role.REDIS),
            ("Target.SetSpeculation", Role.DRAFT),
            ("Target.SetSpeculation", Role.CLIENT),
            ("Hints.Exchange", Role.COORDINATOR),
            ("Hints.Exchange", Role.TARGET),
            ("Hints.Exchange", Role.OPERATOR),
            ("Hints.Exchange", Role.CLIENT),
            ("Draft.Attach", Role.DRAFT),
            ("Draft.Attach", Role.TARGET),
            ("Draft.Attach", Role.OPERATOR),
            ("Draft.Attach", Role.CLIENT),
        ],
    )
    async def test_a_certificate_opens_what_is_its_roles_alone(
        self, system: SecuredSystem, name: str, role: Role
    ) -> None:
        process, expected, call = CALLS[name]
        async with system.channel(system.ready(process)["address"], expected, role) as channel:
            assert await code_of(call(channel)) is grpc.StatusCode.PERMISSION_DENIED

    @pytest.mark.parametrize("name", ["target-0", "draft-0", "coordinator-0"])
    async def test_metrics_are_for_those_who_have_a_certificate(self, system: SecuredSystem, name: str) -> None:
        address = f"127.0.0.1:{system.ready(name)['metrics_port']}"
        for url, context in ((f"https://{address}", system.context()), (f"http://{address}", None)):
            if context is not None:
                context.check_hostname = False  # the certificate names the part, not the machine
            async with httpx.AsyncClient(verify=context or True, timeout=TIMEOUT_S) as client:
                # An alert that comes after the handshake is no error of httpx's own.
                with pytest.raises((httpx.TransportError, ssl.SSLError)):
                    await client.get(f"{url}/metrics")
        context = system.context(Role.OPERATOR)
        context.check_hostname = False
        async with httpx.AsyncClient(verify=context, timeout=TIMEOUT_S) as client:
            assert "outrider_" in (await client.get(f"https://{address}/metrics")).text

    @pytest.mark.parametrize("name", ["target-0", "draft-0"])
    async def test_the_health_port_answers_health_and_nothing_else(self, system: SecuredSystem, name: str) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.ready(name)['health_port']}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            for process, _, call in CALLS.values():
                if process == name and call is not CALLS["Target health"][2]:
                    assert await code_of(call(channel)) is grpc.StatusCode.UNIMPLEMENTED


class TestHints:
    """A draft worker follows the sessions that a coordinator gave it, and no other."""

    @pytest.mark.parametrize("token", ["", "wrong", "right "])
    async def test_a_draft_worker_without_the_sessions_token_hears_nothing_of_it(
        self, system: SecuredSystem, token: str
    ) -> None:
        assert await self._heard(system, f"a-{len(token)}", token) == []

    async def test_one_that_has_it_hears_all(self, system: SecuredSystem) -> None:
        assert len(await self._heard(system, "b", "right")) > 8

    async def _heard(self, system: SecuredSystem, session_id: str, token: str) -> list[int]:
        """Tokens of a session that a draft worker with this token is told."""
        heard: list[int] = []
        address = system.ready("target-0")["address"]
        request = target_pb2.GenerateRequest(
            session_id=session_id,
            hint_token="right",
            token_ids=[1, 2, 3],
            sampling=common_pb2.SamplingParams(top_p=1, max_tokens=40, ignore_eos=True),
            speculation=common_pb2.SpeculationParams(enabled=True),
        )
        async with (
            system.channel(address, Role.TARGET, Role.DRAFT) as of_draft,
            system.channel(address, Role.TARGET, Role.COORDINATOR) as of_coordinator,
        ):
            stream = hints_pb2_grpc.HintsStub(of_draft).Exchange(timeout=TIMEOUT_S)

            async def listen() -> None:
                async for frame in stream:
                    for commit in frame.commits:
                        heard.extend(commit.token_ids)

            listener = asyncio.create_task(listen())
            subscribe = hints_pb2.Subscribe(
                session_id=session_id, attachment=1, known_len=3, channel=1, hint_token=token
            )
            await stream.write(hints_pb2.HintFrame(subscribe=[subscribe]))
            call = target_pb2_grpc.TargetStub(of_coordinator).Generate(request, timeout=TIMEOUT_S)
            events = [event async for event in call]
            assert events[-1].finished.num_output_tokens == 40
            await asyncio.sleep(0.2)
            stream.cancel()
            await asyncio.wait([listener])
        return heard


class TestRedis:
    async def test_redis_is_for_those_who_have_a_certificate_and_the_password(self, system: SecuredSystem) -> None:
        url = system.redis_url_file(Role.TARGET).read_text().strip()
        bare = url.partition("?")[0]
        authority = f"ssl_ca_certs={system.certificates / 'ca.crt'}"
        without_password = re.sub(r"//.*@", "//", url)
        for attempt in (f"{bare}?{authority}", bare.replace("rediss", "redis"), without_password):
            client = redis.asyncio.Redis.from_url(attempt, socket_timeout=2, socket_connect_timeout=2)
            with pytest.raises((redis.exceptions.RedisError, OSError)):
                await client.ping()
            await client.aclose()
        client = redis.asyncio.Redis.from_url(url)
        assert await client.ping()
        await client.aclose()

    @pytest.mark.parametrize("role", [Role.TARGET, Role.DRAFT])
    async def test_a_worker_finds_nothing_in_redis_but_its_pools_leases(
        self, system: SecuredSystem, role: Role
    ) -> None:
        def client_of(role: Role) -> redis.asyncio.Redis:
            return redis.asyncio.Redis.from_url(system.redis_url_file(role).read_text().strip())

        own, other = ("target", "draft") if role is Role.TARGET else ("draft", "target")
        async with client_of(Role.COORDINATOR) as coordinator, client_of(role) as worker:
            await coordinator.hset("or:journal:somebody", "payload", "what was asked")
            for pool in (own, other):
                assert await coordinator.zcard(f"{{or:{pool}}}:leases") == 1
            assert await worker.hget(f"{{or:{own}}}:w:nobody", "state") is None
            for command in (
                ("HGETALL", "or:journal:somebody"),
                ("HGET", f"{{or:{other}}}:w:nobody", "state"),
                ("DEL", "or:limits:somebody"),
                ("HSET", "{or:canary}:plan", "state", "promoted"),
                ("EVAL", "return redis.call('HGETALL', 'or:journal:somebody')", "0"),
                ("SCAN", "0"),
                ("KEYS", "*"),
                ("FLUSHALL",),
                ("CONFIG", "GET", "*"),
                ("ACL", "LIST"),
                ("MONITOR",),
            ):
                with pytest.raises(redis.exceptions.ResponseError):
                    await worker.execute_command(*command)


async def test_nothing_that_was_said_or_is_secret_gets_into_a_log(system: SecuredSystem) -> None:
    async with system.http(system.key) as client:
        said = (await answers(client, max_tokens=40)).json()["choices"][0]["text"]
        refused = await answers(client, prompt=[PROMPT] * 3, top_p=7)
        assert refused.status_code == 400
    async with system.http("or-a-wrong-key") as client:
        await answers(client)
    secrets = [
        "xylophone",
        said,
        system.key,
        system.other_key,
        system.bounded_key,
        system.metrics_key,
        "or-a-wrong-key",
    ]
    secrets.append(re.search(r":([^:@/]+)@", system.redis_url_file(Role.TARGET).read_text()).group(1))  # type: ignore[union-attr]
    files = [
        *system.log_dir.rglob("*"),
        *system.scratch.glob("r*/**/*.log"),
        *system.scratch.glob("r*/**/*.err"),
    ]
    num_read = 0
    for path in filter(Path.is_file, files):
        text = path.read_text(errors="replace")
        num_read += 1
        for secret in secrets:
            assert secret not in text, f"{path} holds {secret!r}"
            assert json.dumps(secret)[1:-1] not in text, f"{path} holds {secret!r}"
    assert num_read >= 4


RAYS_OWN = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVPut",
    "/ray.rpc.JobInfoGcsService/AddJob",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.LogService/StreamLog",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequest",  # unpickles what it is sent
)


async def test_what_listens_beyond_this_machine_is_rays_own_and_asks_for_its_token(
    system: SecuredSystem,
) -> None:
    """Ray (2.60) has no way to keep its processes' ports to the loopback; its token closes them."""
    refusals = dict.fromkeys(RAYS_OWN, 0)
    for process, ip, port in listeners_beyond(system):
        assert process.startswith(("ray::", "raylet", "gcs_server", "python")), process
        address = f"{ip if ip not in ('::', '0.0.0.0') else '127.0.0.1'}:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            for method in RAYS_OWN:
                code = await code_of(cast(Any, channel).unary_unary(method)(b"", timeout=TIMEOUT_S))
                refusals[method] += code is grpc.StatusCode.UNAUTHENTICATED
                assert code in (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.UNIMPLEMENTED,
                    grpc.StatusCode.UNAVAILABLE,  # it speaks HTTP, below
                ), (process, method)
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            for path in ("/", "/metrics", "/api/jobs/", "/get_or_create_runtime_env"):
                with contextlib.suppress(httpx.TransportError):  # it speaks gRPC
                    assert (await client.get(f"http://{address}{path}")).status_code == 401, (process, path)
    assert all(refusals.values()), refusals  # each was found somewhere


def listeners_beyond(system: SecuredSystem) -> list[tuple[str, str, int]]:
    """Name of the process, address and port of each socket that other machines could reach."""
    found = []
    for name in system.children:
        family = psutil.Process(int(system.ready(name)["pid"]))
        for process in (family, *family.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN and each.laddr:
                        ip = each.laddr.ip.removeprefix("::ffff:")
                        if ip not in ("127.0.0.1", "::1"):
                            found.append((process.name(), ip, each.laddr.port))
    return found
