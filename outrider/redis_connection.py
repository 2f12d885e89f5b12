"""A client for the Redis that a URL names: plain, with a password, over TLS, or behind Sentinels.

    redis://[[user]:password@]host:port/db          rediss:// the same over TLS, with ?ssl_ca_certs=FILE and so on
    redis+sentinel://[[user]:password@]host:port[,host:port...]/SERVICE[/db]    rediss+sentinel:// over TLS
    unix://[[user]:password@]/path?db=0

What stands after `?` is as redis-py takes it. Sentinels are asked for the master whenever a connection is made, so that
a failover needs nobody's help; they share the password unless `?sentinel_password=` names theirs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from outrider.errors import ConfigurationError
from outrider.redis_tls import SharedContext

_SENTINEL_SUFFIX: Final = "+sentinel"
_SENTINEL_PORT: Final = 26379
MAX_CONNECTIONS: Final = 32
CLOCK_LUA: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
"""Begins a script in which `now` is Redis' clock in ms."""


def open_redis(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """Connects on first use; `timeout_s` for connecting and for an answer, no call is tried again after that.

    Raises ConfigurationError when `url` is not one.
    """
    try:
        return _mended(_open(url, timeout_s))
    except ValueError as error:
        raise ConfigurationError(
            f"--redis-url, its file or its variable is not the URL of a Redis: {error}"
        ) from error


def _open(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """Raises ValueError when `url` is not one."""
    common: dict[str, Any] = {
        "decode_responses": True,
        # Bytes that are no text are damage to one value. As an error they would fail the whole answer, and with it
        # everything that is read beside them.
        "encoding_errors": "backslashreplace",
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 15,
        # The default sleeps through ten attempts. Once and at once, where a connection in the pool turns out to have
        # been closed; never after a timeout.
        "retry": Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
        "max_connections": MAX_CONNECTIONS,
    }
    parts = urlsplit(url)
    if not parts.scheme.endswith(_SENTINEL_SUFFIX):
        try:
            _ = parts.port
        except ValueError:  # whose own words would quote the beginning of a password
            raise ValueError(
                "its port is no number; of a password, what is not a letter or digit is written as %2F and so on"
            ) from None
        return redis.asyncio.Redis.from_url(url, **common)
    scheme = parts.scheme.removesuffix(_SENTINEL_SUFFIX)
    if scheme not in ("redis", "rediss"):
        raise ValueError(
            f"{parts.scheme}:// is not known; there are redis+sentinel:// and rediss+sentinel://"
        )
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
    """The client, with connections that do what redis-py's (8.1) do not.

    They tell a reset as the lost connection that it is. Writing to a connection that the other side has reset is a
    RuntimeError on uvloop, which redis-py knows nothing of: it would neither connect anew nor raise one of its errors.

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
    """Gives the connections back, those to Sentinels included."""
    await client.aclose()
    if isinstance(client.connection_pool, SentinelConnectionPool):
        for sentinel in client.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def redis_url_from(url: str | None = None, file: Path | None = None) -> str | None:
    """What the flags --redis-url or --redis-url-file say, else the environment; None where neither names a Redis.

    Of the environment OUTRIDER_REDIS_URL counts before OUTRIDER_REDIS_URL_FILE: whoever starts processes of their own
    gives them the former, whatever else they inherit. Raises ConfigurationError for both flags at once, and for a file
    that holds no URL.
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
    """Raises ConfigurationError."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{named_by} {file} cannot be read: {error}") from error
    if "://" not in text or len(text.split()) != 1:
        raise ConfigurationError(
            f"{named_by} {file} holds no URL; one line is wanted, such as redis://:password@host:6379/0"
        )
    return text


def without_password(url: str) -> str:
    """For messages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(_SENTINEL_PORT))
    if not host or not port.isdigit():
        raise ValueError(f"{text!r} is not host:port of a Sentinel")
    return host, int(port)
