"""Finds the caller of a request by its credential: an API key, or a token of an identity provider.

A credential of the form of a token is verified as one where a provider is configured; every other one is looked up in
the file of keys. A token's tenant is a tenant like that of a key, with the limits that the file gives it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from coordinator.access.api_keys import ANYBODY, Caller, KeyFile, TenantLimits, bearer_of
from coordinator.access.identity_provider import AGAIN_S, IdentityProvider
from coordinator.access.tokens import Reason, SigningKeys, TokenRefused, TokenRules, VerifiedToken, is_token
from coordinator.settings import CoordinatorSettings
from outrider.errors import InvalidToken, Unauthenticated, Unavailable

_log = logging.getLogger(__name__)

CACHED_S: Final = 60.0
"""How long a verified token is not verified again. A longer time would save little."""
CACHED_MAX: Final = 4096
LOG_EVERY_S: Final = 10.0
"""Least time between two lines of the log about one reason: strangers must not fill a disk."""
_NEEDED: Final = "an API key or a token is needed: Authorization: Bearer KEY"
_TOLD: Final = {Reason.EXPIRED: "this token has expired", Reason.NOT_YET_VALID: "this token is not valid yet"}
"""Causes that callers learn. Only whoever has a token with a valid signature gets these answers."""


class TokenDesk:
    """Verifies tokens with the keys of one provider, and remembers the valid ones for a while."""

    def __init__(
        self,
        rules: TokenRules,
        provider: IdentityProvider,
        on_refusal: Callable[[Reason], None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.provider = provider
        self._rules, self._on_refusal, self._now_s = rules, on_refusal, now_s
        self._valid: dict[bytes, tuple[VerifiedToken, float]] = {}  # by digest: with the time until which it counts
        self._valid_by: SigningKeys | None = None
        self._log_after_s: dict[Reason, float] = {}
        self._num_unlogged: dict[Reason, int] = {}

    async def verify(self, token: str) -> VerifiedToken:
        """Verifies a token. Raises InvalidToken, or Unavailable while the provider's keys are not known."""
        try:
            try:
                return self._verify(token)
            except TokenRefused as refusal:
                if refusal.reason is not Reason.UNKNOWN_KEY:
                    raise
            await self.provider.look_again()
            return self._verify(token)
        except TokenRefused as refusal:
            self._note(refusal)
            if refusal.reason is Reason.UNKNOWN_KEY and self.provider.may_have_others:
                raise _unavailable() from None
            raise InvalidToken(_TOLD.get(refusal.reason, "this token is not valid here")) from None

    def _verify(self, token: str) -> VerifiedToken:
        keys, now_s = self.provider.keys, self._now_s()
        if keys is None:
            raise _unavailable()
        if keys is not self._valid_by:  # what a withdrawn key has signed is valid no more
            self._valid.clear()
            self._valid_by = keys
        digest = hashlib.sha256(token.encode()).digest()
        known = self._valid.get(digest)
        if known is not None and now_s < known[1]:
            return known[0]
        verified = self._rules.verify(token, keys)
        self._valid.pop(digest, None)
        if len(self._valid) >= CACHED_MAX:
            del self._valid[next(iter(self._valid))]  # the oldest
        self._valid[digest] = verified, min(now_s + CACHED_S, verified.expires_s)
        return verified

    def _note(self, refusal: TokenRefused) -> None:
        """Counts a refusal, and logs it without the token."""
        reason, now_s = refusal.reason, time.monotonic()
        self._on_refusal(reason)
        num = self._num_unlogged[reason] = self._num_unlogged.get(reason, 0) + 1
        if now_s < self._log_after_s.get(reason, 0.0):
            return
        self._log_after_s[reason], self._num_unlogged[reason] = now_s + LOG_EVERY_S, 0
        more = f" ({num - 1} more since the last such line)" if num > 1 else ""
        _log.warning("a token was refused: %s%s", refusal.detail, more)


class Authentication:
    """Finds callers by their `Authorization`; open it on the event loop that serves requests."""

    def __init__(self, keys: KeyFile | None, tokens: TokenDesk | None) -> None:
        self.keys, self.tokens = keys, tokens

    @classmethod
    def of(cls, settings: CoordinatorSettings, on_refusal: Callable[[Reason], None] = lambda _: None) -> Self:
        """Raises ConfigurationError for files that cannot be read."""
        keys = None if settings.api_keys_file is None else KeyFile(Path(settings.api_keys_file))
        if settings.oidc_issuer is None or settings.oidc_audience is None:
            return cls(keys, None)
        rules = TokenRules(settings.oidc_issuer, settings.oidc_audience, settings.oidc_tenant_claim)
        provider = IdentityProvider(settings.oidc_issuer, settings.oidc_jwks_url, settings.oidc_ca_file)
        return cls(keys, TokenDesk(rules, provider, on_refusal))

    async def __aenter__(self) -> Self:
        if self.tokens is not None:
            await self.tokens.provider.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.tokens is not None:
            await self.tokens.provider.__aexit__(kind, error, trace)

    @property
    def is_required(self) -> bool:
        """Whether callers need a credential."""
        return self.keys is not None or self.tokens is not None

    async def caller_of(self, authorization: str | None) -> Caller:
        """Finds a caller. Raises Unauthenticated, or Unavailable if keys or limits cannot be read."""
        if self.tokens is not None:
            credential = bearer_of(authorization, _NEEDED)
            if is_token(credential):
                return self._caller_by(await self.tokens.verify(credential))
            if self.keys is None:
                raise Unauthenticated("this is no token of the identity provider, which is needed here")
        return ANYBODY if self.keys is None else self.keys.authenticate(authorization)

    def _caller_by(self, token: VerifiedToken) -> Caller:
        limits = TenantLimits() if self.keys is None else self.keys.limits_of(token.tenant)
        return Caller(token.tenant, token.scopes or limits.token_scopes, limits)


def _unavailable() -> Unavailable:
    return Unavailable("tokens cannot be verified here at the moment; try again later", AGAIN_S)
