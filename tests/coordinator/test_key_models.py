"""A key that names its models: all others do not exist for it, whatever the way to them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.access.api_keys import KeyFile, KeyRing, Scope, entry, new_key
from coordinator.api.grpc.grpc_calls import GrpcCalls
from coordinator.api.http.line_calls import LineCalls
from coordinator.batches.batch import Batch
from coordinator.batches.batch_desk import BatchDesk
from outrider.errors import ModelNotFound, NotFound
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import Cluster, ClusterFactory
from tests.coordinator.test_responses import keeping
from tests.coordinator.test_resumption import Memory
from tests.coordinator.test_several_models import PLAIN, Fleet, fleet, tokenizers

__all__ = ["fleet", "tokenizers"]
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Door:
    """Two models, and keys of one tenant."""

    cluster: Cluster
    keys: dict[str, str]  # by what they are for
    key_file: Path

    async def send(self, key: str, path: str, body: Any = None, method: str = "POST", **headers: str) -> httpx.Response:
        """An answer to a call with this key."""
        told = {"Authorization": f"Bearer {self.keys[key]}"} | headers
        return await self.cluster.client.request(method, path, json=body, headers=told)

    @property
    def num_asked(self) -> list[int]:
        """Requests that each target has received."""
        return [len(target.requests) for target in self.cluster.targets]


@asynccontextmanager
async def door(
    clusters: ClusterFactory,
    fleet: Fleet,
    models: Sequence[str] = ("small",),
    *,
    served: Sequence[str] = ("small", "large"),
    registry: Any = None,
) -> AsyncIterator[Door]:
    keys = {"some": new_key(), "all": new_key()}
    path = fleet.folder / "keys.toml"
    scopes = frozenset({Scope.GENERATE})
    path.write_text(
        entry(keys["some"], "search", scopes, None, "", models=models) + entry(keys["all"], "search", scopes, None, "")
    )
    for name, alias in (("small", "mini"), ("large", "maxi")):
        if name in served:
            fleet.add(name, aliases=[alias])
    targets = [fleet.target(name) for name in sorted(served)]
    settings = {"api_keys_file": str(path)}
    async with fleet.open(clusters, targets, settings=settings, registry=registry) as cluster:
        yield Door(cluster, keys, path)


CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "import", **PLAIN},
    "/v1/chat/completions": {"messages": MESSAGES, **PLAIN},
    "/v1/responses": {"input": "hi", "temperature": 0, "max_output_tokens": 8},
    "/v1/messages": {"messages": MESSAGES, **PLAIN},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "import"},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("name", ["large", "maxi"])
async def test_another_model_is_as_one_that_does_not_exist(
    clusters: ClusterFactory, fleet: Fleet, path: str, name: str
) -> None:
    async with door(clusters, fleet) as one:
        refused, unknown = [await one.send("some", path, CALLS[path] | {"model": each}) for each in (name, "none")]
        assert refused.status_code == unknown.status_code == 404
        assert told(refused).replace(name, "none") == told(unknown)
        assert "does not exist or you do not have access to it; there is small" in refused.text
        if not path.startswith("/v1/messages"):
            assert refused.json()["error"]["code"] == "model_not_found"
        assert one.num_asked == [0, 0]
        for own in ("small", "mini", *([] if path.startswith("/v1/messages") else [""])):  # its only one
            assert (await one.send("some", path, CALLS[path] | {"model": own})).status_code == 200
        assert (await one.send("all", path, CALLS[path] | {"model": name})).status_code == 200


async def test_a_model_in_the_address_changes_nothing(clusters: ClusterFactory, fleet: Fleet) -> None:
    """LiteLLM checked the name in the body and served the one in the address (its issue 41810)."""
    async with door(clusters, fleet) as one:
        answer = await one.send("some", "/v1/completions?model=large", CALLS["/v1/completions"] | {"model": "small"})
        assert answer.json()["model"] == "small"
        assert one.num_asked == [0, 1]


def told(answer: httpx.Response) -> str:
    """An error's body without what every answer has of its own."""
    return json.dumps({name: value for name, value in answer.json().items() if name != "request_id"})


