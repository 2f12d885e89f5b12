"""`--require-client-certificates`: at a coordinator that wants one of every client, a key alone opens nothing."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import AUTHORITY, CERTIFICATE, PRIVATE_KEY, Role
from protos.outrider.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.secured import SecuredOptions, SecuredSystem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,  # another start of a coordinator
    pytest.mark.asyncio(loop_scope="module"),
]

TIMEOUT_S = 10.0
STRANGERS = ["no certificate", "of another authority", "of a day that is over"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredSystem]:
    options = SecuredOptions(num_drafts=0, needs_client_certificates=True)
    async with SecuredSystem(options, tmp_path_factory.mktemp("logs")) as running:
        yield running
        assert running.ends == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, system: SecuredSystem) -> dict[str, Path]:
    """Certificates that open nothing, and the one that does."""
    scratch = tmp_path_factory.mktemp("certificates")
    day = datetime.timedelta(days=1)
    CertificateAuthority.make().issue(scratch / "stranger", Role.CLIENT, valid_for=day)
    week_ago = datetime.datetime.now(datetime.UTC) - 7 * day
    system.authority.issue(scratch / "over", Role.CLIENT, valid_for=day, now=week_ago)
    return {
        "of another authority": scratch / "stranger",
        "of a day that is over": scratch / "over",
        "ours": system.folder(Role.CLIENT),
    }


def http(system: SecuredSystem, folder: Path | None, key: str | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(system.certificates / AUTHORITY))
    if folder is not None:
        context.load_cert_chain(folder / CERTIFICATE, folder / PRIVATE_KEY)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=system.url(), headers=headers, verify=context, timeout=TIMEOUT_S)


async def grpc_code(system: SecuredSystem, folder: Path | None, key: str | None) -> grpc.StatusCode:
    """The gRPC status of a request for four tokens."""
    names = (PRIVATE_KEY, CERTIFICATE)
    own = (None, None) if folder is None else [(folder / name).read_bytes() for name in names]
    credentials = grpc.ssl_channel_credentials((system.certificates / AUTHORITY).read_bytes(), *own)
    async with grpc.aio.secure_channel(system.grpc_address(), credentials) as channel:
        request = generation_pb2.GenerationRequest(
            prompt="One", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=4)
        )
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        call = generation_pb2_grpc.GenerationStub(channel).Generate(request, metadata=metadata, timeout=TIMEOUT_S)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_with_a_certificate_and_a_key_one_is_served(system: SecuredSystem, folders: dict[str, Path]) -> None:
    async with http(system, folders["ours"], system.key) as client:
        answer = await client.post("/v1/completions", json={"prompt": "One", "max_tokens": 4})
        assert answer.status_code == 200, answer.text
    assert await grpc_code(system, folders["ours"], system.key) is grpc.StatusCode.OK


async def test_a_certificate_does_not_stand_for_a_key(system: SecuredSystem, folders: dict[str, Path]) -> None:
    async with http(system, folders["ours"]) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
    assert await grpc_code(system, folders["ours"], None) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_without_a_certificate_of_ours_a_key_opens_nothing_over_http(
    system: SecuredSystem, folders: dict[str, Path], stranger: str, path: str
) -> None:
    async with http(system, folders.get(stranger), system.key) as client:
        # With TLS 1.3 the refusal comes in place of the first answer, and httpx does not translate that.
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await client.get(path)


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_nor_over_grpc(system: SecuredSystem, folders: dict[str, Path], stranger: str) -> None:
    assert await grpc_code(system, folders.get(stranger), system.key) is grpc.StatusCode.UNAVAILABLE
