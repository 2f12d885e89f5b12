"""Tests that no error tells a caller of the public API the name of a part of the installation; the log has it."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import coordinator
from coordinator.access.api_keys import Scope, entry, new_key
from coordinator.api.answer.openai_response import error_body
from coordinator.api.anthropic.errors import anthropic_error
from coordinator.intake.request_limit import RequestLimit
from outrider.errors import RegistryUnavailable, StorageUnavailable, Unavailable
from protos.outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.fakes import FakeTarget
from tests.coordinator.test_request_limit import channel_to
from tests.coordinator.test_run_identity import Interrupted
from tests.coordinator.test_strangers import kinds_of_errors

ROOT = Path(coordinator.__file__).parents[1]
CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "/v1/completions": ({"prompt": "import"}, False),
    "/v1/responses": ({"input": "import"}, True),
    "/v1/messages": ({"messages": [{"role": "user", "content": "import"}], "max_tokens": 9}, True),
}
"""A body for each form of an error, and whether it asks for a stream."""
OF_PARTS = [kind for kind in kinds_of_errors() if kind.told_as is not None]


def test_every_error_about_a_part_tells_callers_of_its_kind_alone() -> None:
    assert {RegistryUnavailable, StorageUnavailable} < set(OF_PARTS)
    workers = {kind for kind in kinds_of_errors() if kind.__name__.startswith("Worker")}
    assert workers
    assert workers < set(OF_PARTS)
    for kind in OF_PARTS:
        error = kind("target-7 at 10.0.0.3:4711")
        for body in (error_body(error), anthropic_error(error, "r")):
            assert "target-7" not in json.dumps(body)
            assert kind.told_as
            assert kind.told_as in json.dumps(body)
        assert "target-7" in error.message


def test_errors_become_answers_by_what_callers_are_told() -> None:
    """Wherever the API writes an error, it writes `told`. Only the schemas read messages: of InvalidRequest, which they
    raise again with a client's own name of the field."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("coordinator/api", "coordinator/hosting")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "message" and ast.unparse(node.value).endswith("error")
        if "api/schema/" not in str(path)
    ]
    # Of a start: a configuration's, told to whoever starts the process.
    assert [each.partition(":")[0] for each in found] == [
        "coordinator/hosting/app.py",
        "coordinator/hosting/plain_process.py",
        "coordinator/hosting/ray_serve.py",
    ]


class Leaving(FakeTarget):
    async def Generate(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{context.peer()} came too late")
        yield


class Losing:
    """A cluster whose workers fail every request in one way, and a tenant of it."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self.cluster, self._key = cluster, key

    async def texts(self) -> dict[str, str]:
        """All that the tenant gets for one request of each kind, whole and streamed, over both APIs."""
        found = {}
        headers = {"Authorization": f"Bearer {self._key}"}
        for path, (body, stream) in CALLS.items():
            body = body | {"stream": stream}
            answer: httpx.Response = await self.cluster.client.post(path, json=body, headers=headers)
            found[path] = answer.text + str(answer.headers)
        async with channel_to(self.cluster, RequestLimit(9)) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            asked = generation_pb2.GenerationRequest(prompt="import")
            call = stub.Generate(asked, metadata=[("authorization", f"Bearer {self._key}")], timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            found["grpc"] = str(caught.value.details()) + str(caught.value.trailing_metadata())
        return found


def targets_of(clusters: ClusterFactory, how: str) -> list[FakeTarget]:
    match how:
        case "none is there":
            return []
        case "they die":
            return [clusters.target(dies_at=1) for _ in range(3)]
        case "they are silent":
            return [clusters.target(is_hung=True) for _ in range(3)]
        case "they fail":
            return [Interrupted([11], code=grpc.StatusCode.INTERNAL) for _ in range(3)]
        case "they leave":
            return [Leaving([11]) for _ in range(3)]
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how", ["none is there", "they die", "they are silent", "they fail", "they leave", "they are gone"]
)
async def test_no_tenant_learns_the_name_or_the_address_of_a_worker(
    clusters: ClusterFactory, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found: `target worker target-0 failed: UNAVAILABLE: ... ipv4:10.0.0.3:4711`."""
    key, path = new_key(), tmp_path / "keys.toml"
    path.write_text(entry(key, "search", frozenset({Scope.GENERATE}), None, ""))
    settings = {"api_keys_file": str(path), "quarantine_s": 0.01, "target_silence_max_s": 0.1}
    settings |= {"queue_wait_max_s": 0.5}
    targets = targets_of(clusters, "they die" if how == "they are gone" else how)
    async with clusters.open([*targets], settings=settings) as cluster:
        if how == "they are gone":  # nothing listens at their addresses
            snapshot = cluster.snapshots[0]
            gone = tuple(replace(each, address="127.0.0.1:1") for each in snapshot.targets)
            cluster.snapshots[0] = replace(snapshot, targets=gone)
        told = await Losing(cluster, key).texts()
        names = [name for each in cluster.snapshots[0].targets for name in (each.worker_id, each.address)]
    shown = {kind: name for kind, text in told.items() for name in (*names, "127.0.0.1:", "target-") if name in text}
    assert not shown, told
    assert all("target" in text for text in told.values()), told
    if names:
        assert any(name in caplog.text for name in names), "the operator knows which"


async def test_an_error_that_names_a_part_reaches_the_log(
    clusters: ClusterFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with clusters.open([]) as cluster:
        for error in (RegistryUnavailable("Redis at 10.0.0.9:6379 is away"), Unavailable("it stops")):
            cluster.service.count_failure(error)
    assert "10.0.0.9" in caplog.text
    assert "it stops" not in caplog.text