async def test_lists_have_its_models_alone(clusters: ClusterFactory, fleet: Fleet) -> None:
    async with door(clusters, fleet) as one:
        for key, names in (("some", ["small"]), ("all", ["large", "small"])):
            listed = (await one.send(key, "/v1/models", method="GET")).json()["data"]
            assert [each["id"] for each in listed] == names
        assert (await one.send("some", "/v1/models/small", method="GET")).status_code == 200
        assert (await one.send("some", "/v1/models/large", method="GET")).status_code == 404
        health = (await one.send("some", "/health", method="GET")).json()
        assert health == {"status": "ready"}
        assert (await one.send("all", "/health", method="GET")).json()["models"] == ["large", "small"]


async def test_the_same_over_grpc(clusters: ClusterFactory, fleet: Fleet) -> None:
    sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=8)
    async with door(clusters, fleet) as one:
        calls = GrpcCalls(one.cluster.service)
        metadata = (("authorization", f"Bearer {one.keys['some']}"),)
        assert [each.id for each in (await calls.list_models(metadata)).models] == ["small"]
        asked = generation_pb2.GenerationRequest(model="large", prompt="import", sampling=sampling)
        with pytest.raises(ModelNotFound, match="you do not have access to it") as refusal:
            _ = [chunk async for chunk in await calls.generate(asked, metadata)]
        assert refusal.value.grpc_code == "NOT_FOUND"
        asked = generation_pb2.GenerationRequest(model="mini", prompt="import", sampling=sampling)
        assert [chunk async for chunk in await calls.generate(asked, metadata)]
        assert one.num_asked == [0, 1]


class Created:
    """The parts of a journal and of files that creating a batch needs."""

    purpose = "batch"

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}

    async def create(self, batch: Batch) -> None:
        self.fields = batch.to_fields()

    async def get(self, *_: object) -> Created:
        return self

    async def now_s(self) -> float:
        return 1e9


def room_for(model: str, num_sequences: int) -> nullcontext[None]:
    """There is room for every line."""
    return nullcontext()


async def test_a_batch_line_reaches_no_other(clusters: ClusterFactory, fleet: Fleet) -> None:
    """The key that created the batch decides, not the one that runs its lines, of which there is none."""
    async with door(clusters, fleet) as one:
        lines, created = LineCalls(one.cluster.service), Created()
        desk = BatchDesk(created, created, ["/v1/completions"])  # type: ignore[arg-type]
        for key, may_ask in (("some", False), ("all", True)):
            caller = await one.cluster.service.authenticate(f"Bearer {one.keys[key]}", Scope.GENERATE)
            wanted: dict[str, Any] = {"metadata": None, "output_life_s": None}
            await desk.create(caller, input_file_id="f", endpoint="/v1/completions", window="24h", **wanted)
            batch = Batch.from_fields(created.fields)
            body = json.dumps({"model": "maxi", "prompt": "import", **PLAIN}).encode()
            if may_ask:
                lines.check_body(batch, "/v1/completions", body)
                assert (await lines.run(batch, "/v1/completions", body, "r", room_for)).status == 200
                assert "models" not in created.fields["about"], "replicas of an older release read it, too"
                continue
            with pytest.raises(ModelNotFound) as refusal:
                await lines.run(batch, "/v1/completions", body, "r", room_for)
            assert lines.failure(refusal.value, "r").status == 404
            # The check of its file has refused it, and tells no more.
            for name in (b"maxi", b"large", b"nope"):
                with pytest.raises(ModelNotFound, match=r"or you do not have access to it; there is small$"):
                    lines.check_body(batch, "/v1/completions", body.replace(b"maxi", name))
            own = body.replace(b"maxi", b"small")
            lines.check_body(batch, "/v1/completions", own)
            assert (await lines.run(batch, "/v1/completions", own, "r", room_for)).status == 200


async def test_a_stored_response_of_another_model_is_as_one_that_is_not_kept(
    clusters: ClusterFactory, fleet: Fleet
) -> None:
    async with door(clusters, fleet) as one:
        keeping(one.cluster)
        asked = CALLS["/v1/responses"]
        for name in ("large", "small"):
            made = await one.send("all", "/v1/responses", asked | {"model": name}, **{"X-Request-Id": name})
            assert made.status_code == 200
        path = "/v1/responses"
        for key, name, is_there in (("some", "large", False), ("some", "small", True), ("all", "large", True)):
            referring = asked | {"model": "small", "previous_response_id": f"resp_{name}"}
            assert (await one.send(key, path, referring)).status_code == (200 if is_there else 400)
            (item,) = (await one.send("all", f"{path}/resp_{name}", method="GET")).json()["output"]
            naming = asked | {"model": "small", "input": [{"type": "item_reference", "id": item["id"]}]}
            assert (await one.send(key, path, naming)).status_code == (200 if is_there else 400)
            assert (await one.send(key, f"{path}/resp_{name}", method="GET")).status_code == (200 if is_there else 404)
        # A conversation goes on with the model that the request names.
        other = asked | {"model": "large", "previous_response_id": "resp_small"}
        assert (await one.send("some", path, other)).status_code == 404
        assert (await one.send("some", f"{path}/resp_large", method="DELETE")).status_code == 404
        assert (await one.send("all", f"{path}/resp_large", method="DELETE")).status_code == 200


