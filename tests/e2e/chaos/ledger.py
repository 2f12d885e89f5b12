"""Effects of faults on requests, counted by kind of fault, and the table made of them. Pure: times are passed in."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.recovery.poison import LOSSES_MAX
from tests.e2e.chaos.costs import Costs
from tests.e2e.chaos.verdict import Answer, Incident, Kind, Verdict
from tests.e2e.tables import add_up, markdown_table

QUIET = "(no fault)"
POISONOUS = "target workers were lost"
"""Part of the error of a request that is ended for its losses, and of requests with its prompt in the next two
minutes."""
OF_ANOTHER = "to a request with this prompt"
"""Part of the error of the latter."""
MAX_LOST = 3
"""The number of targets that may be lost to one request where no others are: the default of `target_attempts_max`."""
LATE_S = 10.0
"""Time after the end of a fault in which its costs may still come to light: a connection that nobody used meanwhile."""


@dataclass
class Injection:
    """One fault, from its beginning until everything serves again. Times are those of the clients' clock."""

    number: int
    name: str
    began_s: float
    costs: Costs = Costs.NOTHING
    takes_room: bool = False  # while it lasts, fewer sequences can run
    detail: str = ""
    mended_s: float = float("inf")  # from here on it is a matter of time
    recovered_s: float = float("inf")  # everything serves again
    problem: str | None = None  # what did not recover

    def hits(self, asked_s: float, ended_s: float) -> bool:
        """Whether a request was under way when it began, or came before it was mended."""
        return asked_s <= max(self.began_s, self.mended_s) and ended_s >= self.began_s

    def overlaps(self, answer: Answer) -> bool:
        """Whether the request was under way at any moment until everything served again."""
        return answer.asked_s <= self.recovered_s and answer.ended_s >= self.began_s

    def lasted(self, at_s: float) -> bool:
        """Whether what it has cost could come to light then."""
        return self.began_s <= at_s <= self.recovered_s + LATE_S

    def explains(self, incident: Incident) -> bool:
        """Whether the client had to bear with it for this fault's sake."""
        is_allowed = self.costs is Costs.CAPACITY or (self.costs is Costs.CONNECTIONS and not incident.is_refusal)
        return is_allowed and self.lasted(incident.at_s)


@dataclass
class Row:
    """One kind of fault."""

    name: str
    num_injected: int = 0
    num_requests: int = 0  # that were under way when it began, or came before it was mended
    num_tokens: Counter[Kind] = field(default_factory=Counter)
    num_refused: int = 0  # and never answered
    num_refusals: int = 0  # that the client got over by asking again
    num_breaks: int = 0  # of connections, likewise
    gaps_s: list[float] = field(default_factory=list)  # longest of each request that met it
    recovery_s: list[float] = field(default_factory=list)


