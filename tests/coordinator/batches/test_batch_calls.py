"""OpenAI's Files and Batches APIs over HTTP, in part through the real `openai` package, with real lines at fake
targets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.batches.batch_answers import BatchObject, FileObject
from coordinator.api.http import batch_calls, file_upload, http_transport
from coordinator.api.http.application import create_app
from coordinator.api.http.batch_calls import UPLOADS_MAX
from coordinator.api.http.line_calls import ENDPOINTS, LineCalls
from coordinator.batches import batch_results
from coordinator.batches.batch_desk import BatchDesk
from coordinator.batches.batch_runner import BatchRunner
from coordinator.batches.file_store import FolderStore
from coordinator.batches.files import Files
from coordinator.batches.line_journal import LineJournal
from outrider.registry.registry import Registry
from outrider.sampling_params import BACKGROUND_PRIORITY
from tests.coordinator.batches.desks import line
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import eventually

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_results, "WAIT_S", 0.05)
    monkeypatch.setattr(batch_results, "LOOK_S", 0.02)


@asynccontextmanager
async def serving(
    clusters: ClusterFactory,
    registry: Registry,
    folder: Path,
    *,
    runs: bool = True,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Cluster]:
    """A coordinator with batches."""
    async with clusters.open([clusters.target(**options)], settings=settings) as cluster:
        desk = BatchDesk(Files(registry, FolderStore(folder), 1 << 30), LineJournal(registry), tuple(ENDPOINTS))
        transport = httpx.ASGITransport(create_app(cluster.service, desk))
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator", timeout=30) as client:
            cluster.client = client
            if not runs:
                yield cluster
                return
            async with BatchRunner(desk, LineCalls(cluster.service), poll_s=0.05):
                yield cluster


def chat(custom_id: str, **body: Any) -> bytes:
    content = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0, **body}
    return line(custom_id, url=CHAT, body=content) + b"\n"


async def upload(cluster: Cluster, content: bytes, **fields: str) -> httpx.Response:
    data = {"purpose": "batch", **fields}
    return await cluster.client.post("/v1/files", data=data, files={"file": ("in.jsonl", content)})


async def create(cluster: Cluster, content: bytes, endpoint: str = CHAT, **body: Any) -> dict[str, Any]:
    file_id = (await upload(cluster, content)).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **body}
    answer = await cluster.client.post("/v1/batches", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(cluster: Cluster, batch: dict[str, Any]) -> dict[str, Any]:
    for _ in range(3000):
        found: dict[str, Any] = (await cluster.client.get(f"/v1/batches/{batch['id']}")).json()
        BatchObject.model_validate(found)
        if found["status"] in ("completed", "failed", "cancelled", "expired"):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)


async def read(cluster: Cluster, file_id: str) -> dict[str, Any]:
    answer = await cluster.client.get(f"/v1/files/{file_id}/content")
    assert answer.headers["content-type"] == "application/octet-stream"
    return {each["custom_id"]: each for each in map(json.loads, answer.content.splitlines())}


async def test_the_openai_package_runs_a_batch(clusters: ClusterFactory, registry: Registry, tmp_path: Path) -> None:
    async with serving(clusters, registry, tmp_path) as cluster:
        own: Any = cluster.client
        client = openai.AsyncOpenAI(api_key="none", base_url="http://coordinator/v1", http_client=own)
        content = b"".join(chat(f"r{number}") for number in range(5))
        file = await client.files.create(
            file=("in.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert (file.purpose, file.bytes, file.expires_at) == ("batch", len(content), file.created_at + 3600)
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"night": "ly"}
        )
        assert batch.status == "validating"
        await ended(cluster, {"id": batch.id})
        batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.metadata) == (5, {"night": "ly"})
        assert batch.output_file_id is not None
        answers = [json.loads(each) for each in (await client.files.content(batch.output_file_id)).text.splitlines()]
        assert sorted(each["custom_id"] for each in answers) == [f"r{number}" for number in range(5)]
        assert answers[0]["response"]["body"]["object"] == "chat.completion"
        usages = [each["response"]["body"]["usage"] for each in answers]
        assert batch.usage is not None
        assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in usages) > 0
        assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in usages) > 0
        assert batch.usage.total_tokens == sum(each["total_tokens"] for each in usages)
        assert [each.id async for each in client.batches.list()] == [batch.id]
        assert [each.id async for each in client.files.list(purpose="batch")] == [file.id]
        assert {each.purpose async for each in client.files.list(limit=1)} == {"batch", "batch_output"}
        assert (await client.files.retrieve(file.id)).filename == "in.jsonl"
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError, match="completed"):
            await client.batches.cancel(batch.id)


async def test_a_line_is_answered_as_the_same_request_alone(
    clusters: ClusterFactory, registry: Registry, tmp_path: Path
) -> None:
    async with serving(clusters, registry, tmp_path) as cluster:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "temperature": 0},
            CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0},
            "/v1/responses": {"input": "hi", "max_output_tokens": 5, "temperature": 0, "store": False},
        }
        for endpoint, body in bodies.items():
            batch = await ended(cluster, await create(cluster, line("a", url=endpoint, body=body), endpoint))
            assert batch["status"] == "completed", batch
            answer = (await read(cluster, batch["output_file_id"]))["a"]["response"]
            alone = (await cluster.client.post(endpoint, json=body)).json()
            for each in (answer["body"], alone):
                for name in ("id", "created", "created_at", "metrics", "completed_at"):
                    each.pop(name, None)
                for item in each.get("output", ()):
                    item.pop("id")
            assert answer["status_code"] == 200
            assert answer["body"] == alone


async def test_lines_go_last_at_targets(clusters: ClusterFactory, registry: Registry, tmp_path: Path) -> None:
    async with serving(clusters, registry, tmp_path) as cluster:
        await ended(cluster, await create(cluster, chat("a", priority=-5)))
        assert [request.priority for request in cluster.targets[0].requests] == [BACKGROUND_PRIORITY]


async def test_a_line_that_only_a_run_can_refuse_is_an_error_of_its_own(
    clusters: ClusterFactory, registry: Registry, tmp_path: Path
) -> None:
    async with serving(clusters, registry, tmp_path) as cluster:
        long = [{"role": "user", "content": "word " * 5000}]
        batch = await ended(cluster, await create(cluster, chat("a") + chat("b", messages=long)))
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 1, "failed": 1})
        error = (await read(cluster, batch["error_file_id"]))["b"]["response"]
        assert (error["status_code"], error["body"]["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stream": True}, "stream"),
        ({"model": "another"}, "model"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_file_is_refused_by_the_checks_of_a_request(
    clusters: ClusterFactory, registry: Registry, tmp_path: Path, body: dict[str, Any], parameter: str
) -> None:
    async with serving(clusters, registry, tmp_path) as cluster:
        batch = await ended(cluster, await create(cluster, chat("a") + chat("b", **body)))
        assert batch["status"] == "failed"
        (error,) = batch["errors"]["data"]
        assert (error["line"], error["code"] != "", error["message"] != "") == (2, True, True)
        if parameter != "model":
            assert error["param"] == parameter
        assert not cluster.targets[0].requests


async def test_a_batch_can_be_cancelled(clusters: ClusterFactory, registry: Registry, tmp_path: Path) -> None:
    async with serving(clusters, registry, tmp_path, runs=False) as cluster:
        batch = await create(cluster, chat("a"))
        cancelled = await cluster.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelling")


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"input_file_id": None}, "input_file_id"),
        ({"more": 1}, "more"),
    ],
)
async def test_a_wrong_batch_is_refused_by_its_parameter(
    clusters: ClusterFactory, registry: Registry, tmp_path: Path, changes: dict[str, Any], parameter: str
) -> None:
    async with serving(clusters, registry, tmp_path, runs=False) as cluster:
        file_id = (await upload(cluster, chat("a"))).json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | changes
        answer = await cluster.client.post("/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


async def test_a_file_that_is_missing_is_not_found(
    clusters: ClusterFactory, registry: Registry, tmp_path: Path
) -> None:
    async with serving(clusters, registry, tmp_path, runs=False) as cluster:
        body = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
        answers = [
            await cluster.client.post("/v1/batches", json=body),
            await cluster.client.get("/v1/files/file-none"),
            await cluster.client.get("/v1/files/file-none/content"),
            await cluster.client.delete("/v1/files/file-none"),
            await cluster.client.get("/v1/batches/batch_none"),
            await cluster.client.get("/v1/batches?after=batch_none"),
            await cluster.client.get("/v1/files?after=file-none"),
        ]
        assert {answer.status_code for answer in answers} == {404}


class TestUploads:
    @pytest.mark.parametrize(
        ("fields", "parameter"),
        [
            ({"purpose": "fine-tune"}, "purpose"),
            ({"odd": "1"}, "odd"),
            ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
            ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"}, "expires_after.seconds"),
            ({"expires_after[anchor]": "now", "expires_after[seconds]": "9999"}, "expires_after.anchor"),
        ],
    )
    async def test_of_wrong_forms_are_refused_by_the_part(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path, fields: dict[str, str], parameter: str
    ) -> None:
        async with serving(clusters, registry, tmp_path, runs=False) as cluster:
            answer = await upload(cluster, b"x", **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)

    @pytest.mark.parametrize(
        ("headers", "content"),
        [
            ({"Content-Type": "application/json"}, b"{}"),
            ({"Content-Type": "multipart/form-data"}, b"x"),
            ({"Content-Type": "multipart/form-data; boundary=a"}, b"--b\r\n\r\n"),
            ({"Content-Type": "multipart/form-data; boundary=a"}, b""),
            ({"Content-Type": "multipart/form-data; boundary=a"},
             b'--a\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 9000 + b"\r\n--a--"),
        ],
    )  # fmt: skip
    async def test_that_are_no_forms_are_refused(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path, headers: dict[str, str], content: bytes
    ) -> None:
        async with serving(clusters, registry, tmp_path, runs=False) as cluster:
            answer = await cluster.client.post("/v1/files", headers=headers, content=content)
            assert answer.status_code == 400, answer.text

    async def test_that_are_too_long_are_refused(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_upload, "FILE_BYTES_MAX", 1000)
        async with serving(clusters, registry, tmp_path, runs=False) as cluster:
            assert (await upload(cluster, b"x" * 70_000)).status_code == 413

            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(70):
                    yield b"x" * 1000

            headers = {"Content-Type": "multipart/form-data; boundary=a"}
            answer = await cluster.client.post("/v1/files", headers=headers, content=pieces())
            assert answer.status_code in (400, 413)

    async def test_that_do_not_come_leave_room_for_another_tenant(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path
    ) -> None:
        keys = {name: new_key() for name in ("greedy", "modest")}
        path, folder = tmp_path / "keys.toml", tmp_path / "files"
        path.write_text("".join(entry(key, name, frozenset({Scope.GENERATE}), None, "") for name, key in keys.items()))
        folder.mkdir()

        async def never() -> AsyncIterator[bytes]:
            yield b"--a\r\n"
            await asyncio.Event().wait()

        def send(content: AsyncIterator[bytes]) -> asyncio.Task[httpx.Response]:
            headers = {
                "Authorization": f"Bearer {keys['greedy']}",
                "Content-Type": "multipart/form-data; boundary=a",
            }
            return asyncio.create_task(cluster.client.post("/v1/files", headers=headers, content=content))

        settings = {"api_keys_file": str(path)}
        async with serving(clusters, registry, folder, runs=False, settings=settings) as cluster:
            slow = [send(never()) for _ in range(2 * UPLOADS_MAX)]
            try:
                await eventually(lambda: sum(task.done() for task in slow) == len(slow) - UPLOADS_MAX // 2, "the rest")
                refused = [task.result() for task in slow if task.done()]
                assert {answer.status_code for answer in refused} == {429}
                assert int(refused[0].headers["Retry-After"]) >= 1
                cluster.client.headers["Authorization"] = f"Bearer {keys['modest']}"
                assert (await upload(cluster, b"x")).status_code == 200
            finally:
                for task in slow:
                    task.cancel()
                await asyncio.gather(*slow, return_exceptions=True)

    async def test_that_stop_are_given_up(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_transport, "BODY_GRACE_S", 0.05)

        async def stops() -> AsyncIterator[bytes]:
            yield b'--a\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx'
            await asyncio.Event().wait()

        async with serving(clusters, registry, tmp_path, runs=False) as cluster:
            headers = {"Content-Type": "multipart/form-data; boundary=a"}
            answer = await cluster.client.post("/v1/files", headers=headers, content=stops())
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")

    async def test_take_only_so_much_of_the_disk_together(
        self, clusters: ClusterFactory, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_calls, "UPLOAD_BYTES_MAX", 1000)
        async with serving(clusters, registry, tmp_path, runs=False) as cluster:
            assert (await upload(cluster, b"x" * 2000)).status_code == 429
            for _ in range(3):
                assert (await upload(cluster, b"x" * 500)).status_code == 200

    async def test_are_shown_as_documented(self, clusters: ClusterFactory, registry: Registry, tmp_path: Path) -> None:
        async with serving(clusters, registry, tmp_path, runs=False) as cluster:
            FileObject.model_validate((await upload(cluster, b"x")).json())


async def test_pages_have_bounds(clusters: ClusterFactory, registry: Registry, tmp_path: Path) -> None:
    async with serving(clusters, registry, tmp_path, runs=False) as cluster:
        for query in ("limit=0", "limit=1001", "limit=x", "limit=²", "order=up"):
            assert (await cluster.client.get(f"/v1/files?{query}")).status_code == 400, query
        ids = [(await create(cluster, chat("a")))["id"] for _ in range(3)]
        first = (await cluster.client.get("/v1/batches?limit=2")).json()
        rest = (await cluster.client.get(f"/v1/batches?limit=2&after={first['last_id']}")).json()
        assert sorted(each["id"] for each in first["data"] + rest["data"]) == sorted(ids)
        assert (first["has_more"], rest["has_more"]) == (True, False)


async def test_without_a_place_for_files_the_error_names_the_flag(clusters: ClusterFactory) -> None:
    async with clusters.open([]) as cluster:
        for answer in (
            await cluster.client.get("/v1/files"),
            await cluster.client.post("/v1/files", content=b"x"),
            await cluster.client.post("/v1/batches", json={}),
        ):
            assert answer.status_code == 404
            assert "--batch-files" in answer.json()["error"]["message"]
