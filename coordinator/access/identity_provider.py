"""Reads the public keys of an identity provider, again and again, beside all requests.

The keys are read every REFRESH_S. A token with an unknown key makes the reader look sooner, at most once in AGAIN_S, so
that keys may be rotated at any time and garbage cannot hammer the provider. While the provider does not answer, the
keys that were read last are used for KEPT_S.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx

from coordinator.access.tokens import SigningKeys
from outrider.concurrency.background import end_tasks, keep_going
from outrider.errors import ConfigurationError
from outrider.security.provider_urls import check_provider_url
from outrider.security.tls import LOOPBACK_HOSTS

_log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0
AGAIN_S: Final = 10.0
"""Least time between two looks, whatever tokens come, and the pause after a look that failed."""
KEPT_S: Final = 4 * 3600.0
"""How long keys are used after the provider was last read. A key that it withdrew meanwhile works as long."""
FETCH_TIMEOUT_S: Final = 5.0
START_WAIT_S: Final = 3.0
"""How long a replica's start waits for the keys; then it serves whoever has an API key."""
WAIT_S: Final = 1.0
"""How long a request waits for a look that may bring the key of its token."""
WAITERS_MAX: Final = 64
_DOCUMENT_BYTES_MAX: Final = 1 << 20
_DISCOVERY: Final = "/.well-known/openid-configuration"


class IdentityProvider:
    """The keys of one provider; open it on the event loop that serves requests."""

    def __init__(
        self,
        issuer: str,
        jwks_url: str | None = None,
        ca_file: str | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `jwks_url` OpenID Connect Discovery finds it. Raises ConfigurationError for a `ca_file` that cannot
        be read."""
        self._issuer, self._jwks_url, self._ca_file, self._now_s = issuer, jwks_url, ca_file, now_s
        self._keys: SigningKeys | None = None
        self._read_at_s = self._looked_at_s = 0.0
        self._failure: str | None = "it has not been read yet"
        self._is_looking = False
        self._is_asked = asyncio.Event()  # to look before the time
        self._look_ended = asyncio.Event()  # replaced after each look
        self._num_waiters = 0
        self._task: asyncio.Task[None] | None = None
        self._well_known = httpx.create_ssl_context() if ca_file is None else None  # which takes a while to make
        self._context()

    async def __aenter__(self) -> Self:
        ended = self._look_ended
        reading = keep_going(self._keep, "reading the identity provider", self._fail, AGAIN_S)
        self._task = asyncio.create_task(reading, name="issuer keys")
        with suppress(TimeoutError):
            async with asyncio.timeout(START_WAIT_S):
                await ended.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._task)

    @property
    def keys(self) -> SigningKeys | None:
        """The keys; None if they were never read, or not for KEPT_S."""
        is_old = self._now_s() - self._read_at_s > KEPT_S
        return None if is_old else self._keys

    @property
    def is_degraded(self) -> bool:
        """Whether the last look failed, or there are no keys."""
        return self._failure is not None

    @property
    def may_have_others(self) -> bool:
        """Whether the provider may have keys that were not read: the last look failed, or a look goes on."""
        return self.is_degraded or self._is_looking

    async def look_again(self) -> None:
        """Waits at most WAIT_S for the end of a look, which begins now unless the last one ended within AGAIN_S."""
        if not self._is_looking:
            if self._now_s() - self._looked_at_s < AGAIN_S:
                return
            self._is_asked.set()
        if self._num_waiters >= WAITERS_MAX:
            return
        self._num_waiters += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._look_ended.wait()
        finally:
            self._num_waiters -= 1

    def _fail(self) -> None:
        self._failure = "a defect of ours"

    async def _keep(self) -> None:
        while True:
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S if self._failure is None else AGAIN_S):
                    await self._is_asked.wait()

    async def _look(self) -> None:
        self._is_looking = True
        self._is_asked.clear()
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                keys = await self._fetch()
            if self._keys is None or keys.fingerprint != self._keys.fingerprint:
                self._keys = keys
            self._read_at_s, self._failure = self._now_s(), None
        except (OSError, ValueError, RecursionError, httpx.HTTPError, httpx.InvalidURL, ConfigurationError) as error:
            failure = f"{type(error).__name__}: {str(error)[:500]}"
            if isinstance(error, TimeoutError):
                failure = f"it did not answer within {FETCH_TIMEOUT_S:g} s"
            if failure != self._failure:
                _log.error("the keys of the identity provider %s cannot be read: %s", self._issuer, failure)
            self._failure = failure
        finally:
            self._looked_at_s, self._is_looking = self._now_s(), False
            self._look_ended.set()
            self._look_ended = asyncio.Event()

    async def _fetch(self) -> SigningKeys:
        is_own = urlsplit(self._jwks_url or self._issuer).hostname in LOOPBACK_HOSTS
        async with httpx.AsyncClient(
            verify=self._context(),
            trust_env=not is_own,  # a proxy does not reach this machine's own ports
            timeout=FETCH_TIMEOUT_S,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        ) as client:
            url = self._jwks_url
            if url is None:
                document = await _read(client, self._issuer.rstrip("/") + _DISCOVERY)
                url = _jwks_url(document, self._issuer)
            return SigningKeys.parse(await _read(client, url))

    def _context(self) -> ssl.SSLContext:
        """Trusts the authorities of the file as it is now. Raises ConfigurationError."""
        if self._well_known is not None:
            return self._well_known
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            raise ConfigurationError(f"--oidc-ca-file {self._ca_file} cannot be read: {error}") from error


async def _read(client: httpx.AsyncClient, url: str) -> Any:
    """Reads a JSON document of bounded length. Raises ValueError or httpx.HTTPError."""
    async with client.stream("GET", url) as response:
        if response.status_code != 200:
            raise ValueError(f"{url} answered with status {response.status_code}")
        raw = bytearray()
        async for part in response.aiter_bytes():
            raw += part
            if len(raw) > _DOCUMENT_BYTES_MAX:
                raise ValueError(f"{url} answered more than {_DOCUMENT_BYTES_MAX} bytes")
    try:
        return json.loads(raw)
    except ValueError:
        raise ValueError(f"{url} answered no JSON") from None


def _jwks_url(document: Any, issuer: str) -> str:
    """The address of the keys in a discovery document. Raises ValueError."""
    known = document if isinstance(document, dict) else {}
    if known.get("issuer") != issuer:
        raise ValueError(f"its discovery document is of another issuer: {ascii(known.get('issuer'))[:200]}")
    url = known.get("jwks_uri")
    if not isinstance(url, str):
        raise ValueError("its discovery document has no jwks_uri")
    check_provider_url("jwks_uri", url)
    return url
