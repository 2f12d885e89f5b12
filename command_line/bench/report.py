"""Table, warnings and chart lines of a run, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table
from rich.text import Text

from command_line.bench.cells import Cell
from command_line.bench.plot import Line, Panel
from command_line.load.load import Loop
from command_line.load.summary import Percentiles, Spread
from command_line.report import figure

CPU_SHARE_MAX: Final = 0.8  # of a core; above it, arrival times may be the client's own delays
LATE_MS_MAX: Final = 50.0
STALL_MS_MAX: Final = 50.0
_X_TITLES: Final = {Loop.CLOSED: "requests at once", Loop.OPEN: "requests per second sent"}


def table(cells: Sequence[Cell], servers: Sequence[str]) -> Table:
    """A column per server, a section per level. Times are p50 / p90 / p99 over all rounds, with the number of
    samples."""
    made = Table(title="Load", title_style="bold")
    made.add_column("", no_wrap=True)
    for name in servers:
        made.add_column(Text(name), justify="right")
    for level in dict.fromkeys(cell.level for cell in cells):
        by_server = {cell.server: cell for cell in cells if cell.level == level}
        made.add_section()
        made.add_row(Text(str(level), "bold"))
        columns = [_figures(by_server[name]) if name in by_server else {} for name in servers]
        for label in dict.fromkeys(label for column in columns for label in column):
            shown = [column.get(label, Text("-")) for column in columns]
            if any(each.plain != "-" for each in shown):  # not asked for, or not reported by any server
                made.add_row(label, *shown)
    return made


def _figures(cell: Cell) -> dict[str, Text]:
    summary, over = cell.summary, cell.over_rounds
    failed = f", {summary.num_failed} failed" if summary.num_failed else ""
    share = summary.goodput_share
    return {
        "requests": Text(f"{summary.num_ok} ok{failed}", "red" if failed else ""),
        "output tokens/s": Text(_spread(over["output_tokens_per_s"], 1), "bold"),
        "  against the first": Text(_spread(cell.against_first, 2, "×")),
        "requests/s": Text(_spread(over["requests_per_s"], 2)),
        "TTFT, ms": _percentiles(summary.ttft_ms, 0),
        "TPOT, ms": _percentiles(summary.tpot_ms, 1),
        "ITL, ms": _percentiles(summary.itl_ms, 1),
        "E2EL, ms": _percentiles(summary.e2el_ms, 0),
        "goodput": Text(
            "-" if share is None else f"{share:.0%}, {_spread(over['goodput_requests_per_s'], 2)} requests/s"
        ),
        "acceptance length τ": Text(figure(summary.mean_acceptance_length, "{:.2f}")),
    }  # fmt: skip


def _percentiles(found: Percentiles | None, digits: int) -> Text:
    if found is None:
        return Text("-")
    return Text.assemble(found.shown(digits), (f"  n {found.num_samples}", "dim"))


def _spread(found: Spread | None, digits: int, unit: str = "") -> str:
    if found is None:
        return "-"
    median = f"{found.median:.{digits}f}{unit}"
    if found.num_rounds == 1:
        return median
    return f"{median} ({found.min:.{digits}f}–{found.max:.{digits}f})"


def failures(cells: Sequence[Cell]) -> list[Text]:
    """A line per server, level and cause of failure."""
    return [
        Text.assemble(
            (f"{cell.server}, {cell.level}: {each.num_requests} × {cause}", "red"),
            f" {each.example}" if each.example else "",
        )
        for cell in cells
        for cause, each in cell.summary.failures.items()
    ]


def warnings(cells: Sequence[Cell], num_prompts: int) -> list[str]:
    """Warnings about why these figures may be wrong."""
    found = []
    busiest = max(cells, key=lambda cell: cell.client_cpu_share, default=None)
    if busiest is not None and busiest.client_cpu_share > CPU_SHARE_MAX:
        found.append(
            f"this client used {busiest.client_cpu_share:.0%} of a core at {busiest.level}: the server may be "
            "faster than it looks; run the client on a machine of its own, or several at lower levels"
        )
    longest = max((cell.client_stall_ms_max for cell in cells), default=0.0)
    if longest > STALL_MS_MAX:
        found.append(
            f"this client stood still for up to {longest:.0f} ms: the longest times may be caused by it, or by "
            "another process on its machine"
        )
    latest = max((cell.late_ms_max or 0.0 for cell in cells), default=0.0)
    if latest > LATE_MS_MAX:
        found.append(f"requests were sent up to {latest:.0f} ms after their time: this client was busy")
    num_by_chunks = sum(cell.summary.num_counted_by_chunks for cell in cells)
    if num_by_chunks:
        found.append(
            f"the server sent no usage with {num_by_chunks} answers: their tokens are counted by chunks, which is "
            "too few if a chunk contains several tokens, as with speculation"
        )
    if any(turn.results[num_prompts:] for cell in cells for turn in cell.turns):
        found.append(
            f"only {num_prompts} prompts, repeated: a server that caches prefixes skips their prefill, so TTFT is "
            "that of known prompts; --prompts FILE gives others"
        )
    return found


def panels(cells: Sequence[Cell], servers: Sequence[str]) -> list[Panel]:
    """Charts over the levels: throughput, and TPOT p50 with p99 dashed; one colour per server in their order."""
    levels = sorted({cell.level for cell in cells}, key=lambda level: level.value)
    by_place = {(cell.server, cell.level): cell for cell in cells}
    labels = [level.label for level in levels]
    x_title = _X_TITLES[levels[0].loop] if levels else ""
    throughput, tpot = [], []
    for color, name in enumerate(servers):
        own = [by_place.get((name, level)) for level in levels]
        rates = [cell.over_rounds["output_tokens_per_s"] if cell and cell.summary.num_ok else None for cell in own]
        times = [cell.summary.tpot_ms if cell else None for cell in own]
        throughput.append(Line([rate.median if rate else None for rate in rates], color))
        tpot.append(Line([each.p50 if each else None for each in times], color))
        tpot.append(Line([each.p99 if each else None for each in times], color, is_dashed=True))
    return [
        Panel("output tokens/s", x_title, labels, throughput),
        Panel("TPOT, ms: p50, p99 dashed", x_title, labels, tpot),
    ]