async def test_a_stream_of_another_model_is_as_one_that_does_not_exist(clusters: ClusterFactory, fleet: Fleet) -> None:
    memory: Any = Memory()
    body = CALLS["/v1/completions"] | {"model": "large", "stream": True}
    body |= {"stream_options": {"include_event_ids": True}}
    async with door(clusters, fleet, registry=memory) as one:
        await one.send("all", "/v1/completions", body, **{"X-Request-Id": "r1"})
        service = one.cluster.service
        asked = generation_pb2.GenerationRequest(
            model="large", prompt="import", request_id="g1", sampling=common_pb2.SamplingParams(max_tokens=8)
        )
        calls = GrpcCalls(service)
        by_key = {key: (("authorization", f"Bearer {one.keys[key]}"),) for key in one.keys}
        (first, *_) = [chunk async for chunk in await calls.generate(asked, by_key["all"])]
        assert service.streams.journal is not None
        await service.streams.journal._flush()
        found = [await one.send("some", f"/v1/streams/{each}", method="GET") for each in ("r1", "none")]
        assert [answer.status_code for answer in found] == [404, 404]
        assert told(found[0]).replace("r1", "none") == told(found[1])
        assert (await one.send("all", "/v1/streams/r1", method="GET")).status_code == 200
        again = generation_pb2.GenerationRequest(
            request_id="g1", run=first.run, resume_from=[generation_pb2.ResumePoint(num_tokens=1)]
        )
        with pytest.raises(NotFound, match="there is no stream g1 to resume"):
            _ = [chunk async for chunk in await calls.generate(again, by_key["some"])]
        assert [chunk async for chunk in await calls.generate(again, by_key["all"])]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
async def test_the_only_model_is_not_meant_by_a_key_that_may_not_use_it(
    clusters: ClusterFactory, fleet: Fleet, path: str
) -> None:
    """Neither by one whose model has been retired."""
    del fleet.entries["small"]
    async with door(clusters, fleet, ["retired"], served=["large"]) as one:
        answer = await one.send("some", path, CALLS[path])
        assert answer.status_code == 503
        assert "no target worker of your models is live" in answer.text
        assert (await one.send("all", path, CALLS[path])).status_code == 200


async def test_of_several_models_of_a_key_one_must_be_named(clusters: ClusterFactory, fleet: Fleet) -> None:
    async with door(clusters, fleet, ["small", "large", "gone"]) as one:
        for path in ("/v1/completions", "/tokenize"):
            answer = await one.send("some", path, CALLS[path])
            assert answer.status_code == 400
            assert "model is required" in answer.text
    async with door(clusters, fleet, ["gone"]) as one:
        for name in ("small", "gone"):
            for path in ("/v1/completions", "/tokenize"):
                assert (await one.send("some", path, CALLS[path] | {"model": name})).status_code == 404
        answer = await one.send("some", "/v1/completions", CALLS["/v1/completions"])
        assert answer.status_code == 503
        assert "small" not in answer.text


@pytest.mark.parametrize("line", ['models = "small"', "models = []", 'models = [""]', "models = [1]"])
def test_models_that_cannot_be_read_close_the_key(tmp_path: Path, line: str) -> None:
    """They open it for no others."""
    path, key, other = tmp_path / "keys.toml", new_key(), new_key()
    scopes = frozenset({Scope.GENERATE})
    good = entry(key, "search", scopes, None, "", models=["small"]) + entry(other, "search", scopes, None, "")
    path.write_text(good)
    assert KeyFile(path).authenticate(f"Bearer {key}").models == frozenset({"small"})
    before = KeyRing.parse(good)
    after = KeyRing.salvage(good.replace('models = ["small"]', line), before)
    assert len(after) == 1
    assert after.damage
