"""Who shares KV blocks with whom: the salt that workers mix into the digests of a session's blocks. Pure.

A prompt whose beginning is cached is answered sooner, and `cached_tokens` tells how much of it was. So tenants with
keys have a pool of blocks each: nobody learns from either what another tenant has asked. Keys that say
`shares_prefixes` use one common pool, in which their tenants can find out about each other's prompts. Where there are
no keys there are no tenants to keep apart, and all share.

Within its pool a request may name a `cache_salt`, and shares with those of the same salt alone. It cannot name another
pool: the pool is part of what is hashed. Salts are the same at every replica and after every restart.
"""

from __future__ import annotations

import hashlib

from outrider.api_keys import Caller


def cache_salt(caller: Caller, asked: str = "") -> str:
    """The salt for a caller's request that asked for `asked`; the common pool's own is empty."""
    pool = "" if caller.tenant is None or caller.shares_prefixes else caller.tenant
    if not pool and not asked:
        return ""
    # Their lengths keep parts apart: "a" and "bc" are not "ab" and "c". No tenant's name is empty.
    parts = [part.encode(errors="surrogatepass") for part in (pool, asked)]
    content = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(content, digest_size=16, person=b"cache pool").hexdigest()
