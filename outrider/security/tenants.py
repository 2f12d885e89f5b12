"""Tenant weights and digests: the share of each tenant where tenants compete (1 unless named), and its anonymous
name."""

from __future__ import annotations

import hashlib
from typing import Final

from outrider.errors import InvalidRequest

TENANT_WEIGHT_MAX: Final = 1000.0
OWNER_CHARS_MAX: Final = 64


def parse_tenant_weight(text: str) -> tuple[str, float]:
    """Parses the tenant and its weight from NAME=WEIGHT. Raises ValueError, which states the permitted range."""
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        raise ValueError(f"{text!r} is not NAME=WEIGHT, such as batch=0.5") from None
    return name, check_tenant_weight(name, weight)


def check_tenant_weight(name: str, weight: float) -> float:
    """Returns the weight if it is valid. Raises ValueError, which states the permitted range."""
    if not 0 < weight <= TENANT_WEIGHT_MAX:
        raise ValueError(f"the weight of tenant {name!r} is {weight}; permitted: above 0, to {TENANT_WEIGHT_MAX:g}")
    return weight


def tenant_digest(tenant: str) -> str:
    """A tenant's anonymous name in Redis and at workers: 32 hexadecimal characters."""
    return hashlib.sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:32]


def check_owner(owner: str) -> None:
    """Raises InvalidRequest for an owner name that is too long for workers."""
    if len(owner) > OWNER_CHARS_MAX:
        raise InvalidRequest("owner", f"owner may have at most {OWNER_CHARS_MAX} characters, got {len(owner)}")
