"""The TLS of connections to Redis: one context for all connections of a client, made anew when its files change.

redis-py makes a context for every connection, and reads the system's authorities into it even where the URL names
others: some 30 ms on the event loop each, and a burst of requests opens dozens. What it has made it keeps for as long
as the process lives, so that a certificate that is replaced in its file would run out in use.
"""

from __future__ import annotations

import os
import ssl
from typing import Any

_Stamp = tuple[tuple[int, ...] | None, ...]


class SharedContext:
    """Of one client."""

    def __init__(self) -> None:
        self._made: tuple[_Stamp, ssl.SSLContext] | None = None

    def get(self, settings: Any) -> ssl.SSLContext:
        """The context that redis-py's settings (`RedisSSLContext`) ask for. Where files have changed and do not belong
        together, the one from before. Raises OSError, which ssl.SSLError is."""
        stamp = _stamp(settings)
        if self._made is not None and self._made[0] == stamp:
            return self._made[1]
        try:
            context = _make(settings)
        except OSError:
            if self._made is None:
                raise
            return self._made[1]  # half of a rotation: the next connection looks again
        self._made = (stamp, context)
        return context


def _stamp(settings: Any) -> _Stamp:
    """Another one when a file is another one."""
    found: list[tuple[int, ...] | None] = []
    for path in (settings.certfile, settings.keyfile, settings.ca_certs):
        try:
            status = None if path is None else os.stat(path)
        except OSError:
            status = None
        found.append(None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _make(settings: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = settings.check_hostname
    context.verify_mode = settings.cert_reqs
    for flag in settings.include_verify_flags or ():
        context.verify_flags |= flag
    for flag in settings.exclude_verify_flags or ():
        context.verify_flags &= ~flag
    if settings.certfile or settings.keyfile:
        context.load_cert_chain(settings.certfile, settings.keyfile, settings.password)
    if settings.ca_certs or settings.ca_data or settings.ca_path:
        context.load_verify_locations(settings.ca_certs, settings.ca_path, settings.ca_data)
    elif settings.cert_reqs is not ssl.CERT_NONE:
        context.load_default_certs()
    if settings.min_version is not None:
        context.minimum_version = settings.min_version
    if settings.ciphers is not None:
        context.set_ciphers(settings.ciphers)
    return context
