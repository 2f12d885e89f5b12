"""How much of what there is a tenant gets where requests wait: its weight, beside the 1 of those not named."""

from __future__ import annotations

from typing import Final

TENANT_WEIGHT_MAX: Final = 1000.0


def parse_tenant_weight(text: str) -> tuple[str, float]:
    """The tenant and its weight from NAME=WEIGHT. Raises ValueError, which says what is permitted."""
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        raise ValueError(f"{text!r} is not NAME=WEIGHT, such as batch=0.5") from None
    return name, check_tenant_weight(name, weight)


def check_tenant_weight(name: str, weight: float) -> float:
    """The weight itself. Raises ValueError, which says what is permitted."""
    if not 0 < weight <= TENANT_WEIGHT_MAX:
        raise ValueError(
            f"the weight of tenant {name!r} is {weight}; permitted: above 0, to {TENANT_WEIGHT_MAX:g}"
        )
    return weight
