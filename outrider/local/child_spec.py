"""Description of a child process for its supervisor: command, phases, restart policy. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DIED = "died"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ChildEvent:
    """A change of a child process' phase."""

    name: str
    phase: Phase
    detail: str = ""


@dataclass(frozen=True)
class ChildSpec:
    """One process to keep running."""

    name: str  # unique; also the name of its log file
    role: str  # children of the same role stop together
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the supervisor's own
    ready_timeout_s: float = 180.0
    stop_grace_s: float = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class RestartPolicy:
    """Delay before a child that died is restarted. Pure."""

    first_delay_s: float = 0.5
    delay_s_max: float = 30.0
    stable_after_s: float = 60.0  # a child that lived this long starts with a clean record

    def delay_s(self, num_deaths_in_a_row: int) -> float:
        """Seconds before the start that follows the n-th death, n from 1."""
        # The exponent is bounded so that a child dying for days does not overflow a float.
        return float(min(self.delay_s_max, self.first_delay_s * 2 ** min(num_deaths_in_a_row - 1, 30)))


def parse_ready_line(line: str) -> dict[str, Any] | None:
    """The object in a ready line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and fields.get("event") == "ready" else None
