"""The cache salt decides which requests share KV blocks: workers mix it into the digests of a session's blocks. Pure.

A prompt with a cached prefix is answered sooner, and `cached_tokens` reports the prefix. So each tenant with keys has a
pool of blocks of its own: neither tells it what another tenant sent. Keys that set `shares_prefixes` use one common
pool, in which their tenants can find out about each other's prompts. Without keys all requests share one pool.

Within its pool a request may name a `cache_salt`; it then shares only with requests of the same salt. It cannot name
another pool, because the pool is part of the hash. Salts are equal at every replica and after every restart.
"""

from __future__ import annotations

import hashlib

from coordinator.access.api_keys import Caller


def cache_salt(caller: Caller, asked: str = "") -> str:
    """Computes the salt of a request that names the salt `asked`; the common pool's own is empty."""
    pool = "" if caller.tenant is None or caller.shares_prefixes else caller.tenant
    if not pool and not asked:
        return ""
    # The lengths distinguish ("a", "bc") from ("ab", "c"). No tenant's name is empty.
    parts = [part.encode(errors="surrogatepass") for part in (pool, asked)]
    content = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(content, digest_size=16, person=b"cache pool").hexdigest()
