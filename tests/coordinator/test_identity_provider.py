"""Reading an identity provider's keys: found, rotated, kept through outages, and never waited for without a bound."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.access import identity_provider
from coordinator.access.identity_provider import KEPT_S, IdentityProvider
from coordinator.access.tokens import SigningKeys, TokenRefused
from outrider.errors import ConfigurationError
from outrider.local.free_ports import free_ports
from outrider.security.certificate_authority import CertificateAuthority
from outrider.security.tls import Role
from tests.coordinator.fakes import eventually
from tests.coordinator.identity_providers import HANG_MAX_S, LocalProvider, be_patient, jwk, local_provider


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    with local_provider() as running:
        yield running


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def has(keys: SigningKeys | None, kid: str) -> bool:
    try:
        return keys is not None and keys.find(kid, "ES256") is not None
    except TokenRefused:
        return False


async def test_keys_are_found_by_the_discovery_document(provider: LocalProvider) -> None:
    async with IdentityProvider(provider.issuer) as reader:
        assert has(reader.keys, "kid")
        assert not reader.is_degraded
    assert provider.asked == ["/realms/main/.well-known/openid-configuration", "/realms/main/keys"]


async def test_or_at_the_address_that_the_operator_gives(provider: LocalProvider) -> None:
    async with IdentityProvider("https://issuer.invalid", f"{provider.issuer}/keys") as reader:
        assert has(reader.keys, "kid")
    assert provider.asked == ["/realms/main/keys"]


async def test_an_issuer_that_ends_with_a_slash_has_its_document_below_it(provider: LocalProvider) -> None:
    provider.issuer += "/"
    provider.discovery = {"jwks_uri": f"{provider.issuer}keys"}
    async with IdentityProvider(provider.issuer) as reader:
        assert has(reader.keys, "kid")


@pytest.mark.parametrize(
    ("discovery", "cause"),
    [
        ({"issuer": "https://other.example.com"}, "of another issuer: 'https://other.example.com'"),
        ({"issuer": None}, "of another issuer"),
        ({"jwks_uri": None}, "has no jwks_uri"),
        ({"jwks_uri": "http://login.example.com/keys"}, "has to be https://"),
        ({"jwks_uri": "file:///etc/passwd"}, "is no URL such as"),
        ({"jwks_uri": "https://login.example.com/\x7f"}, "InvalidURL"),
        ({"jwks_uri": "https://a:b@login.example.com/keys"}, "without a password"),
    ],
)
async def test_a_document_that_leads_elsewhere_is_not_followed(
    provider: LocalProvider, caplog: pytest.LogCaptureFixture, discovery: dict[str, object], cause: str
) -> None:
    provider.discovery = discovery
    async with IdentityProvider(provider.issuer) as reader:
        assert reader.keys is None
        assert reader.is_degraded
    assert cause in caplog.text
    assert provider.num_looks == 0


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ({"status": 503}, "answered with status 503"),
        ({"status": 302}, "answered with status 302"),
        ({"padding": " " * (1 << 20)}, "answered more than 1048576 bytes"),
        ({"padding": "x"}, "answered no JSON"),
        ({"keys": [{"kty": "oct", "k": "AA"}]}, "no key for a permitted signature algorithm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_no_key_set_is_told_once_and_the_keys_before_stay(
    provider: LocalProvider, caplog: pytest.LogCaptureFixture, fault: dict[str, object], cause: str
) -> None:
    async with IdentityProvider(provider.issuer) as reader:
        for name, value in fault.items():
            setattr(provider, name, value)
        num = len(provider.asked)
        await asyncio.sleep(0.03)  # a look is due
        await reader.look_again()
        await eventually(lambda: len(provider.asked) > num + 3, "it looks again and again", 20)
        assert reader.is_degraded
        assert has(reader.keys, "kid")
        provider.status, provider.padding, provider.keys = 200, "", [jwk("P-256", "new", "second")]
        await eventually(lambda: has(reader.keys, "new") and not reader.is_degraded, "the provider is well", 20)
        assert not has(reader.keys, "kid")
    assert caplog.text.count(cause) == 1


async def test_a_provider_that_is_down_at_the_start_is_read_when_it_is_up() -> None:
    (port,) = free_ports(1)
    began_s = time.monotonic()
    async with IdentityProvider(f"http://127.0.0.1:{port}") as reader:
        assert time.monotonic() - began_s < identity_provider.START_WAIT_S
        assert reader.keys is None
        assert reader.is_degraded
        with local_provider() as provider:
            reader._issuer = provider.issuer
            await eventually(lambda: reader.keys is not None, "the provider is up", 20)
            assert not reader.is_degraded


async def test_a_start_does_not_wait_for_a_provider_that_says_nothing(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_provider, "START_WAIT_S", 0.05)
    provider.released.clear()
    async with asyncio.timeout(5), IdentityProvider(provider.issuer) as reader:
        assert reader.keys is None
        assert reader.is_degraded
        provider.released.set()
        await eventually(lambda: has(reader.keys, "kid"), "it said so at last", 20)


async def test_an_answer_that_does_not_come_is_given_up(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identity_provider, "FETCH_TIMEOUT_S", 0.1)
    provider.released.clear()
    async with asyncio.timeout(20), IdentityProvider(provider.issuer) as reader:
        await eventually(lambda: len(provider.asked) >= 2, "it tries again", 20)
        assert reader.is_degraded
    assert "did not answer within 0.1 s" in caplog.text


async def test_keys_are_used_through_an_outage_up_to_an_age(provider: LocalProvider) -> None:
    later_s = 0.0
    async with IdentityProvider(provider.issuer, now_s=lambda: time.monotonic() + later_s) as reader:
        provider.status = 503
        later_s = KEPT_S - 60
        await reader.look_again()
        assert reader.is_degraded
        assert has(reader.keys, "kid")
        later_s = KEPT_S + 60
        assert reader.keys is None
        provider.status = 200
        await eventually(lambda: has(reader.keys, "kid"), "the provider is back", 20)


async def test_an_unknown_key_makes_it_look_and_nobody_can_make_it_look_often(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_provider, "AGAIN_S", 10.0)
    later_s = 0.0
    async with IdentityProvider(provider.issuer, now_s=lambda: later_s) as reader:
        for _ in range(1000):  # it has just looked
            await reader.look_again()
        assert provider.num_looks == 1
        later_s = identity_provider.AGAIN_S
        provider.rotate()
        await asyncio.gather(*(reader.look_again() for _ in range(1000)))
        await eventually(lambda: has(reader.keys, provider.kid), "it has looked", 20)
        for _ in range(1000):
            await reader.look_again()
        assert provider.num_looks == 2


async def test_whoever_waits_for_a_look_waits_no_longer_than_it_lasts(provider: LocalProvider) -> None:
    async with IdentityProvider(provider.issuer) as reader:
        provider.rotate()
        await asyncio.sleep(0.03)  # it may look again
        await reader.look_again()
        assert has(reader.keys, provider.kid)


async def test_nor_than_a_bound(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    async with IdentityProvider(provider.issuer) as reader:
        monkeypatch.setattr(identity_provider, "WAIT_S", 0.05)
        provider.released.clear()
        await asyncio.sleep(0.03)
        async with asyncio.timeout(HANG_MAX_S / 2):
            await reader.look_again()
        assert reader.may_have_others  # for the look goes on
        provider.released.set()
        await eventually(lambda: not reader.may_have_others, "it has ended", 20)


async def test_a_bounded_number_of_requests_waits(provider: LocalProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_provider, "WAITERS_MAX", 2)
    async with IdentityProvider(provider.issuer) as reader:
        provider.released.clear()
        await asyncio.sleep(0.03)
        waiting = [asyncio.create_task(reader.look_again()) for _ in range(2)]
        await eventually(lambda: len(provider.asked) == 3, "it looks", 20)
        async with asyncio.timeout(HANG_MAX_S / 2):
            await reader.look_again()  # one too many
        assert not any(task.done() for task in waiting)
        provider.released.set()
        await asyncio.gather(*waiting)
        await reader.look_again()


async def test_the_event_loop_goes_on_meanwhile(provider: LocalProvider) -> None:
    """The provider answers only when this loop lets it."""
    provider.released.clear()
    opening = asyncio.create_task(IdentityProvider(provider.issuer).__aenter__())
    await eventually(lambda: bool(provider.asked), "it looks", 20)
    assert not opening.done()
    provider.released.set()
    reader = await opening
    assert has(reader.keys, "kid")
    await reader.__aexit__()


async def test_a_provider_has_to_show_a_certificate_of_a_trusted_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = CertificateAuthority.open(tmp_path)
    authority.issue(tmp_path / "own", Role.COORDINATOR, names=("127.0.0.1",), valid_for=datetime.timedelta(days=1))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own" / "tls.crt", tmp_path / "own" / "tls.key")
    with local_provider(context) as provider:
        async with IdentityProvider(provider.issuer) as reader:
            assert reader.keys is None
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        assert provider.asked == []
        async with IdentityProvider(provider.issuer, ca_file=str(tmp_path / "ca.crt")) as reader:
            assert has(reader.keys, "kid")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_of_authorities_that_is_none_is_told_at_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"--oidc-ca-file .*ca\.crt cannot be read"):
        IdentityProvider("https://login.example.com", ca_file=str(path))
