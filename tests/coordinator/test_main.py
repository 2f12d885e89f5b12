"""`python -m coordinator`: what it refuses before it starts anything, and one real start of each hosting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import grpc
import grpc.aio
import httpx
import openai
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from coordinator import __main__ as entry
from coordinator.__main__ import parse
from coordinator.hosting import ray_serve
from coordinator.hosting.ray_processes import NAMES as RAY_PROCESSES
from coordinator.settings import Hosting, Proxy
from outrider.local import tether
from outrider.local.free_ports import free_ports
from outrider.local.redis_server import EmbeddedRedis
from outrider.registry.registry import Registry
from outrider.registry.worker_lease import WorkerLease
from outrider.registry.worker_record import WorkerLoad
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.coordinator import serve_grpc
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, FakeTarget, eventually, record_of, serving
from tests.coordinator.without_ray import WITHOUT_RAY

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
REQUESTS_MAX = 8


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coordinator", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


class TestRefusalsAtStart:
    def test_a_missing_redis_url_is_asked_for(self, clusters: ClusterFactory) -> None:
        done = run("--tokenizer", str(clusters.model_dir))
        assert done.returncode == 2
        assert "OUTRIDER_REDIS_URL" in done.stderr

    def test_a_ray_that_does_not_come_up_is_told_in_a_sentence(
        self, clusters: ClusterFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def time_out(**_: object) -> None:
            raise Exception("The node timed out\nduring startup.")  # as Ray raises it

        monkeypatch.setattr(entry, "_check_before_start", lambda *_: None)
        for name in ("_stop_on_signals", "_prepare_ray_environment"):
            monkeypatch.setattr(ray_serve, name, lambda *_: None)
        monkeypatch.setattr("ray.init", time_out)
        words = ["--tokenizer", str(clusters.model_dir), "--redis-url", "redis://127.0.0.1:1/0"]
        assert entry.main(words) == 1
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith("coordinator: Ray did not start; is the machine overloaded")
        assert told.endswith("Ray says: The node timed out during startup.")

    def test_flags_become_settings(self, clusters: ClusterFactory) -> None:
        given = ["--tokenizer", str(clusters.model_dir), "--redis-url", "redis://127.0.0.1:1/0"]
        assert parse(given)[0].seed_requests
        assert not parse([*given, "--no-seed-requests"])[0].seed_requests
        assert parse([*given, "--target-silence-max", "3.5"])[0].target_silence_max_s == 3.5
        assert parse([*given, "--client-stall-max", "4.5"])[0].client_stall_max_s == 4.5

    def test_worker_ids_are_required_where_it_is_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = ["--tokenizer", ".", "--redis-url", "redis://x", "--require-worker-ids"]
        assert parse([*given, "--tls-dir", str(tmp_path)])[0].require_worker_ids
        with pytest.raises(SystemExit):
            parse(given)
        assert "--require-worker-ids needs --tls-dir" in capsys.readouterr().err

    def test_files_that_are_links_stay_links_for_they_will_lead_elsewhere(self, tmp_path: Path) -> None:
        """A secret of Kubernetes is a link to a folder that the next version replaces."""
        (tmp_path / "..1").mkdir()
        (tmp_path / "..1" / "keys.toml").write_text("")
        (tmp_path / "..data").symlink_to("..1")
        (tmp_path / "keys.toml").symlink_to("..data/keys.toml")
        given = ["--tokenizer", ".", "--redis-url", "redis://x"]
        settings, listen = parse(
            [*given, "--api-keys", str(tmp_path / "keys.toml"), "--tls-dir", str(tmp_path / "..data")]
        )
        assert settings.api_keys_file == str(tmp_path / "keys.toml")
        assert settings.tls_dir == str(tmp_path / "..data")
        assert listen.tls_dir == tmp_path / "..data"

    def test_what_came_of_other_requests_counts_unless_it_is_told_not_to(self) -> None:
        given = ["--tokenizer", ".", "--redis-url", "redis://x"]
        assert parse(given)[0].uses_priors
        assert not parse([*given, "--no-priors"])[0].uses_priors

    def test_an_unreachable_redis_is_named(self, clusters: ClusterFactory) -> None:
        done = run(
            "--tokenizer",
            str(clusters.model_dir),
            "--redis-url",
            "redis://:secret@127.0.0.1:1/0",
            "--redis-wait-s",
            "0",
        )
        assert done.returncode == 1
        assert "127.0.0.1:1" in done.stderr
        assert "secret" not in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_folder_without_tokenizer_is_named(self, tmp_path: Path) -> None:
        done = run("--tokenizer", str(tmp_path), "--redis-url", "redis://127.0.0.1:1/0")
        assert done.returncode == 1
        assert str(tmp_path / "tokenizer.json") in done.stderr

    def test_a_port_in_use_is_named(self, clusters: ClusterFactory, tmp_path: Path) -> None:
        redis = EmbeddedRedis(tmp_path)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            try:
                done = run("--tokenizer", str(clusters.model_dir), "--redis-url", redis.start(), "--port", port)
            finally:
                redis.stop()
        assert done.returncode == 1
        assert f"--port {port}" in done.stderr

    @pytest.mark.parametrize(
        ("words", "refusal"),
        [
            ("--num-replicas 2", "--num-replicas needs --hosting ray-serve: a plain process is one replica"),
            ("--proxy python", "--proxy needs --hosting ray-serve"),
            ("--ray-temp-dir /tmp/x", "--ray-temp-dir needs --hosting ray-serve"),
            ("--tls-dir /x --require-client-certificates", "let the load balancer in front ask for certificates"),
        ],
    )
    def test_a_flag_that_a_plain_process_does_not_have_is_named(
        self, words: str, refusal: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            parse(["--tokenizer", ".", "--redis-url", "redis://x", "--hosting", "plain", *words.split()])
        assert refusal in capsys.readouterr().err

    def test_a_flag_of_plain_processes_is_refused_for_ray(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse(["--tokenizer", ".", "--redis-url", "redis://x", "--drain-notice-s", "9"])
        assert "--drain-notice-s needs --hosting plain" in capsys.readouterr().err

    def test_certificates_of_a_plain_process_are_for_workers_alone(self, tmp_path: Path) -> None:
        given = ["--tokenizer", ".", "--redis-url", "redis://x", "--tls-dir", str(tmp_path)]
        assert parse(given)[1].has_public_tls
        settings, listen = parse([*given, "--hosting", "plain"])
        assert settings.tls_dir == str(tmp_path)
        assert not listen.has_public_tls

    def test_a_plain_process_names_a_folder_without_tokenizer_too(self, tmp_path: Path) -> None:
        redis = EmbeddedRedis(tmp_path)
        try:
            done = run("--hosting", "plain", "--tokenizer", str(tmp_path), "--redis-url", redis.start())
        finally:
            redis.stop()
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)
        assert str(tmp_path / "tokenizer.json") in done.stderr

    def test_importing_everything_but_ray_imports_neither_torch_nor_ray(self) -> None:
        program = (
            "import sys, coordinator.api.http.application, coordinator.api.grpc.grpc_api, coordinator.__main__; "
            "import coordinator.hosting.plain_process; "
            "sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=60)
        assert done.returncode == 0


@contextlib.contextmanager
def raw_request(address: tuple[str, int], body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection that has asked for completions, and whose system takes little that is not read."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(head.encode() + content)
        yield connection


async def stopped_stream(running: Running, client: httpx.AsyncClient, num_tokens: int) -> str:
    """A stream of 60 tokens a second; the coordinator is told to stop, once, as soon as it has begun."""
    running.target.step_s = 0.05
    body = {"prompt": "x", "temperature": 0, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        parts: list[str] = []
        async for part in answer.aiter_text():
            if not parts and not running.is_stopping:
                running.is_stopping = True
                running.process.send_signal(signal.SIGTERM)
            parts.append(part)
    return "".join(parts)


async def rest_of(call: Any) -> None:
    while isinstance(await call.read(), generation_pb2.GenerationChunk):
        pass


@dataclass
class Running:
    """A coordinator, the fakes behind it, and the folder of its Ray and its log."""

    process: asyncio.subprocess.Process
    temp_dir: Path
    ready: dict[str, Any]
    target: FakeTarget
    draft: FakeDraft
    leases: dict[str, WorkerLease]  # by pool
    is_stopping: bool = False


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[*Proxy, Hosting.PLAIN])
async def running(
    request: pytest.FixtureRequest, clusters: ClusterFactory, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    target, draft = clusters.target(tokens_per_step=3, num_draft_tokens=4), FakeDraft()
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    url = redis.start()
    fingerprint, leases = clusters.tokenizer.fingerprint, {}
    async with AsyncExitStack() as stack:
        stack.callback(redis.stop)
        registry = Registry(url)
        stack.push_async_callback(registry.close)
        for pool, worker in (("target", target), ("draft", draft)):
            address = await stack.enter_async_context(serving(worker))
            record = record_of("target" if pool == "target" else "draft", address, fingerprint)
            leases[pool] = await stack.enter_async_context(WorkerLease(registry, record, WorkerLoad))
        temp_dir = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))  # short, for Ray's sockets
        stack.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        port, grpc_port = map(str, free_ports(2))  # asked for one by one they could be the same
        hosted: tuple[str, ...] = (*WITHOUT_RAY, "--hosting", Hosting.PLAIN, "--drain-notice-s", "1")
        if request.param is not Hosting.PLAIN:
            hosted = (sys.executable, "-m", "coordinator", "--proxy", request.param, "--ray-temp-dir", str(temp_dir))
        with (temp_dir / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *hosted, "--tokenizer", str(clusters.model_dir),
                "--port", port, "--grpc-port", grpc_port, "--served-model-name", "demo",
                "--max-requests", str(REQUESTS_MAX), "--client-stall-max", "1",
                cwd=ROOT, env={**os.environ, "OUTRIDER_REDIS_URL": url}, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline()
            yield Running(process, temp_dir, json.loads(line), target, draft, leases)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(60):
                    await process.wait()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.asyncio(loop_scope="module")
class TestServing:
    async def test_the_openai_package_streams(self, running: Running, clusters: ClusterFactory) -> None:
        running.target.may_step = lambda num_tokens: bool(running.draft.requests)
        async with openai.AsyncOpenAI(base_url=running.ready["http"] + "/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="demo", prompt="import", max_tokens=10, stream=True, temperature=0
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
        running.target.may_step = lambda num_tokens: True
        assert text == clusters.tokenizer.decode(clusters.script[:10])
        assert running.draft.requests[-1].session_id == running.target.requests[-1].session_id

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
    async def test_no_other_user_of_the_machine_reads_or_changes_its_files(self, running: Running) -> None:
        """HAProxy's launcher lies there, and runs as the coordinator's user; Ray opens its folder to everybody."""
        if running.ready["hosting"] == Hosting.PLAIN:
            pytest.skip("a plain process has no such files")
        paths = ["/etc/passwd", str(running.temp_dir), *map(str, running.temp_dir.rglob("*"))]
        assert len(paths) > 20
        found = subprocess.run(
            ["/bin/sh", "-c", 'for f; do if [ -r "$f" ] || [ -w "$f" ]; then echo "$f"; fi; done', "sh", *paths],
            user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.split() == ["/etc/passwd"]

    async def test_the_request_id_comes_back_once(self, running: Running) -> None:
        async with httpx.AsyncClient(base_url=running.ready["http"]) as client:
            response = await client.get("/v1/models", headers={"X-Request-Id": "mine"})
            refused = await client.post("/v1/completions", json={"prompt": "x", "temperature": 9})
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "temperature"

    async def test_a_stream_goes_on_by_an_id_with_slashes(self, running: Running) -> None:
        body = {
            "model": "demo",
            "prompt": "import",
            "max_tokens": 6,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_event_ids": True},
            "request_id": "team a/50%2F//of?it#1",
        }
        async with httpx.AsyncClient(base_url=running.ready["http"], timeout=30) as client:
            begun = await client.post("/v1/completions", json=body)
            path = f"/v1/streams/{quote(str(body['request_id']), safe='')}"
            # What was generated is in the journal within a moment; until then it is generated again.
            first = re.search(r"^id: (.*):", begun.text, re.MULTILINE)
            assert first is not None
            answer = await client.get(path, headers={"Last-Event-ID": f"{first[1]}:3"})
        assert answer.status_code == 200, answer.text
        assert "data: [DONE]" in begun.text
        assert "data: [DONE]" in answer.text

    async def test_grpc_streams_and_keeps_status_codes(self, running: Running, clusters: ClusterFactory) -> None:
        async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            models = await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=10)
            assert [model.id for model in models.models] == ["demo"]
            call = stub.Generate(generation_pb2.GenerationRequest(prompt="import"), timeout=10)
            chunks = [chunk async for chunk in call]
            assert "".join(chunk.text for chunk in chunks) == clusters.tokenizer.decode((clusters.script * 2)[:16])
            with pytest.raises(grpc.aio.AioRpcError, match="demo") as caught:
                await stub.Generate(generation_pb2.GenerationRequest(prompt="import", model="x"), timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_grpc_health_follows_the_targets(self, running: Running) -> None:
        async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
            stub, status = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse

            async def check(service: str = "") -> Any:
                return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status

            assert [await check(name) for name in ("", "outrider.v1.Generation", "liveness")] == [status.SERVING] * 3
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="outrider.v1.Generation"), timeout=30)
            assert (await watch.read()).status == status.SERVING
            try:
                running.leases["target"].set_state("draining")
                assert (await watch.read()).status == status.NOT_SERVING
                assert [await check(), await check("liveness")] == [status.NOT_SERVING, status.SERVING]
            finally:
                running.leases["target"].set_state("ready")
            assert (await watch.read()).status == status.SERVING
            watch.cancel()

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    async def test_grpc_reflection_answers_one_question_after_the_other(self, running: Running, version: str) -> None:
        """As grpcurl asks: it goes on when it has the answer, and ends its stream at the end."""
        async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
            call = cast(Any, channel).stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )(timeout=10)
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            services = [each.name for each in (await call.read()).list_services_response.service]
            assert {"outrider.v1.Generation", "grpc.health.v1.Health"} < set(services)
            for name in services:
                await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
                assert (await call.read()).file_descriptor_response.file_descriptor_proto
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK

    @pytest.mark.parametrize(
        "path", ["outrider.v1.Generation/Generate", "outrider.v1.Generation/ListModels", "grpc.health.v1.Health/Check"]
    )
    async def test_bytes_that_are_no_message_leave_no_trace_in_the_logs(self, running: Running, path: str) -> None:
        def traces() -> int:
            files = (running.temp_dir / "log", *(running.temp_dir / "r" / "session_latest" / "logs").rglob("*"))
            return sum(file.read_bytes().count(b"Traceback") for file in files if file.is_file())

        num_before = traces()
        async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await serve_grpc.ask(channel, f"/{path}", b"\xff")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert traces() == num_before

    async def test_clients_that_leave_free_both_workers(self, running: Running) -> None:
        running.target.step_s = 0.02
        num_before = running.target.num_cancelled
        try:
            body = {"prompt": "x", "max_tokens": 900, "stream": True}
            async with (
                httpx.AsyncClient(base_url=running.ready["http"]) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                await anext(response.aiter_lines())
            sampling = common_pb2.SamplingParams(temperature=0, max_tokens=900)
            asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling)
            async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
                for _ in range(40):  # Serve's proxy alone loses one in five of these
                    call = generation_pb2_grpc.GenerationStub(channel).Generate(asked, timeout=10)
                    await call.read()
                    call.cancel()
            await eventually(lambda: running.target.num_open + running.draft.num_open == 0, "both workers are free")
            assert running.target.num_cancelled == num_before + 41
        finally:
            running.target.step_s = 0.0

    async def test_what_serves_requests_listens_on_the_given_address_only(self, running: Running) -> None:
        process = psutil.Process(running.process.pid)
        family = [process, *process.children(recursive=True)]
        listening: set[tuple[str, str, int]] = set()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray's come and go
                name, connections = process.name(), process.net_connections("tcp")
                listening |= {
                    (name, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
                    for connection in connections
                    if connection.status == psutil.CONN_LISTEN
                }
        public = {int(running.ready[name].rpartition(":")[2]) for name in ("http", "grpc")}
        assert public <= {port for _, _, port in listening}
        # HAProxy's statistics too, and what it forwards to; the rest is between Ray's own processes.
        forwarded = {*range(30000, 30016), *range(40000, 40016)}  # taken from below
        ours = {
            (name, ip, port)
            for name, ip, port in listening
            if name == "haproxy" or port in public or ("Replica" in name and port in forwarded)
        }
        assert {ip for _, ip, _ in ours} == {"127.0.0.1"}, ours

    async def test_a_full_replica_says_so_with_both_protocols(self, running: Running) -> None:
        running.target.step_s = 0.05
        body = {"prompt": "x", "max_tokens": 900, "stream": True}
        asked = generation_pb2.GenerationRequest(prompt="import")
        try:
            async with AsyncExitStack() as stack:
                limits = httpx.Limits(max_connections=100)
                client = await stack.enter_async_context(
                    httpx.AsyncClient(base_url=running.ready["http"], limits=limits)
                )
                waiting: list[asyncio.Task[httpx.Response]] = []
                for _ in range(REQUESTS_MAX):
                    stream = client.stream("POST", "/v1/completions", json=body)
                    assert (await stack.enter_async_context(stream)).status_code == 200
                for _ in range(REQUESTS_MAX + 2):  # as many may wait
                    post = client.post("/v1/completions", json=body | {"max_tokens": 1}, timeout=20)
                    waiting.append(asyncio.create_task(post))
                done, others = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
                refusal = done.pop().result()
                for task in others:
                    task.cancel()
                assert (refusal.status_code, refusal.headers["Retry-After"]) == (429, "1")
                await asyncio.wait(waiting)
                async with grpc.aio.insecure_channel(running.ready["grpc"]) as channel:
                    stub = generation_pb2_grpc.GenerationStub(channel)
                    calls = [stub.Generate(asked, timeout=20) for _ in range(2 * REQUESTS_MAX)]
                    ends = [asyncio.create_task(call.code()) for call in calls]
                    ended, _ = await asyncio.wait(ends, timeout=20, return_when=asyncio.FIRST_COMPLETED)
                    assert {task.result() for task in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
                    for call in calls:
                        call.cancel()
        finally:
            running.target.step_s = 0.0

    async def test_clients_that_do_not_read_are_let_go(self, running: Running) -> None:
        """Serve's own proxy reads for them, and keeps what it has read."""
        is_held_up = running.ready["proxy"] != "python"
        body = {"prompt": "x", "temperature": 0, "max_tokens": 900, "n": 32, "logprobs": 20, "stream": True}
        address = ("127.0.0.1", int(running.ready["http"].rpartition(":")[2]))
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=900, num_logprobs=20)
        asked = generation_pb2.GenerationRequest(prompt="import", sampling=sampling, n=32)

        async def num_slow() -> list[float]:
            text = (await client.get("/metrics")).text
            name = "outrider_slow_readers_total"
            found = re.findall(rf'^{name}{{ended="(?:request|connection)"}} (\S+)$', text, re.MULTILINE)
            assert len(found) == 2, text
            return [float(value) for value in found]

        async def load() -> int:
            return int((await client.get("/load")).json()["server_load"])

        async def until_let_go(num: int) -> None:
            """Until the replica has no request either: what a target has generated is still to be written."""
            async with asyncio.timeout(60):
                while await num_slow() != [num * is_held_up] * 2 or running.target.num_open or await load():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

        async with httpx.AsyncClient(base_url=running.ready["http"], timeout=30) as client:
            with raw_request(address, body) as connection:
                await asyncio.to_thread(connection.recv, 1)
                await until_let_go(1)
            async with grpc.aio.insecure_channel(running.ready["grpc"], options=options) as channel:
                call = generation_pb2_grpc.GenerationStub(channel).Generate(asked)
                await call.read()
                await until_let_go(2)
                if is_held_up:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await asyncio.wait_for(rest_of(call), 30)
                    assert caught.value.code() is grpc.StatusCode.ABORTED
                    assert "resume_from" in (caught.value.details() or "")

    async def test_it_stops_with_status_zero_and_leaves_no_process(self, running: Running) -> None:
        """Requests finish where they can, and end with an error where they cannot."""
        family = psutil.Process(running.process.pid).children(recursive=True)
        names = set()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray's come and go
                names.add(process.name())
        assert ("raylet" in names) is (running.ready["hosting"] == Hosting.RAY_SERVE)
        assert ("haproxy" in names) is (running.ready["proxy"] == "haproxy")
        async with httpx.AsyncClient(base_url=running.ready["http"], timeout=60) as client:
            short, endless = await asyncio.gather(*(stopped_stream(running, client, num) for num in (60, 3000)))
        assert short.endswith("data: [DONE]\n\n")
        assert "error" not in short
        assert '"code":"unavailable"' in endless.replace(" ", "")
        async with asyncio.timeout(60):
            assert await running.process.wait() == 0
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
        assert alive == []
        left = {path.name for path in running.temp_dir.iterdir()} - {"r"}
        assert left == {"log"}, "beside Ray's own, in a folder that was given to it"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", RAY_PROCESSES)
