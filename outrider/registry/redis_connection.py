"""Opens a client for the Redis that a URL names: plain, with a password, over TLS, or behind Sentinels.

redis://[[user]:password@]host:port/db          rediss:// the same over TLS, with ?ssl_ca_certs=FILE and so on
redis+sentinel://[[user]:password@]host:port[,host:port...]/SERVICE[/db]    rediss+sentinel:// over TLS
unix://[[user]:password@]/path?db=0

Options after `?` are redis-py's. Sentinels are asked for the master whenever a connection is made, so that a failover
needs no intervention; they share the password unless `?sentinel_password=` names theirs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from outrider.addresses import split_address
from outrider.errors import ConfigurationError
from outrider.registry.redis_tls import SharedContext
from outrider.settings import NETWORK, setting

_SENTINEL_SUFFIX: Final = "+sentinel"
_SENTINEL_PORT: Final = 26379
MAX_CONNECTIONS: Final = 32
CLOCK_LUA: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
"""Prefix of scripts in which `now` is Redis' clock in ms."""


@dataclass(frozen=True)
class RedisSettings:
    """How a process is told of its Redis; `redis_url_from` reads flags and variables."""

    redis_url: str | None = setting(
        None, "Redis with the registry", NETWORK, "URL", variable="OUTRIDER_REDIS_URL", reads_variable=False
    )
    redis_url_file: Path | None = setting(
        None, "file with the URL and its password, instead of --redis-url: other processes can see a command line "
        "and an environment",
        NETWORK, "file", variable="OUTRIDER_REDIS_URL_FILE", reads_variable=False,
    )  # fmt: skip
    redis_wait_s: float = setting(
        60.0, "time to wait at the start for a Redis that does not answer yet, because the parts of a system start in "
        "any order; a Redis that refuses the password is not waited for",
        NETWORK, "seconds", at_least=0,
    )  # fmt: skip


def open_redis(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """Returns a client that connects on first use. `timeout_s` bounds connecting and each answer; timeouts are not
    retried.

    Raises ConfigurationError for an invalid `url`.
    """
    try:
        return _mended(_open(url, timeout_s))
    except ValueError as error:
        raise ConfigurationError(f"--redis-url, its file or its variable is not the URL of a Redis: {error}") from error


def _open(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """Opens a client; raises ValueError for an invalid `url`."""
    common: dict[str, Any] = {
        "decode_responses": True,
        # Bytes that are not UTF-8 damage only one value. As an error they would fail the whole answer.
        "encoding_errors": "backslashreplace",
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 15,
        # The default sleeps through ten attempts. Retry once, at once, if a pooled connection turns out to be closed;
        # never after a timeout.
        "retry": Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        "max_connections": MAX_CONNECTIONS,
    }
    parts = _split(url)
    if not parts.scheme.endswith(_SENTINEL_SUFFIX):
        try:
            _ = urlsplit(url).port
        except ValueError:  # its own message would quote the beginning of a password
            raise ValueError(
                "its port is no number; in a password, percent-encode all but letters and digits, such as / as %2F"
            ) from None
        return redis.asyncio.Redis.from_url(url, **common)
    scheme = parts.scheme.removesuffix(_SENTINEL_SUFFIX)
    if scheme not in ("redis", "rediss"):
        raise ValueError(f"{parts.scheme}:// is not known; there are redis+sentinel:// and rediss+sentinel://")
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the name of the service is missing: redis+sentinel://host:port/SERVICE")
    options = dict(parse_qsl(parts.query))
    sentinel_password = options.pop("sentinel_password", None)
    # redis-py has no URL for Sentinel, but reads all the rest of one.
    plain = urlunsplit((scheme, f"{credentials}@host", f"/{database}", urlencode(options), ""))
    parsed: dict[str, Any] = dict(parse_url(plain))
    parsed.pop("connection_class", None)
    parsed.pop("host", None)
    parsed = {**parsed, **common, "ssl": scheme == "rediss"}
    for_sentinels = {name: value for name, value in parsed.items() if name not in ("db", "max_connections")}
    if sentinel_password is not None:
        for_sentinels |= {"password": sentinel_password, "username": None}
    sentinels = Sentinel([_address(host) for host in hosts.split(",")], sentinel_kwargs=for_sentinels)
    sentinels.sentinels = [_mended(each) for each in sentinels.sentinels]
    return sentinels.master_for(service, **parsed)


def _mended(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """Replaces the client's connections by ones without two defects of redis-py (8.1).

    They report a reset as a lost connection. Writing to a connection that the other side has reset is a RuntimeError on
    uvloop, which redis-py does not handle: it would neither reconnect nor raise one of its errors.

    Over TLS they share one context, which follows its files (`SharedContext`).
    """
    kind: Any = client.connection_pool.connection_class
    shared = SharedContext()

    class MendedConnection(kind):
        async def _connect(self) -> None:
            if (settings := getattr(self, "ssl_context", None)) is not None:
                settings.context = shared.get(settings)
            await super()._connect()

        async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
            try:
                await super().send_packed_command(*arguments, **options)
            except RuntimeError as error:
                raise redis.exceptions.ConnectionError(f"connection lost: {error}") from error

    client.connection_pool.connection_class = MendedConnection
    return client


async def close_redis(client: redis.asyncio.Redis) -> None:
    """Closes the connections, those to Sentinels included."""
    await client.aclose()
    if isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def redis_url_from(url: str | None = None, file: Path | None = None) -> str | None:
    """The Redis URL from the flags --redis-url or --redis-url-file, else from the environment; None where neither is
    set.

    In the environment OUTRIDER_REDIS_URL takes precedence over OUTRIDER_REDIS_URL_FILE: parents set the former for
    their children, whatever else these inherit. Raises ConfigurationError for both flags at once, and for a file
    without a URL.
    """
    if url is not None and file is not None:
        raise ConfigurationError("--redis-url and --redis-url-file exclude each other")
    if file is not None:
        return _url_in(file, "--redis-url-file")
    if found := url or os.environ.get("OUTRIDER_REDIS_URL"):
        return found
    named = os.environ.get("OUTRIDER_REDIS_URL_FILE")
    return _url_in(Path(named), "OUTRIDER_REDIS_URL_FILE") if named else None


def _url_in(file: Path, named_by: str) -> str:
    """Reads a URL from a file. Raises ConfigurationError."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{named_by} {file} cannot be read: {error}") from error
    if "://" not in text or len(text.split()) != 1:
        raise ConfigurationError(
            f"{named_by} {file} holds no URL; one line is required, such as redis://:password@host:6379/0"
        )
    return text


def without_password(url: str) -> str:
    """A URL without its credentials, for messages."""
    parts = _split(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _split(url: str) -> SplitResult:
    """`urlsplit`, which refuses several hosts of which one is an IPv6 address in brackets."""
    scheme, mark, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}{mark}{rest[len(hosts) :]}")._replace(netloc=hosts)


def _address(text: str) -> tuple[str, int]:
    try:
        return split_address(text if ":" in text.rpartition("]")[2] else f"{text}:{_SENTINEL_PORT}")
    except ValueError:
        raise ValueError(f"{text!r} is not host:port of a Sentinel") from None