class Ledger:
    """Takes injections as they begin and answers as they end."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.failures: list[str] = []
        self.num_answers = 0
        self.num_left = 0
        self._recent: list[Injection] = []

    def begin(self, injection: Injection) -> None:
        self._recent.append(injection)
        self.row(injection.name).num_injected += 1

    def mended(self, injection: Injection, now_s: float) -> None:
        """Records that the fault has been repaired."""
        injection.mended_s = now_s

    def end(self, injection: Injection, now_s: float, problem: str | None) -> None:
        """Records the end of a fault: `problem` says what has not recovered, if anything."""
        injection.mended_s = min(injection.mended_s, now_s)
        injection.recovered_s, injection.problem = now_s, problem
        self.row(injection.name).recovery_s.append(now_s - injection.began_s)
        if problem is not None:
            self.failures.append(
                f"{injection.number} {injection.name} ({injection.detail}): did not recover: {problem}"
            )

    def add(self, name: str, answer: Answer, verdict: Verdict, oldest_open_s: float) -> None:
        """Adds the answer to the request `name`. Injections that ended before `oldest_open_s`, when the oldest request
        still under way was asked, are forgotten."""
        self.num_answers += 1
        self.num_left += answer.has_left
        for injection in self._recent:
            if injection.hits(answer.asked_s, answer.ended_s):
                row = self.row(injection.name)
                row.num_requests += 1
                if not answer.has_left and answer.error is None:
                    row.gaps_s.append(longest_gap_s(answer, injection.began_s, injection.recovered_s))
        for incident in answer.incidents:
            self._take_incident(name, incident, answer.asked_s)
        if verdict.kind is not Kind.RIGHT:
            met = [injection for injection in self._recent if injection.overlaps(answer)]
            # With several at once the one that began last is the likeliest.
            row = self.row(met[-1].name if met else QUIET)
            if verdict.kind is Kind.REFUSED:
                row.num_refused += 1
            else:
                row.num_tokens[verdict.kind] += verdict.num_tokens
            during = ", ".join(f"{each.number} {each.name} ({each.detail})" for each in met) or QUIET
            self.failures.append(f"{name}: {verdict.kind.value}: {verdict.detail}; during {during}")
        self._recent = [each for each in self._recent if each.recovered_s + LATE_S >= oldest_open_s]

    def _take_incident(self, name: str, incident: Incident, asked_s: float) -> None:
        causes = [each for each in self._recent if each.explains(incident)]
        if POISONOUS in incident.words:
            # An innocent one may be taken for the end of targets only where it has met as many that ended.
            met = [each for each in self._recent if each.takes_room and each.hits(asked_s, incident.at_s)]
            num_lost = sum(LOSSES_MAX if each.costs is Costs.CAPACITY else 1 for each in met)
            # What another request with this prompt was ended for is judged where that is.
            is_explained = num_lost >= MAX_LOST or OF_ANOTHER in incident.words
            causes = (met or self._recent[-1:]) if is_explained else []
        elif not causes and incident.is_refusal:
            # One at a time leaves room enough. Where there are two, two of three or four targets may be away, or both
            # replicas of a coordinator.
            takers = [each for each in self._recent if each.takes_room and each.lasted(incident.at_s)]
            causes = takers if len(takers) > 1 else []
        row = self.row(causes[-1].name if causes else QUIET)
        if incident.is_refusal:
            row.num_refusals += 1
        else:
            row.num_breaks += 1
        if not causes:
            what = "refused" if incident.is_refusal else "a connection broke"
            during = [each for each in self._recent if each.lasted(incident.at_s)]
            about = ", ".join(f"{each.number} {each.name} ({each.detail})" for each in during) or QUIET
            self.failures.append(f"{name}: {what} without need: {incident.words}; during {about}")

    def name_of_fault(self, asked_s: float, ended_s: float) -> str:
        """The last one that a request hit, which is to be asked for before the next answer is added."""
        return next((each.name for each in reversed(self._recent) if each.hits(asked_s, ended_s)), QUIET)

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row(name))

    def total(self) -> Row:
        """All faults together."""
        return add_up(Row("**all**"), self.rows.values(), leaving_out=("name",))

    def to_json(self) -> dict[str, Any]:
        return {
            "faults": [_row_to_json(row) for row in self._sorted_with_total()],
            "num_answers": self.num_answers,
            "num_clients_that_left": self.num_left,
            "failures": self.failures,
        }

    def markdown(self) -> str:
        """The table of `docs/benchmarks/faults.md`."""
        titles = (
            "Fault | injected | requests in flight | lost | repeated | wrong | never answered "
            "| asked again: refused / broken | next token p50 / p99"
        )
        cells = [
            [
                *(row.name, row.num_injected, row.num_requests),
                *(row.num_tokens[kind] for kind in (Kind.LOST, Kind.REPEATED, Kind.WRONG)),
                *(row.num_refused, f"{row.num_refusals} / {row.num_breaks}", p50_and_p99(row.gaps_s)),
            ]
            for row in self._sorted_with_total()
        ]
        return markdown_table(titles, cells)

    def _sorted_with_total(self) -> list[Row]:
        return [*(self.rows[name] for name in sorted(self.rows)), self.total()]


def longest_gap_s(answer: Answer, began_s: float, recovered_s: float) -> float:
    """The longest wait for a token, first ones included, that touched the time of the fault, seconds."""
    moments = [answer.asked_s, *answer.chunk_times_s]
    waits = itertools.pairwise(moments)
    return max((after - before for before, after in waits if after >= began_s and before <= recovered_s), default=0.0)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many per cent do not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, -int(-percent * len(ordered) // 100) - 1)]


def p50_and_p99(values_s: Sequence[float]) -> str:
    return f"{in_words(percentile(values_s, 50))} / {in_words(percentile(values_s, 99))}"


def in_words(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def _row_to_json(row: Row) -> dict[str, Any]:
    def rounded(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else round(value, 4) for value in values]

    next_p50, next_p99, next_max = rounded(percentile(row.gaps_s, each) for each in (50, 99, 100))
    recovery_p50, recovery_max = rounded(percentile(row.recovery_s, each) for each in (50, 100))
    return {
        "name": row.name.strip("*"),
        "num_injected": row.num_injected,
        "num_requests": row.num_requests,
        "num_lost_tokens": row.num_tokens[Kind.LOST],
        "num_repeated_tokens": row.num_tokens[Kind.REPEATED],
        "num_wrong_tokens": row.num_tokens[Kind.WRONG],
        "num_refused_requests": row.num_refused,
        "num_refusals_repeated": row.num_refusals,
        "num_connections_broken": row.num_breaks,
        "time_to_next_token_p50_s": next_p50,
        "time_to_next_token_p99_s": next_p99,
        "time_to_next_token_max_s": next_max,
        "recovery_p50_s": recovery_p50,
        "recovery_max_s": recovery_max,
    }