def test_a_coordinator_ends_with_its_ray_and_takes_all_of_it_along(
    name: str, clusters: ClusterFactory, tmp_path: Path
) -> None:
    """Without its raylet it would serve on with what it has, never whole again; without its GCS for another minute."""
    redis = EmbeddedRedis(tmp_path)
    url = redis.start()
    port, grpc_port = map(str, free_ports(2))
    words = [
        *tether.words(10),
        *(sys.executable, "-m", "coordinator", "--tokenizer", str(clusters.model_dir)),
        *("--port", port, "--grpc-port", grpc_port),
    ]
    environment = os.environ | {"OUTRIDER_REDIS_URL": url, "PYTHONPATH": str(ROOT)}
    tethered = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert tethered.stdout is not None
        pid = json.loads(tethered.stdout.readline())["pid"]
        family = psutil.Process(pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray's come and go
                if process.name() == name:
                    process.kill()
        _, said = tethered.communicate(timeout=30)
        assert f"Ray's {name} has ended, and so does this coordinator" in said
        assert tethered.returncode == 1
        assert psutil.wait_procs(family, 10)[1] == []
    finally:
        tethered.terminate()
        tethered.communicate(timeout=30)
        redis.stop()


class TestSettingsFile:
    def words(self, tmp_path: Path, content: str) -> list[str]:
        file = tmp_path / "settings.json"
        file.write_text(content)
        return ["--tokenizer", str(tmp_path), "--redis-url", "redis://127.0.0.1:1/0", "--settings", str(file)]

    def test_sets_what_flags_do_not(self, tmp_path: Path) -> None:
        content = '{"requests_max": 7, "deadline_max_s": 60, "log_format": "json", "metrics_host": "::"}'
        settings, _ = parse([*self.words(tmp_path, content), "--max-requests", "9"])
        assert (settings.requests_max, settings.deadline_max_s) == (9, 60)
        assert (settings.log_format, settings.metrics_host) == ("json", "::")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("[]", "no JSON object"),
            ("{", "Expecting"),
            ('{"request_max": 1}', "unknown settings: request_max"),
            ('{"log_format": "xml"}', "one of text, json"),
            ('{"requests_max": 0}', "permitted"),
        ],
    )
    def test_that_is_wrong_is_refused_with_the_reason(
        self, tmp_path: Path, content: str, reason: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            parse(self.words(tmp_path, content))
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err

    def test_that_is_not_there_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            parse([*self.words(tmp_path, "{}")[:-1], str(tmp_path / "none.json")])
        assert "none.json: No such file" in capsys.readouterr().err
