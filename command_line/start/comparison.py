"""Speculation off and on in the demo: figures, their comparison and its table. Pure."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from command_line.client import Answer
from command_line.report import figure


@dataclass(frozen=True)
class Measurement:
    """All answers of one mode together. Rates are None if no hint was verified."""

    tokens_per_s: float  # output tokens over the requests' time, first tokens included
    ttft_ms: float  # median
    tpot_ms: float  # median
    num_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_step: float | None  # hints of every source counted; None if unknown


@dataclass(frozen=True)
class Comparison:
    """Speculation off compared with on: same prompts, same server."""

    off: Measurement
    on: Measurement
    speedup: float  # tokens per second, on over off
    identical: bool  # all answers to a prompt are equal


def measure(answers: Sequence[Answer]) -> Measurement:
    """Sums and medians over the answers of one mode; at least one answer is needed."""
    hints = [answer.speculation for answer in answers if answer.speculation.get("num_draft_tokens")]
    num_drafted = sum(hint["num_draft_tokens"] for hint in hints)
    num_accepted = sum(hint["num_accepted_draft_tokens"] for hint in hints)
    num_steps = sum(hint["num_spec_steps"] for hint in hints)
    num_tokens = sum(answer.num_tokens for answer in answers)
    return Measurement(
        tokens_per_s=num_tokens / max(sum(answer.e2e_s for answer in answers), 1e-9),
        ttft_ms=statistics.median(answer.ttft_s for answer in answers) * 1e3,
        tpot_ms=statistics.median(answer.tpot_s for answer in answers) * 1e3,
        num_tokens=num_tokens,
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else None,
        mean_acceptance_length=1 + num_accepted / num_steps if num_steps else None,
        tokens_per_step=_tokens_per_step(answers),
    )


def _tokens_per_step(answers: Sequence[Answer]) -> float | None:
    counted = [answer for answer in answers if answer.speculation.get("num_steps")]
    num_steps = sum(answer.speculation["num_steps"] for answer in counted)
    return sum(answer.num_tokens for answer in counted) / num_steps if num_steps else None


def compare(off: Mapping[str, Sequence[Answer]], on: Mapping[str, Sequence[Answer]]) -> Comparison:
    """Compares two modes, given their answers by prompt."""
    measured_off = measure([answer for answers in off.values() for answer in answers])
    measured_on = measure([answer for answers in on.values() for answer in answers])
    identical = all(len({answer.text for answer in [*off[prompt], *on[prompt]]}) == 1 for prompt in off)
    speedup = measured_on.tokens_per_s / max(measured_off.tokens_per_s, 1e-9)
    return Comparison(measured_off, measured_on, speedup, identical)


def as_dict(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON, rounded to three digits."""

    def rounded(measurement: Measurement) -> dict[str, object]:
        return {
            name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(measurement).items()
        }

    return {
        "off": rounded(comparison.off),
        "on": rounded(comparison.on),
        "speedup": round(comparison.speedup, 3),
        "identical": comparison.identical,
    }


def table(comparison: Comparison, caption: str) -> Table:
    """One row per figure, one column per mode."""
    off, on = comparison.off, comparison.on
    made = Table(title="Speculation off and on, the same prompts", caption=caption, title_style="bold")
    made.add_column("")
    made.add_column("off", justify="right")
    made.add_column("on", justify="right", style="bold")
    made.add_row("tokens/s", f"{off.tokens_per_s:.1f}", f"{on.tokens_per_s:.1f}")
    made.add_row("TTFT, median", f"{off.ttft_ms:.0f} ms", f"{on.ttft_ms:.0f} ms")
    made.add_row("TPOT, median", f"{off.tpot_ms:.1f} ms", f"{on.tpot_ms:.1f} ms")
    made.add_row("draft acceptance rate", "", figure(on.draft_acceptance_rate, "{:.0%}"))
    made.add_row("mean acceptance length", "", figure(on.mean_acceptance_length, "{:.2f}"))
    made.add_row("speed-up", "", f"{comparison.speedup:.2f}×")
    verdict = Text("yes", "green") if comparison.identical else Text("NO", "bold red")
    made.add_row("outputs identical", "", verdict)
    return made


MIN_GAIN = 1.03
"""Smallest speed-up that is worth a source; two measurements of one system differ by as much."""


def sources_table(results: Sequence[tuple[str, Comparison]], caption: str) -> Table:
    """One row per source of hints, in the order in which they were measured."""
    made = Table(title="Tokens per second by source of hints, the same prompts", caption=caption, title_style="bold")
    made.add_column("source", no_wrap=True)
    for heading in ("off", "on", "speed-up", "tokens/step"):
        made.add_column(heading, justify="right")
    made.add_column("identical")
    best = max((comparison.speedup for _, comparison in results), default=0.0)
    for words, each in results:
        made.add_row(
            words,
            f"{each.off.tokens_per_s:.1f}",
            f"{each.on.tokens_per_s:.1f}",
            Text(f"{each.speedup:.2f}×", "bold" if each.speedup == best else ""),
            figure(each.on.tokens_per_step, "{:.2f}"),
            Text("yes", "green") if each.identical else Text("NO", "bold red"),
        )
    return made


def recommendation(words: str, comparison: Comparison, command: Sequence[str]) -> str:
    """The source that gained the most, and the command that serves it; plain decoding where none gained."""
    if comparison.speedup < MIN_GAIN:
        return f"No source is worth it for these prompts here: the best gave {comparison.speedup:.2f}×."
    return f"Fastest for these prompts here: {words}, {comparison.speedup:.2f}×. To serve it: {shlex.join(command)}"
