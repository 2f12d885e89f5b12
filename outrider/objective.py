"""Service-level objectives: the time to the first token and the time per output token that a client asks for. Pure.

A request meets its objective if its time to first token (TTFT) and its mean time per output token after the first
(TPOT) are at most what it asks for; *goodput* counts the requests that do (Zhong et al. 2401.09670, DistServe). An
objective is an aim and no deadline: a request that misses it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self, TypeVar

from outrider.errors import InvalidRequest
from outrider.sampling_params import Bounds
from protos.outrider.v1 import common_pb2

OBJECTIVE_MS_BOUNDS: Final = Bounds(0, 3_600_000, is_open=True)
"""Milliseconds that an objective may be: more than 0, at most an hour."""
PATIENCE_S: Final = 5.0
"""Longest that a sequence without an objective lets later ones of its tenant go first, seconds."""
KINDS: Final = ("ttft", "tpot")
"""Names of the two parts of an objective."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The times that a request asks for, milliseconds; infinite where it asks for none. Raises InvalidRequest."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf

    def __post_init__(self) -> None:
        for kind in KINDS:
            if not math.isinf(value := getattr(self, f"{kind}_ms")) or value < 0:
                OBJECTIVE_MS_BOUNDS.check(f"slo.{kind}_ms", value)

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return not (math.isinf(self.ttft_ms) and math.isinf(self.tpot_ms))

    def or_else(self, default: Objective) -> Objective:
        """The same with the default's times where this one asks for none."""
        return Objective(
            default.ttft_ms if math.isinf(self.ttft_ms) else self.ttft_ms,
            default.tpot_ms if math.isinf(self.tpot_ms) else self.tpot_ms,
        )

    def since(self, spent_ms: float) -> Objective:
        """The same for one who hears of the request `spent_ms` after its arrival; a first token that would be late
        in any case is not asked for."""
        left_ms = self.ttft_ms - spent_ms
        return replace(self, ttft_ms=left_ms if left_ms > 0 else math.inf)

    def outcome(self, ttft_ms: float | None, tpot_ms: float | None) -> dict[str, bool]:
        """Whether each time that is asked for is met, by its kind. None: there was nothing to measure, which misses a
        time to first token and meets a time per output token."""
        met = {
            "ttft": ttft_ms is not None and ttft_ms <= self.ttft_ms,
            "tpot": tpot_ms is None or tpot_ms <= self.tpot_ms,
        }
        return {kind: is_met for kind, is_met in met.items() if not math.isinf(getattr(self, f"{kind}_ms"))}

    @classmethod
    def from_proto(cls, message: common_pb2.Objective) -> Self:
        """Raises InvalidRequest. 0 asks for nothing."""
        return cls(message.ttft_ms or math.inf, message.tpot_ms or math.inf)

    def to_proto(self) -> common_pb2.Objective:
        """The message; 0 where nothing is asked for."""
        return common_pb2.Objective(
            ttft_ms=0.0 if math.isinf(self.ttft_ms) else self.ttft_ms,
            tpot_ms=0.0 if math.isinf(self.tpot_ms) else self.tpot_ms,
        )


NO_OBJECTIVE: Final = Objective()


def parse_tenant_objective(text: str) -> tuple[str, Objective]:
    """Parses the tenant and its objective from NAME=ttft:MS,tpot:MS, of which one may be left out. Raises ValueError,
    which states what is permitted."""
    name, _, times = text.rpartition("=")
    found: dict[str, float] = {}
    for part in times.split(","):
        kind, _, number = part.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if kind not in KINDS or kind in found or math.isnan(value):
            raise ValueError(f"{text!r} is not NAME=ttft:MS,tpot:MS, such as gold=ttft:500,tpot:40 or *=tpot:100")
        found[kind] = value
    return name, tenant_objective(name, found)


def tenant_objective(name: str, times: Mapping[str, float]) -> Objective:
    """Makes a tenant's objective of milliseconds by kind. Raises ValueError, which states what is permitted."""
    for kind, value in times.items():
        if kind not in KINDS:
            raise ValueError(f"the objective of tenant {name!r} has {kind!r}; permitted: {' and '.join(KINDS)}")
        try:
            OBJECTIVE_MS_BOUNDS.check(f"the {kind} of tenant {name!r}", value)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
    return Objective(**{f"{kind}_ms": value for kind, value in times.items()})


class Turn(NamedTuple):
    """Facts that decide when one of several that wait goes, beside its position among them."""

    group: Hashable  # it changes places with others of its group alone
    since_s: float  # its arrival
    due_at: float = math.inf  # when its first token is due; infinite: never


ItemT = TypeVar("ItemT")


def by_due(waiting: Sequence[ItemT], turns: Sequence[Turn], now: float) -> list[ItemT]:
    """Orders those that wait within each group by the time that their first token is due, the earliest first (EDF).

    The positions of a group among the others stay, so whatever is fair between groups stays fair. One without an
    objective, or whose time is over, is due PATIENCE_S after its arrival: so nobody waits for ever, and where nobody
    has an objective the order is that of before. Times are on the caller's clock, seconds.
    """
    due_at: list[float] = []
    latest: dict[Hashable, float] = {}  # arrival in each group so far: order, not clocks, decides among equals
    members: dict[Hashable, list[int]] = {}
    for index, turn in enumerate(turns):
        latest[turn.group] = max(latest.get(turn.group, -math.inf), turn.since_s)
        patient = latest[turn.group] + PATIENCE_S
        due_at.append(min(turn.due_at, patient) if turn.due_at > now else patient)
        members.setdefault(turn.group, []).append(index)
    ordered = list(waiting)
    for indices in members.values():
        for place, index in zip(indices, sorted(indices, key=due_at.__getitem__), strict=True):
            ordered[place] = waiting[index]
    return ordered
