"""What a fault may cost clients at most."""

from __future__ import annotations

from enum import Enum


class Costs(Enum):
    NOTHING = "nothing"
    CONNECTIONS = "connections"  # streams may break, and go on where they were
    CAPACITY = "capacity"  # requests may be refused, each explicitly
