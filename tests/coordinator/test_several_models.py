"""Several models at one coordinator: each request is served by its own, and none waits for another's."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from coordinator.access.api_keys import ANYBODY
from coordinator.api.grpc import grpc_api
from coordinator.api.http.line_calls import LineCalls
from coordinator.intake.run_identity import prompt_digest
from outrider.errors import ModelNotFound
from outrider.registry.registry import RegistryCalls
from outrider.registry.worker_record import Snapshot
from outrider.security import watched_files
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.batches.desks import a_batch
from tests.coordinator.conftest import TEXT, Cluster, ClusterFactory
from tests.coordinator.fakes import FakeDraft, FakeTarget, eventually
from tests.coordinator.test_resumption import Memory
from tests.coordinator.tiny_model import write_other_model_dir

NAMES = ("large", "small")
SAYS = {"large": "import os, sys\n", "small": TEXT}
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@dataclass
class Fleet:
    """Two models of different tokenizers, and a file that lists them."""

    folder: Path
    tokenizers: dict[str, Tokenizer]
    entries: dict[str, str] = field(default_factory=dict)
    _written_s: float = field(default_factory=lambda: time.time() - 10_000)

    @property
    def path(self) -> Path:
        return self.folder / "models.toml"

    def add(self, name: str, like: str | None = None, **fields: Any) -> None:
        """Adds a model, whose tokenizer is that of `like`."""
        values = {"name": name, "tokenizer": str(self.tokenizers[like or name].model_dir)} | fields
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self.entries[name] = "\n".join(["[[models]]", *lines])

    def write(self) -> None:
        self.path.write_text("\n".join(self.entries.values()))
        self._written_s += 10
        os.utime(self.path, (self._written_s, self._written_s))

    def script(self, name: str) -> list[int]:
        return self.tokenizers[name].encode(SAYS[name])

    def says(self, name: str, num_tokens: int) -> str:
        """The text of so many tokens."""
        script = self.script(name)
        return self.tokenizers[name].decode([script[at % len(script)] for at in range(num_tokens)])

    def target(self, name: str, model_name: str | None = None, **options: Any) -> FakeTarget:
        fingerprint = self.tokenizers[name].fingerprint
        return FakeTarget(self.script(name), model_name=model_name or name, fingerprint=fingerprint, **options)

    def draft(self, name: str, model_name: str | None = None) -> FakeDraft:
        return FakeDraft(model_name=model_name or f"{name}-draft", fingerprint=self.tokenizers[name].fingerprint)

    def targets(self, **options: Any) -> list[FakeTarget]:
        return [self.target(name, **options) for name in NAMES]

    @asynccontextmanager
    async def open(
        self,
        clusters: ClusterFactory,
        targets: list[FakeTarget],
        drafts: Sequence[FakeDraft] = (),
        registry: RegistryCalls | None = None,
        settings: dict[str, Any] | None = None,
        **record: Any,
    ) -> AsyncIterator[Cluster]:
        self.write()
        made = {"tokenizer_dir": "", "models_file": str(self.path), **(settings or {})}
        async with clusters.open(targets, list(drafts), settings=made, registry=registry, **record) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("models")
    return {name: Tokenizer(write_other_model_dir(root / name, number)) for number, name in enumerate(NAMES)}


@pytest.fixture
def fleet(tokenizers: dict[str, Tokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)
    made = Fleet(tmp_path, tokenizers)
    for name in NAMES:
        made.add(name)
    return made


async def chat(cluster: Cluster, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return await cluster.client.post("/v1/chat/completions", json={"messages": messages, **PLAIN, **body})


class TestEachRequest:
    """Every API serves a request by the model that it names."""

    async def test_is_read_and_written_with_the_tokenizer_of_its_model(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        targets = fleet.targets()
        async with fleet.open(clusters, targets) as cluster:
            for name, target in zip(NAMES, targets, strict=True):
                encode = fleet.tokenizers[name].encode
                answer = await cluster.complete(model=name, max_tokens=8)
                assert answer.json()["choices"][0]["text"] == fleet.says(name, 8)
                assert answer.json()["model"] == name
                assert list(target.requests[-1].token_ids) == encode("import")
                answer = await chat(cluster, model=name)
                assert answer.json()["choices"][0]["message"]["content"] == fleet.says(name, 8)
                assert list(target.requests[-1].token_ids) == encode("hi\n")
                answer = await cluster.complete(model=name, max_tokens=8, stream=True)
                events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
                assert "".join(each["choices"][0]["text"] for each in events if each["choices"]) == fleet.says(name, 8)
                answer = await cluster.complete(model=name, stop=[SAYS[name][6:9]])
                assert answer.json()["choices"][0]["text"] == SAYS[name][:6]
                answer = await cluster.complete(model=name, prompt=["import", "x"], max_tokens=8)
                assert [each["text"] for each in answer.json()["choices"]] == [fleet.says(name, 8)] * 2

    async def test_over_grpc_too(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        sampling = common_pb2.SamplingParams(temperature=0, top_p=1, max_tokens=8)
        async with fleet.open(clusters, fleet.targets()) as cluster:
            for name in NAMES:
                asked = generation_pb2.GenerationRequest(model=name, prompt="import", sampling=sampling)
                chunks = [chunk async for chunk in grpc_api.generate(cluster.service, asked)]
                assert "".join(chunk.text for chunk in chunks) == fleet.says(name, 8)
            listed = grpc_api.list_models(cluster.service, ANYBODY).models
            assert [(each.id, each.num_target_workers) for each in listed] == [("large", 1), ("small", 1)]

    async def test_over_the_other_apis_too(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, fleet.targets()) as cluster:
            for name in NAMES:
                message = {"model": name, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
                answer = await cluster.client.post("/v1/messages", json=message | {"temperature": 0})
                assert answer.json()["content"][0]["text"] == fleet.says(name, 8)
                del message["max_tokens"]
                answer = await cluster.client.post("/v1/messages/count_tokens", json=message)
                assert answer.json() == {"input_tokens": len(fleet.tokenizers[name].encode("hi\n"))}
                body = {"model": name, "input": "hi", "max_output_tokens": 8, "temperature": 0}
                answer = await cluster.client.post("/v1/responses", json=body)
                assert answer.json()["output"][0]["content"][0]["text"] == fleet.says(name, 8)

    async def test_in_a_batch_too(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, fleet.targets()) as cluster:
            lines = LineCalls(cluster.service)
            for name in NAMES:
                body = json.dumps({"model": name, "prompt": "import", **PLAIN}).encode()
                lines.check_body(a_batch(), "/v1/completions", body)
                asked = lines._read("/v1/completions", body, "r")
                assert asked.inputs[0].model == name
            with pytest.raises(ModelNotFound):
                lines.check_body(a_batch(), "/v1/completions", body.replace(b"small", b"tiny"))

    async def test_follows_a_grammar_of_its_vocabulary(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        targets = fleet.targets()
        async with fleet.open(clusters, targets) as cluster:
            for name in NAMES:
                answer = await cluster.complete(model=name, structured_outputs={"regex": "[ab]{3}"})
                assert answer.status_code == 200
            table = cluster.service.environment.models.current()
            compilers = [table.by_name[name].grammars.compilers[4096] for name in NAMES]
        assert compilers[0] is not compilers[1]
        assert [each._tokenizer_json.parent.name for each in compilers] == list(NAMES)

    async def test_has_the_template_parsers_and_deadline_of_its_model(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        (fleet.folder / "chat.jinja").write_text("{{ messages[-1]['content'] }}?{{ reasoning_effort }}<think>")
        fleet.add("small", chat_template="chat.jinja", reasoning_parser="deepseek_r1", request_timeout=7)
        targets = fleet.targets()
        async with fleet.open(clusters, targets) as cluster:
            answers = {name: await chat(cluster, model=name, reasoning_effort="low") for name in NAMES}
        assert list(targets[0].requests[0].token_ids) == fleet.tokenizers["large"].encode("hi\n")
        assert list(targets[1].requests[0].token_ids) == fleet.tokenizers["small"].encode("hi?low<think>")
        assert answers["large"].headers["X-Outrider-Ignored"] == "reasoning_effort"
        assert "X-Outrider-Ignored" not in answers["small"].headers
        assert answers["small"].json()["choices"][0]["message"]["reasoning"] == fleet.says("small", 8)
        assert not answers["large"].json()["choices"][0]["message"].get("reasoning")
        assert targets[1].requests[0].deadline_ms <= 7000 < targets[0].requests[0].deadline_ms

    async def test_may_name_an_alias(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        fleet.add("small", aliases=["mini"])
        async with fleet.open(clusters, fleet.targets()) as cluster:
            answer = await cluster.complete(model="mini", max_tokens=8)
            assert answer.json()["model"] == "small"
            assert answer.json()["choices"][0]["text"] == fleet.says("small", 8)

    async def test_must_name_one_of_them(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, fleet.targets()) as cluster:
            for path, body in (
                ("/v1/completions", {"prompt": "x"}),
                ("/tokenize", {"prompt": "x"}),
                ("/detokenize", {"tokens": [1]}),
            ):
                answer = await cluster.client.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
                assert "there are several: large, small" in answer.json()["error"]["message"]
                answer = await cluster.client.post(path, json=body | {"model": "tiny"})
                assert answer.status_code == 404
                assert "there is large, small" in answer.json()["error"]["message"]

    async def test_may_ask_for_token_ids_of_its_model(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, fleet.targets()) as cluster:
            for name in NAMES:
                token_ids = fleet.tokenizers[name].encode("import os")
                answer = await cluster.client.post("/tokenize", json={"model": name, "prompt": "import os"})
                assert answer.json()["tokens"] == token_ids
                answer = await cluster.client.post("/detokenize", json={"model": name, "tokens": token_ids})
                assert answer.json()["prompt"] == "import os"

    async def test_is_counted_under_its_model(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, fleet.targets()) as cluster:
            for name, num in zip(NAMES, (1, 3), strict=True):
                for _ in range(num):
                    await cluster.complete(model=name, max_tokens=8)
            metrics = cluster.service.environment.metrics.registry
            for name, num in zip(NAMES, (1, 3), strict=True):
                labels = {"model_name": name, "engine": "coordinator"}
                assert metrics.get_sample_value("outrider_generation_tokens_total", labels) == 8 * num
                assert metrics.get_sample_value("outrider_e2e_request_latency_seconds_count", labels) == num


class TestStrangers:
    """No model's requests wait for another model (invariant I10)."""

    async def test_a_model_without_targets_is_unavailable_alone(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, [fleet.target("large")]) as cluster:
            refused = await cluster.complete(model="small")
            assert refused.status_code == 503
            assert "no target worker of small is live" in refused.json()["error"]["message"]
            answer = await cluster.complete(model="large", max_tokens=8)
            assert answer.json()["choices"][0]["text"] == fleet.says("large", 8)
            listed = (await cluster.client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["large"]

    async def test_a_target_of_another_tokenizer_is_not_used_and_the_reason_is_told(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        async with fleet.open(clusters, [fleet.target("large"), fleet.target("large", "small")]) as cluster:
            refused = await cluster.complete(model="small")
            health = (await cluster.client.get("/health")).json()
        assert refused.status_code == 503
        (excluded,) = health["excluded_workers"]
        for name in NAMES:
            assert fleet.tokenizers[name].fingerprint in excluded["reason"]
        assert excluded["reason"] in refused.json()["error"]["message"]

    async def test_a_full_model_holds_up_no_other(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        may_go = asyncio.Event()
        targets = fleet.targets()
        targets[0].may_step = lambda num_tokens: may_go.is_set()
        settings = {"requests_max": 12}
        one_slot: dict[str, Any] = {"max_num_seqs": 1, "max_num_waiting": 0}
        async with fleet.open(clusters, targets, settings=settings, **one_slot) as cluster:
            held = [asyncio.create_task(cluster.complete(model="large")) for _ in range(20)]
            await eventually(lambda: cluster.service.num_active == 9, "three of twelve are kept for the other")
            async with asyncio.timeout(2):
                for _ in range(3):
                    answer = await cluster.complete(model="small", max_tokens=8)
                    assert answer.json()["choices"][0]["text"] == fleet.says("small", 8)
            may_go.set()
            answers = await asyncio.gather(*held)
        assert sorted({answer.status_code for answer in answers}) == [200, 429]
        assert sum(answer.status_code == 200 for answer in answers) == 9

    async def test_draft_workers_hint_at_the_models_of_their_tokenizer_and_list(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        """`larger` has the tokenizer of `large`, and a draft model of its own beside a shared one."""
        fleet.add("large", drafts=["large-draft"])
        fleet.add("larger", like="large", drafts=["larger-draft", "large-draft"])
        drafts = [fleet.draft("large"), fleet.draft("large", "larger-draft"), fleet.draft("small")]
        targets = [fleet.target("large"), fleet.target("large", "larger"), fleet.target("small")]
        for target in targets:
            target.may_step = lambda num_tokens: (
                sum(len(each.requests) for each in drafts) == sum(len(each.requests) for each in targets)
            )
        async with fleet.open(clusters, targets, drafts) as cluster:
            for name in ("large", "larger", "small") * 6:
                assert (await cluster.complete(model=name, max_tokens=4)).status_code == 200
            listed = (await cluster.client.get("/v1/models")).json()["data"]
        assert {each["id"]: each["num_draft_workers"] for each in listed} == {"large": 1, "larger": 2, "small": 1}
        sessions = {
            target.model_name: {request.session_id for request in target.requests} for target in targets
        }  # fmt: skip
        hinted = [
            {name for name, ids in sessions.items() if {each.session_id for each in draft.requests} & ids}
            for draft in drafts
        ]
        assert hinted[0] >= {"large"}
        assert hinted[0] <= {"large", "larger"}
        assert hinted[1] == {"larger"}
        assert hinted[2] == {"small"}

    async def test_a_poisonous_prompt_of_one_model_is_served_by_another(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        """The two have one tokenizer, so the token ids are the same."""
        fleet.add("larger", like="large")
        targets = [fleet.target("large"), fleet.target("large", "larger")]
        async with fleet.open(clusters, targets) as cluster:
            environment = cluster.service.environment
            digest = prompt_digest(None, "large", fleet.tokenizers["large"].encode("import"), None)
            environment.losses.poison.convict(digest, environment.now_s())
            answers = [await cluster.complete(model=name, max_tokens=8) for name in ("large", "larger")]
        assert [answer.status_code for answer in answers] == [503, 200]
        assert digest in answers[0].json()["error"]["message"]


class TestChanges:
    """Models come and go while others serve."""

    async def listed(self, cluster: Cluster, *names: str) -> None:
        await eventually(
            lambda: sorted(cluster.service.environment.models.current().by_name) == sorted(names),
            f"the models are {names}",
        )

    async def test_an_added_model_is_served(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        small = fleet.entries.pop("small")
        async with fleet.open(clusters, fleet.targets()) as cluster:
            assert (await cluster.complete(model="small")).status_code == 404
            assert len((await cluster.client.get("/health")).json()["excluded_workers"]) == 1
            fleet.entries["small"] = small
            fleet.write()
            await self.listed(cluster, *NAMES)
            answer = await cluster.complete(model="small", max_tokens=8)
            assert answer.json()["choices"][0]["text"] == fleet.says("small", 8)
            assert (await cluster.client.get("/health")).json()["excluded_workers"] == []

    async def test_a_removed_model_finishes_what_runs_and_waits_even_if_a_target_dies(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        may_go = asyncio.Event()
        mortal = fleet.target("small", dies_at=5)
        targets = [fleet.target("large"), mortal]
        mortal.may_step = lambda num_tokens: num_tokens < 3 or may_go.is_set()
        one_slot: dict[str, Any] = {"max_num_seqs": 1, "max_num_waiting": 0}
        async with fleet.open(clusters, targets, **one_slot) as cluster:
            running = asyncio.create_task(cluster.complete(model="small", max_tokens=9))
            await eventually(lambda: mortal.num_open == 1, "it runs")
            waiting = asyncio.create_task(cluster.complete(model="small", max_tokens=9))
            await eventually(lambda: cluster.service.environment.placement.admission.num_waiting == 1, "one waits")
            del fleet.entries["small"]
            fleet.write()
            await self.listed(cluster, "large")
            refused = await cluster.complete(model="small")
            assert refused.status_code == 404
            assert (await cluster.complete(model="large", max_tokens=8)).status_code == 200
            mortal.dies_at, heir = 5, fleet.target("small")
            async with clusters.open([heir]) as other:  # a process that takes over
                (record,) = other.snapshots[0].targets
                before = cluster.snapshots[0]
                cluster.snapshots[0] = Snapshot((*before.targets, replace(record, worker_id="heir")), ())
                may_go.set()
                answers = await asyncio.gather(running, waiting)
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [fleet.says("small", 9)] * 2
        assert heir.requests

    async def test_a_model_that_changes_its_tokenizer_keeps_the_old_one_for_what_runs(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        may_go = asyncio.Event()
        targets = fleet.targets()
        targets[1].may_step = lambda num_tokens: num_tokens < 3 or may_go.is_set()
        async with fleet.open(clusters, targets) as cluster:
            running = asyncio.create_task(cluster.complete(model="small", max_tokens=9))
            await eventually(lambda: targets[1].num_open == 1, "it runs")
            before = cluster.service.environment.models.current()
            fleet.add("small", like="large")
            fleet.write()
            await eventually(lambda: cluster.service.environment.models.current() is not before, "it has changed")
            refused = await cluster.complete(model="small")
            assert refused.status_code == 503
            may_go.set()
            assert (await running).json()["choices"][0]["text"] == fleet.says("small", 9)

    async def test_a_wrong_file_changes_nothing_and_shows(self, clusters: ClusterFactory, fleet: Fleet) -> None:
        async with fleet.open(clusters, fleet.targets()) as cluster:
            fleet.entries["none"] = f'[[models]]\nname = "none"\ntokenizer = "{fleet.folder}/none"'
            fleet.write()
            models = cluster.service.environment.models
            await eventually(lambda: models.refusal() is not None, "it is refused")
            health = (await cluster.client.get("/health")).json()
            assert "model none" in health["refused_models_file"]
            assert health["models"] == list(NAMES)
            await cluster.service._housekeeping()._once()
            text = generate_latest(cluster.service.environment.metrics.registry).decode()
            assert "outrider_models_file_degraded 1.0" in text
            for name in NAMES:
                answer = await cluster.complete(model=name, max_tokens=8)
                assert answer.json()["choices"][0]["text"] == fleet.says(name, 8)
            del fleet.entries["none"]
            fleet.write()
            await eventually(lambda: models.refusal() is None, "it is right again")
            assert (await cluster.client.get("/health")).json()["refused_models_file"] is None

    async def test_a_stream_is_resumed_with_the_model_that_it_began_with(
        self, clusters: ClusterFactory, fleet: Fleet
    ) -> None:
        memory: Any = Memory()
        body = {"model": "small", "prompt": "import", "stream": True, "return_token_ids": True}
        body |= {"stream_options": {"include_event_ids": True}}
        headers = {"X-Request-Id": "r1"}
        async with fleet.open(clusters, fleet.targets(step_s=0.01), registry=memory) as cluster:
            first = await cluster.client.post("/v1/completions", json=body | PLAIN, headers=headers)
            ids = [line[4:] for line in first.text.splitlines() if line.startswith("id: ")]
            resumed = await cluster.client.get("/v1/streams/r1", headers={"Last-Event-ID": ids[2]})
            assert resumed.status_code == 200
            texts = [
                "".join(
                    choice["text"]
                    for line in answer.text.splitlines()
                    if line.startswith("data: {")
                    for choice in json.loads(line[6:])["choices"]
                )
                for answer in (first, resumed)
            ]
            assert texts[0] == fleet.says("small", 8)
            assert texts[0].endswith(texts[1])
            assert 0 < len(texts[1]) < len(texts[0])
            other = await cluster.client.post(
                "/v1/completions", json=body | PLAIN | {"model": "large"}, headers=headers | {"Last-Event-ID": ids[2]}
            )
            assert other.status_code == 409
