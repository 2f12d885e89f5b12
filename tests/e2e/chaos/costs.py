"""The most that a fault may cost clients, apart from time."""

from __future__ import annotations

from enum import Enum


class Costs(Enum):
    """Costs of a fault that are permitted; anything else that a client meets is a failure of the system."""

    NOTHING = "nothing"
    CONNECTIONS = "connections"  # they break, or nobody takes them; clients come back and go on
    CAPACITY = "capacity"  # beside that, requests are refused with the cause, and repeated by their clients
