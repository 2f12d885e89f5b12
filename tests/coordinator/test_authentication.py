"""Verified tokens are remembered for a while; settings of an identity provider that do not go together are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.access import authentication
from coordinator.access.authentication import CACHED_MAX, TokenDesk
from coordinator.access.identity_provider import IdentityProvider
from coordinator.access.tokens import Reason, TokenRules, VerifiedToken
from coordinator.settings import CoordinatorSettings
from outrider.errors import InvalidToken
from tests.coordinator.identity_providers import AUDIENCE, LocalProvider, be_patient, local_provider


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def provider() -> Iterator[LocalProvider]:
    with local_provider() as running:
        yield running


class TestMemory:
    """Verified tokens are remembered."""

    @staticmethod
    @asynccontextmanager
    async def desk(provider: LocalProvider) -> AsyncIterator[tuple[TokenDesk, list[str], list[float]]]:
        """A desk, the tokens that it has verified, and its clock."""
        verified: list[str] = []
        now_s = [1000.0]

        class Rules(TokenRules):
            def verify(self, token: str, keys: Any) -> VerifiedToken:
                verified.append(token)
                return VerifiedToken("search", frozenset(), 1030.0 if token.startswith("short") else 1e9)

        async with IdentityProvider(provider.issuer) as reader:
            rules = Rules(provider.issuer, AUDIENCE)
            yield TokenDesk(rules, reader, lambda _: None, lambda: now_s[0]), verified, now_s

    async def test_a_token_is_verified_once_a_minute_and_anew_when_it_expires(self, provider: LocalProvider) -> None:
        async with self.desk(provider) as (desk, verified, now_s):
            for now_s[0] in (1000.0, 1029.0, 1031.0, 1032.0, 1059.0):
                await desk.verify("long")
                await desk.verify("short")
            assert verified == ["long", "short", "short", "short", "short"]
            now_s[0] = 1060.0
            await desk.verify("long")
            assert verified[-1] == "long"

    async def test_a_bounded_number_is_remembered_and_not_the_tokens_themselves(self, provider: LocalProvider) -> None:
        async with self.desk(provider) as (desk, verified, _):
            for number in range(CACHED_MAX + 5):
                await desk.verify(f"token {number}")
            assert len(desk._valid) == CACHED_MAX
            assert not any(b"token" in key for key in desk._valid)
            await desk.verify(f"token {CACHED_MAX + 4}")
            assert len(verified) == CACHED_MAX + 5
            await desk.verify("token 0")
            assert len(verified) == CACHED_MAX + 6

    async def test_what_is_refused_is_not_remembered(
        self, provider: LocalProvider, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(authentication, "LOG_EVERY_S", 0.0)
        refused: list[Reason] = []
        async with IdentityProvider(provider.issuer) as reader:
            desk = TokenDesk(TokenRules(provider.issuer, AUDIENCE), reader, refused.append)
            for _ in range(3):
                with pytest.raises(InvalidToken):
                    await desk.verify(provider.token(aud="x"))
        assert refused == [Reason.AUDIENCE] * 3
        assert desk._valid == {}


class TestSettings:
    ISSUER = "https://login.example.com/realms/main"

    @pytest.mark.parametrize(
        ("given", "cause"),
        [
            ({"oidc_issuer": ISSUER}, "--oidc-issuer needs --oidc-audience"),
            ({"oidc_issuer": ISSUER, "oidc_audience": ""}, "--oidc-issuer needs --oidc-audience"),
            ({"oidc_audience": "outrider"}, "--oidc-audience needs --oidc-issuer"),
            ({"oidc_jwks_url": ISSUER}, "--oidc-jwks-url needs --oidc-issuer"),
            ({"oidc_ca_file": "ca.crt"}, "--oidc-ca-file needs --oidc-issuer"),
            ({"oidc_issuer": "http://login.example.com", "oidc_audience": "a"}, "--oidc-issuer .* has to be https://"),
            ({"oidc_issuer": "http://127.0.0.1.example.com", "oidc_audience": "a"}, "has to be https://"),
            ({"oidc_issuer": "login.example.com", "oidc_audience": "a"}, "is no URL such as"),
            ({"oidc_issuer": "https://a:b@login.example.com", "oidc_audience": "a"}, "without a password"),
            ({"oidc_issuer": "https://[login", "oidc_audience": "a"}, "is no URL"),
            (
                {"oidc_issuer": ISSUER, "oidc_audience": "a", "oidc_jwks_url": "http://x.example.com/keys"},
                "--oidc-jwks-url .* has to be https://",
            ),
            ({"oidc_issuer": ISSUER, "oidc_audience": "a", "oidc_tenant_claim": ""}, "--oidc-tenant-claim is empty"),
            ({"oidc_issuer": ISSUER, "oidc_audience": "a", "metrics_port": 9100}, "needs tls_dir"),
        ],
    )  # fmt: skip
    def test_what_does_not_go_together_is_refused_by_name(self, given: dict[str, Any], cause: str) -> None:
        with pytest.raises(ValueError, match=cause):
            CoordinatorSettings(tokenizer_dir="model", redis_url="redis://x", **given)

    @pytest.mark.parametrize(
        "issuer", [ISSUER, "http://127.0.0.1:8080/realms/main", "http://localhost", "http://[::1]:1"]
    )
    def test_an_issuer_has_tls_or_is_on_this_machine(self, issuer: str) -> None:
        settings = CoordinatorSettings(
            tokenizer_dir="model", redis_url="x", oidc_issuer=issuer, oidc_audience="outrider"
        )
        assert settings.knows_callers
