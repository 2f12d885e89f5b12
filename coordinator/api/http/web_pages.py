"""Refuses what browsers send for web pages of others, where no credential tells callers apart.

Without keys whoever reaches the coordinator is served, and a browser reaches what its user reaches. It sends requests
for any page that is open in it, in two ways:

- Across sites. A form, or a `fetch` whose body is plain text, needs nobody's permission: its page cannot read the
  answer, but the work is done. Browsers say for whom they send (`Sec-Fetch-Site`, `Origin`). The way of deciding by
  both is that of Go's net/http.CrossOriginProtection.
- By a name of the page's own that begins to lead to this machine (DNS rebinding). To the browser the coordinator then
  is the page's own site, and the page reads the answers. `Host` alone still has the page's name. So a coordinator that
  only this machine reaches answers only to names that nobody else can have: addresses, localhost, and names below
  .localhost and .internal, such as host.docker.internal.

Programs send neither `Sec-Fetch-Site` nor the origin of a page. No page can call gRPC: browsers speak no HTTP/2 in the
clear, and over TLS its content type needs a permission that the gRPC port gives nobody.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers

from outrider.errors import Forbidden

_OWN_SITES: Final = ("same-origin", "none")  # none: a person has typed the address
_OWN_NAMES: Final = (".localhost", ".internal")  # RFC 6761; reserved by ICANN for private use
_PAGES: Final = ("http://", "https://", "null")
"""Beginnings of the origins of pages. Others, such as app:// and tauri://, are of programs that the user installed."""


class WebPages:
    """Decides by its headers whether a request comes from a web page that may not call."""

    def __init__(self, origins: Sequence[str], *, is_local: bool) -> None:
        """`origins` may call, `*` are all; `is_local`: `Host` has to name this machine."""
        self._origins = frozenset(origins)
        self._is_local = is_local

    def check(self, headers: Headers) -> None:
        """Raises Forbidden."""
        if self._is_local:
            for host in headers.getlist("Host"):
                if not _is_this_machine(host):
                    raise Forbidden(
                        f"this coordinator has no API keys, so it answers only to localhost and to addresses, and not "
                        f"to {host!r}: a web page could have made that name lead here. Use another name, give the "
                        "coordinator --api-keys, or --insecure where the network keeps strangers out"
                    )
        origin = headers.get("Origin")
        if "*" in self._origins or origin in self._origins:
            return
        if _is_of_another_site(headers, origin):
            raise Forbidden(
                f"a web page of another site ({origin or 'which the browser does not name'}) may not call this "
                "coordinator, which has no API keys; start it with --cors-origin and the page's origin to permit it"
            )


def _is_this_machine(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(_OWN_NAMES):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_of_another_site(headers: Headers, origin: str | None) -> bool:
    site = headers.get("Sec-Fetch-Site")
    if origin is not None and not origin.startswith(_PAGES):
        return False
    if site is None:  # no browser, or an older one, or a connection that browsers do not trust
        return origin is not None and origin.partition("://")[2] != headers.get("Host")
    is_followed_link = origin is None and headers.get("Sec-Fetch-Mode") == "navigate"  # its page sees nothing of it
    return site not in _OWN_SITES and not is_followed_link
