"""One TLS context for all Redis connections of a client, renewed when its files change.

redis-py makes a context for every connection, and reads the system's authorities into it even where the URL names
others: some 30 ms on the event loop each, and a burst of requests opens dozens. It keeps a context for the life of the
process, so that a certificate that is replaced in its file would expire in use.
"""

from __future__ import annotations

import ssl
from typing import Any

from outrider.security.watched_files import Stamp, stamp_of


class SharedContext:
    """The TLS context of one client."""

    def __init__(self) -> None:
        self._made: tuple[Stamp, ssl.SSLContext] | None = None

    def get(self, settings: Any) -> ssl.SSLContext:
        """The context for redis-py's settings (`RedisSSLContext`). While changed files do not belong together, it
        returns the one before. Raises OSError, which ssl.SSLError is."""
        stamp = stamp_of((settings.certfile, settings.keyfile, settings.ca_certs))
        if self._made is not None and self._made[0] == stamp:
            return self._made[1]
        try:
            context = _make(settings)
        except OSError:
            if self._made is None:
                raise
            return self._made[1]  # half of a rotation: the next connection tries again
        self._made = (stamp, context)
        return context


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
