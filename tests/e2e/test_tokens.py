"""Tokens of an identity provider at real processes, beside API keys: over HTTP, over gRPC, and in no log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.coordinator.identity_providers import AUDIENCE, LocalProvider, local_provider
from tests.e2e.secured import SecuredOptions, SecuredSystem

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[SecuredSystem, LocalProvider]]:
    with local_provider() as provider:
        options = SecuredOptions(oidc_issuer=provider.issuer, oidc_audience=AUDIENCE)
        async with SecuredSystem(options, tmp_path_factory.mktemp("logs")) as system:
            yield system, provider
            assert system.ends == []


async def ask(system: SecuredSystem, credential: str, **more: Any) -> httpx.Response:
    async with system.http(credential) as client:
        body = {"prompt": "The sky", "max_tokens": 4, "temperature": 0} | more
        return await client.post("/v1/completions", json=body)


async def code_of(system: SecuredSystem, credential: str) -> grpc.StatusCode:
    """The status of a call over gRPC."""
    request = generation_pb2.GenerationRequest(
        prompt="The sky", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=4)
    )
    async with system.channel(system.grpc_address()) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {credential}"),), timeout=TIMEOUT_S)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await call.code()


async def test_keys_and_tokens_are_good_and_those_for_other_services_are_not(
    running: tuple[SecuredSystem, LocalProvider],
) -> None:
    system, provider = running
    for credential in (system.key, provider.token()):
        answer = await ask(system, credential)
        assert answer.status_code == 200, answer.text
        assert await code_of(system, credential) is grpc.StatusCode.OK
    for wrong in (provider.token(aud="billing"), provider.token(exp=1), provider.token()[:-8] + "AAAAAAAA"):
        refused = await ask(system, wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token")
        assert refused.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        assert await code_of(system, wrong) is grpc.StatusCode.UNAUTHENTICATED
    assert (await ask(system, provider.token(scope="openid"))).status_code == 403
    assert await code_of(system, provider.token(scope="openid")) is grpc.StatusCode.PERMISSION_DENIED


async def test_files_belong_to_the_tenant_of_the_token(running: tuple[SecuredSystem, LocalProvider]) -> None:
    system, provider = running
    first, second, other = (provider.token(sub=name, jti=str(number)) for number, name in enumerate("aab"))
    async with system.http(first) as client:
        content = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
        made = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
        assert made.status_code == 200, made.text
    codes = []
    for token in (second, other):
        async with system.http(token) as client:
            codes.append((await client.get(f"/v1/files/{made.json()['id']}")).status_code)
    assert codes == [200, 404]


async def test_the_log_tells_reasons_and_holds_no_token(running: tuple[SecuredSystem, LocalProvider]) -> None:
    system, provider = running
    tokens = [provider.token(), provider.token(aud="elsewhere")]
    for token in tokens:
        await ask(system, token)
    assert 'outrider_token_refusals_total{reason="audience"}' in await system.metrics("coordinator-0")
    logs = [path.read_text(errors="replace") for path in _logs(system)]
    assert any("a token was refused: its audience is not outrider" in text for text in logs)
    for token in tokens:
        assert not any(part in text for part in token.split(".")[1:] for text in logs)


def _logs(system: SecuredSystem) -> list[Path]:
    found = [*system.log_dir.rglob("*"), *system.scratch.glob("r*/**/*.log"), *system.scratch.glob("r*/**/*.err")]
    return [path for path in found if path.is_file()]
