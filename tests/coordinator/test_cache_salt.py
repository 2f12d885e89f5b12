"""Tests of which prompts share KV blocks: those of one tenant, or of all keys that permit sharing, and of these only
prompts with the same salt."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from coordinator.access.api_keys import ANYBODY, Caller, Scope, TenantLimits, entry, new_key
from coordinator.api.grpc import grpc_api
from coordinator.intake.cache_salt import cache_salt
from coordinator.intake.generation_request import Origin
from coordinator.placement.routing import prefix_key
from outrider.engine.kv.prefix_cache import CACHE_SALT_CHARS_MAX
from outrider.errors import InvalidRequest
from outrider.security.tenants import tenant_digest
from protos.outrider.v1 import common_pb2, generation_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import FakeDraft, eventually
from tests.coordinator.test_sequence_runner import once_attached


def tenant(name: str, *, shares_prefixes: bool = False) -> Caller:
    return Caller(name, frozenset({Scope.GENERATE}), TenantLimits(), shares_prefixes)


def test_tenants_share_with_nobody_else_whatever_they_ask_for() -> None:
    names = ["search", "ads", "s", "earch", "searc", "", "common", "\ud800"]
    asked = ["", "search", "h", "hads", "ads", "\ud800", "x" * 256]
    salts = [cache_salt(tenant(name), salt) for name in names if name for salt in asked]
    salts += [cache_salt(ANYBODY, salt) for salt in asked]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) <= CACHE_SALT_CHARS_MAX for salt in salts)


def test_salts_are_the_same_at_every_replica_and_after_every_restart() -> None:
    assert cache_salt(tenant("search")) == "5e8a2d53c907715e56d9586b1c49d710"
    assert cache_salt(tenant("search"), "x") == "89f4419ce7cdaf4accf98a69c03a0c0e"


def test_without_keys_all_share_and_so_do_keys_that_say_so() -> None:
    assert cache_salt(ANYBODY) == ""
    sharing = [tenant("search", shares_prefixes=True), tenant("ads", shares_prefixes=True)]
    assert {cache_salt(each) for each in sharing} == {""}
    assert len({cache_salt(each, "x") for each in (*sharing, ANYBODY)}) == 1
    assert cache_salt(sharing[0], "x") != cache_salt(sharing[0])


def test_prompts_go_to_the_target_that_has_their_salts_blocks() -> None:
    prompt = list(range(64))
    keys = {prefix_key(prompt, salt) for salt in ("", "a", "b")}
    assert len(keys) == 3
    assert prefix_key(prompt, "a") == prefix_key([*prompt, 1, 2], "a")
    assert prefix_key(prompt[:31], "a") is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_both_workers_are_told_the_salt_of_the_callers_tenant(
    clusters: ClusterFactory, tmp_path: Path, path: str
) -> None:
    keys = {name: new_key() for name in ("search", "ads", "mail", "news")}
    (tmp_path / "keys.toml").write_text("\n".join(
        entry(key, name, frozenset({Scope.GENERATE}), None, "", shares_prefixes=name in ("mail", "news"))
        for name, key in keys.items()
    ))  # fmt: skip
    settings = {"api_keys_file": str(tmp_path / "keys.toml")}
    prompt: dict[str, Any] = {"prompt": "import"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "import"}]}
    found: dict[tuple[str, str | None], str] = {}
    for name, salt in itertools.product(keys, (None, "mine")):
        draft = FakeDraft()
        target = clusters.target(may_step=once_attached(draft))
        async with clusters.open([target], [draft], settings=settings) as cluster:
            body = {**prompt, "temperature": 0, "max_tokens": 4} | ({} if salt is None else {"cache_salt": salt})
            headers = {"Authorization": f"Bearer {keys[name]}"}
            answer = await cluster.client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            await eventually(lambda draft=draft: len(draft.requests) == 1, "a draft worker follows")  # type: ignore[misc]
            assert draft.requests[0].cache_salt == target.requests[0].cache_salt
            # Whatever they share, and whatever salts one names, each is one owner.
            assert draft.requests[0].owner == target.requests[0].owner == tenant_digest(name)
            found[name, salt] = target.requests[0].cache_salt
    assert found["mail", None] == found["news", None] == ""
    assert found["mail", "mine"] == found["news", "mine"]
    private = [found[name, salt] for name in ("search", "ads") for salt in (None, "mine")]
    assert len({*private, "", found["mail", "mine"]}) == 6


async def test_a_salt_over_grpc_is_the_same_as_over_http(clusters: ClusterFactory) -> None:
    target = clusters.target()
    async with clusters.open([target]) as cluster:
        await cluster.complete(cache_salt="mine", user="not an identity")
        request = generation_pb2.GenerationRequest(
            prompt="import", cache_salt="mine", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=4)
        )
        async for _ in grpc_api.generate(cluster.service, request):
            pass
        await cluster.complete(user="not an identity")
    salts = [each.cache_salt for each in target.requests]
    assert salts == [cache_salt(ANYBODY, "mine")] * 2 + [""]


async def test_all_sequences_of_a_request_and_their_replays_have_its_salt(clusters: ClusterFactory) -> None:
    dying, target = clusters.target(dies_at=3), clusters.target()
    async with clusters.open([dying, target]) as cluster:
        for _ in range(50):  # which target comes first is drawn
            assert (await cluster.complete(cache_salt="mine", n=3)).status_code == 200
            if dying.num_died:
                break
    requests = [*dying.requests, *target.requests]
    assert any(len(each.token_ids) > each.num_prompt_tokens for each in requests)
    assert {each.cache_salt for each in requests} == {cache_salt(ANYBODY, "mine")}


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["a"]])
async def test_a_salt_that_is_none_is_refused_by_name(clusters: ClusterFactory, salt: Any) -> None:
    async with clusters.open([clusters.target()]) as cluster:
        answer = await cluster.complete(cache_salt=salt)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
        request = generation_pb2.GenerationRequest(prompt="import", cache_salt="x" * 257)
        with pytest.raises(InvalidRequest, match="cache_salt"):
            await cluster.service.prepare(grpc_api.read_request(request, Origin()))
