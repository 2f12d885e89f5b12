"""Addresses of identity providers: only those that nobody on the way can answer for."""

from __future__ import annotations

from urllib.parse import urlsplit

from outrider.security.tls import LOOPBACK_HOSTS


def check_provider_url(name: str, url: str) -> None:
    """Raises ValueError for an address without TLS, unless it is this machine's own, and for one with a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{name} {url!r} is no URL: {error}") from None
    if not host or parts.scheme not in ("https", "http"):
        raise ValueError(f"{name} {url!r} is no URL such as https://login.example.com/realms/main")
    if parts.scheme == "http" and host not in LOOPBACK_HOSTS:
        raise ValueError(f"{name} {url!r} has to be https://: whoever is on the way to it could answer with own keys")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError(f"{name} has to be a plain URL, without a password or a fragment")
