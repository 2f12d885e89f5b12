"""Results by server and level: over all rounds, per round and relative to the first server. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from command_line.load.load import Level, Loop, Turn
from command_line.load.summary import (
    MS_PER_S,
    RequestResult,
    Slo,
    Spread,
    Summary,
    ratios,
    spread,
    summarize,
)

_PERCENTILES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
_RATES: Final = ("output_tokens_per_s", "requests_per_s", "goodput_share", "goodput_requests_per_s")


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Results of one turn."""

    turn: Turn
    results: tuple[RequestResult, ...]  # by index
    client_cpu_share: float  # of one core, used by the client; near 1 the client is the bottleneck
    client_stall_ms_max: float  # longest time that the client's event loop did not run


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one server at one level."""

    server: str  # the server's name
    level: Level
    turns: tuple[TurnResult, ...]  # in the order of the rounds
    summary: Summary  # over all rounds
    rounds: tuple[Summary, ...]
    against_first: Spread | None  # output tokens per second over the first server's, round by round

    @property
    def over_rounds(self) -> dict[str, Spread | None]:
        """Medians and extremes over rounds by name of the figure; percentiles are named `tpot_ms_p50` and so on."""
        spreads = {name: spread(getattr(each, name) for each in self.rounds) for name in _RATES}
        for name in _PERCENTILES:
            found = [getattr(each, name) for each in self.rounds]
            for share in ("p50", "p90", "p99"):
                spreads[f"{name}_{share}"] = spread(getattr(each, share) for each in found if each)
        return spreads

    @property
    def client_cpu_share(self) -> float:
        """CPU share of the client in its busiest turn."""
        return max((each.client_cpu_share for each in self.turns), default=0.0)

    @property
    def client_stall_ms_max(self) -> float:
        """Longest stall of the client in any turn."""
        return max((each.client_stall_ms_max for each in self.turns), default=0.0)

    @property
    def late_ms_max(self) -> float | None:
        """Longest delay of a request behind its arrival time; None in a closed loop."""
        if self.level.loop is Loop.CLOSED:
            return None
        return max((each.late_s * MS_PER_S for turn in self.turns for each in turn.results), default=0.0)


def cells(servers: Sequence[str], measured: Iterable[TurnResult], slo: Slo) -> list[Cell]:
    """A cell per level and server that had a turn, in the order of levels, then servers."""
    found: dict[tuple[Level, int], list[TurnResult]] = {}
    for each in measured:
        found.setdefault((each.turn.level, each.turn.server), []).append(each)
    levels = list(dict.fromkeys(level for level, _ in found))
    summaries = {
        place: {each.turn.number: summarize([each.results], slo) for each in taken} for place, taken in found.items()
    }
    made = []
    for level, server in sorted(found, key=lambda place: (levels.index(place[0]), place[1])):
        own, first = summaries[level, server], summaries.get((level, 0), {})
        both = [number for number in own if number in first] if server else []
        taken = found[level, server]
        made.append(
            Cell(
                server=servers[server],
                level=level,
                turns=tuple(taken),
                summary=summarize([each.results for each in taken], slo),
                rounds=tuple(own.values()),
                against_first=spread(
                    ratios(
                        [own[number].output_tokens_per_s for number in both],
                        [first[number].output_tokens_per_s for number in both],
                    )
                ),
            )
        )
    return made
