"""Callers with tokens of an identity provider at a coordinator: over HTTP and gRPC, beside API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from coordinator.access import identity_provider, tokens
from coordinator.access.api_keys import KeyRing, Scope, entry, new_key
from coordinator.access.tokens import Reason
from coordinator.service import housekeeping
from outrider.errors import Unavailable
from outrider.security.tenants import tenant_digest
from protos.outrider.v1 import generation_pb2
from tests.coordinator.conftest import ClusterFactory
from tests.coordinator.fakes import eventually
from tests.coordinator.identity_providers import NONE, LocalProvider, be_patient, bearer, local_provider
from tests.coordinator.test_responses import keeping
from tests.coordinator.test_resumption import run_of
from tests.coordinator.token_clients import ask, code_of, generate, keys_file, opened, sample, stub_of

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_event_ids": True}}
FILE = """
[tenants.search]
requests_per_minute = 3
priority_min = -2

[tenants."system:serviceaccount:ml:ranker"]
token_scopes = ["generate"]
"""


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    with local_provider() as running:
        yield running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr(housekeeping, "EVERY_S", 0.01)


async def test_keys_and_tokens_are_good_side_by_side(
    clusters: ClusterFactory, provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = keys_file(tmp_path, "")
    async with opened(clusters, provider, path) as cluster, stub_of(cluster, monkeypatch) as stub:
        for credential in (key, provider.token()):
            assert (await ask(cluster, credential)).status_code == 200
            assert (await generate(stub, credential))[-1].finished.num_output_tokens == 8
        for wrong in (None, new_key(), "a.b", provider.token() + "A"):
            answer = await ask(cluster, wrong)
            assert answer.status_code == 401
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.json()["error"]["type"] == "authentication_error"
            assert await code_of(stub, wrong) is grpc.StatusCode.UNAUTHENTICATED
        # Anthropic's clients have a header of their own.
        headers = {"X-Api-Key": provider.token()}
        assert (await cluster.client.get("/v1/models", headers=headers)).status_code == 200
        assert (await cluster.client.get("/health")).json() == {"status": "ready"}
        assert "num_target_workers" in (await cluster.client.get("/health", headers=headers)).json()


async def test_without_a_file_of_keys_only_tokens_are_good(
    clusters: ClusterFactory, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(clusters, provider) as cluster, stub_of(cluster, monkeypatch) as stub:
        assert (await ask(cluster, provider.token())).status_code == 200
        for credential in (None, new_key()):
            answer = await ask(cluster, credential)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert await code_of(stub, credential) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("changes", "told", "reason"),
    [
        ({"exp": 1}, "this token has expired", Reason.EXPIRED),
        ({"nbf": 1 << 40}, "this token is not valid yet", Reason.NOT_YET_VALID),
        ({"aud": "billing"}, "this token is not valid here", Reason.AUDIENCE),
        ({"iss": "https://login.example.com"}, "this token is not valid here", Reason.ISSUER),
        ({"sub": NONE}, "this token is not valid here", Reason.TENANT),
    ],
    ids=lambda value: value if isinstance(value, Reason) else "",
)
async def test_a_refusal_tells_the_caller_little_and_the_log_the_reason_but_not_the_token(
    clusters: ClusterFactory,
    provider: LocalProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    told: str,
    reason: Reason,
) -> None:
    token = provider.token(**changes)
    async with opened(clusters, provider) as cluster, stub_of(cluster, monkeypatch) as stub:
        answer = await ask(cluster, token)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("invalid_token", told)
        assert await code_of(stub, token) is grpc.StatusCode.UNAUTHENTICATED
        assert sample(cluster, "outrider_token_refusals_total", reason=reason.value) == 2
    lines = [line.getMessage() for line in caplog.records if "a token was refused" in line.getMessage()]
    assert len(lines) == 1  # the second one came too soon
    assert not any(part in caplog.text for part in token.split("."))


async def test_anthropics_clients_get_its_form_of_the_error(clusters: ClusterFactory, provider: LocalProvider) -> None:
    async with opened(clusters, provider) as cluster:
        answer = await cluster.client.post("/v1/messages", headers=bearer(provider.token(exp=1)))
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


class TestScopes:
    async def test_a_token_is_good_for_its_scopes_alone(
        self, clusters: ClusterFactory, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metrics = provider.token(scope="outrider:metrics")
        async with opened(clusters, provider) as cluster, stub_of(cluster, monkeypatch) as stub:
            assert (await ask(cluster, metrics)).status_code == 403
            assert await code_of(stub, metrics) is grpc.StatusCode.PERMISSION_DENIED
            assert (await cluster.client.get("/metrics", headers=bearer(metrics))).status_code == 200
            for scope in ("openid email", NONE):
                nothing = provider.token(scope=scope)
                assert (await ask(cluster, nothing)).status_code == 403
                assert await code_of(stub, nothing) is grpc.StatusCode.PERMISSION_DENIED
            refused = await cluster.client.get("/metrics", headers=bearer(provider.token()))
            assert refused.status_code == 403

    async def test_the_file_gives_scopes_to_tenants_whose_tokens_name_none(
        self, clusters: ClusterFactory, provider: LocalProvider, tmp_path: Path
    ) -> None:
        path, _ = keys_file(tmp_path, FILE)
        name = "system:serviceaccount:ml:ranker"
        async with opened(clusters, provider, path) as cluster:
            assert (await ask(cluster, provider.token(sub=name, scope=NONE))).status_code == 200
            assert (await ask(cluster, provider.token(sub=name, scope="outrider:metrics"))).status_code == 403
            assert (await ask(cluster, provider.token(sub=f"{name}2", scope=NONE))).status_code == 403


class TestTenants:
    """The tenant of a token owns what it made, as that of a key does (invariant I9)."""

    async def test_a_stream_is_resumed_by_any_token_or_key_of_its_tenant_and_by_no_other(
        self, clusters: ClusterFactory, provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, key = keys_file(tmp_path, "")
        first, second, other = (provider.token(sub=name, jti=name + str(n)) for n, name in enumerate("aab"))
        of_key = provider.token(sub="search")
        assert first != second
        async with opened(clusters, provider, path) as cluster, stub_of(cluster, monkeypatch) as stub:
            asked = ((first, second, other), (of_key, key, other), (key, of_key, second))
            for number, (credential, same, stranger) in enumerate(asked):
                answer = await ask(cluster, credential, f"r{number}", **STREAM)
                assert answer.status_code == 200
                run = run_of(answer.text)
                await cluster.service.streams.journal._flush()  # type: ignore[union-attr]

                async def resume(who: str, run: str = run, path: str = f"/v1/streams/r{number}") -> httpx.Response:
                    headers = bearer(who) | {"Last-Event-ID": f"{run}:3"}
                    return await cluster.client.get(path, headers=headers)

                resumed, stolen = await resume(same), await resume(stranger)
                assert resumed.status_code == 200
                assert (stolen.status_code, stolen.json()["error"]["code"]) == (404, "not_found")
            (begun, *_) = await generate(stub, first, request_id="r9")
            await cluster.service.streams.journal._flush()  # type: ignore[union-attr]
            point = generation_pb2.ResumePoint(num_tokens=1, has_begun=True)
            again: dict[str, Any] = {"request_id": "r9", "run": begun.run, "resume_from": [point]}
            again |= {"prompt": None, "sampling": None}
            assert (await generate(stub, second, **again))[-1].finished.num_output_tokens == 8
            assert await code_of(stub, other, **again) is grpc.StatusCode.NOT_FOUND

    async def test_a_request_cannot_name_another_tenant(
        self, clusters: ClusterFactory, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        token = provider.token(sub="search")
        async with opened(clusters, provider) as cluster, stub_of(cluster, monkeypatch) as stub:
            for user in (None, "search", "ads"):  # which OpenAI's clients fill with names of their own
                assert (await ask(cluster, token, user=user)).status_code == 200
            assert await code_of(stub, token, tenant="ads") is grpc.StatusCode.PERMISSION_DENIED
            owners = {request.owner for request in cluster.targets[0].requests}
            assert owners == {tenant_digest("search")}

    async def test_stored_responses_are_their_tenants(self, clusters: ClusterFactory, provider: LocalProvider) -> None:
        first, second, other = (provider.token(sub=name, jti=str(n)) for n, name in enumerate("aab"))
        async with opened(clusters, provider) as cluster:
            keeping(cluster)
            body = {"input": "hi", "max_output_tokens": 4}
            made = await cluster.client.post("/v1/responses", json=body, headers=bearer(first))
            assert made.status_code == 200, made.text
            path = f"/v1/responses/{made.json()['id']}"
            codes = [(await cluster.client.get(path, headers=bearer(who))).status_code for who in (second, other)]
            assert codes == [200, 404]

    async def test_limits_of_the_file_hold_for_keys_and_tokens_of_a_tenant_together(
        self, clusters: ClusterFactory, provider: LocalProvider, tmp_path: Path
    ) -> None:
        path, key = keys_file(tmp_path, FILE)
        tokens = [provider.token(sub="search", jti=str(number)) for number in range(2)]
        async with opened(clusters, provider, path) as cluster:
            codes = [(await ask(cluster, who)).status_code for who in (key, *tokens, tokens[0], key)]
            assert codes == [200, 200, 200, 429, 429]
            free = provider.token(sub="ads")  # of whom the file says nothing
            assert [(await ask(cluster, free)).status_code for _ in range(5)] == [200] * 5
            assert (await ask(cluster, free, priority=-1)).status_code == 403

    def test_a_tenant_whose_limits_may_be_lost_is_not_served_without_any(self) -> None:
        key = entry(new_key(), "a", frozenset({Scope.GENERATE}), None, "")
        sound = KeyRing.parse(key)
        assert sound.limits_of("search").requests_per_minute is None
        damaged = KeyRing.salvage(f"[tenants.search\nrequests_per_minute = 1\n{key}", sound)
        with pytest.raises(Unavailable, match="limits of this tenant"):
            damaged.limits_of("search")


class TestProvider:
    async def test_new_keys_count_without_a_restart_and_withdrawn_ones_no_more(
        self, clusters: ClusterFactory, provider: LocalProvider
    ) -> None:
        old = provider.token()
        async with opened(clusters, provider) as cluster:
            assert (await ask(cluster, old)).status_code == 200
            provider.rotate()
            await asyncio.sleep(0.03)  # the provider may be asked again
            assert (await ask(cluster, provider.token())).status_code == 200
            # Though it was remembered as valid.
            assert (await ask(cluster, old)).status_code == 401

    async def test_while_it_is_down_keys_and_known_tokens_are_good_and_the_metric_tells_it(
        self, clusters: ClusterFactory, provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, key = keys_file(tmp_path, "")
        name = "outrider_identity_provider_degraded"
        provider.status = 500
        async with opened(clusters, provider, path) as cluster, stub_of(cluster, monkeypatch) as stub:
            await eventually(lambda: sample(cluster, name) == 1, "the metric tells it", 20)
            refused = await ask(cluster, provider.token())
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) > 0
            assert await code_of(stub, provider.token()) is grpc.StatusCode.UNAVAILABLE
            assert (await ask(cluster, key)).status_code == 200
            provider.status = 200
            await eventually(lambda: sample(cluster, name) == 0, "it is up", 20)
            assert (await ask(cluster, provider.token())).status_code == 200
            provider.status = 500
            await asyncio.sleep(0.03)
            # One whose key may be there since, for all that is known.
            new = provider.token()
            provider.rotate()
            assert (await ask(cluster, provider.token())).status_code == 503
            assert (await ask(cluster, new)).status_code == 200

    async def test_garbage_does_not_hammer_it(
        self, clusters: ClusterFactory, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(identity_provider, "AGAIN_S", 10.0)
        async with opened(clusters, provider) as cluster:
            provider.kid = "unknown"
            codes = {(await ask(cluster, provider.token())).status_code for _ in range(50)}
        assert codes == {401}
        assert provider.num_looks == 1

    async def test_a_slow_one_keeps_nobody_waiting_for_long(
        self, clusters: ClusterFactory, provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(identity_provider, "WAIT_S", 0.2)
        path, key = keys_file(tmp_path, "")
        async with opened(clusters, provider, path) as cluster:
            provider.released.clear()
            await asyncio.sleep(0.03)
            known = provider.token()
            provider.rotate()
            async with asyncio.timeout(20):
                waiting = asyncio.create_task(ask(cluster, provider.token()))
                assert (await ask(cluster, key)).status_code == 200
                assert (await ask(cluster, known)).status_code == 200
                assert (await waiting).status_code == 503


async def test_a_token_that_expires_during_a_stream_does_not_end_it(
    clusters: ClusterFactory, provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(clusters, provider) as cluster:
        cluster.targets[0].step_s = 0.01
        token = provider.token(iat=NONE)
        running = asyncio.create_task(ask(cluster, token, max_tokens=100, stream=True))
        await eventually(lambda: cluster.targets[0].num_open == 1, "it streams")
        monkeypatch.setattr(tokens, "LEEWAY_S", -3600.0)  # as if time had passed
        cluster.service._callers.tokens._valid.clear()  # type: ignore[union-attr]
        refused = await ask(cluster, token)
        assert (refused.status_code, refused.json()["error"]["message"]) == (401, "this token has expired")
        assert not running.done()
        answer = await running
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
