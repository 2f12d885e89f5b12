"""The page that a session on a GPU ends in, in plain text: its goals, whether they are met, and all figures. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 118
MARKS: Final = {True: "yes", False: "NO", None: "?"}
PLACES: Final = ("pair", "own_gpu", "cpu_draft")
STEP_WORDS: Final = "ms, ± half the middle 50 %, share of the limit (reading or arithmetic), GB/s of weights"
BANDWIDTH_LEAST: Final = 0.8
EIGHT_OVER_ONE_MOST: Final = 1.15

Parts = Mapping[str, Mapping[str, Any]]
"""By a part's name: its status, seconds, error and figures."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal, and what was found of it."""

    words: str
    is_met: bool | None  # None: not measured
    found: str


def figure(parts: Parts, part: str, *names: str) -> Any:
    """A figure of a part by the names that lead to it; None where there is none."""
    found: Any = parts.get(part, {}).get("figures", {})
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def goals(parts: Parts) -> list[Goal]:
    """All goals, in the order of the page."""
    failed, passed = (figure(parts, "tests", name) for name in ("failed", "passed"))
    changed, self_test = (figure(parts, "engine", name) for name in ("changed_compositions", "self_test_failures"))
    outputs = [
        found
        for part in ("pair", "own_gpu", "cpu_draft")
        for found in (
            figure(parts, part, "equal_outputs"),
            *(figure(parts, part, streams, "same_outputs") for streams in ("1", "8")),
        )
        if found is not None
    ]
    return [
        Goal(
            "tests/engine/test_cuda.py is green",
            None if failed is None else failed == 0 and bool(passed),
            "not run" if failed is None else f"{passed} passed, {failed} failed",
        ),
        _bounded(
            f"a plain step uses at least {BANDWIDTH_LEAST:.0%} of the measured bandwidth",
            figure(parts, "engine", "share_of_measured_bandwidth"),
            lambda share: share >= BANDWIDTH_LEAST,
            "{:.0%}",
        ),
        _bounded(
            f"a step of 8 rows takes at most {EIGHT_OVER_ONE_MOST}× one of 1 row",
            figure(parts, "engine", "eight_over_one"),
            lambda ratio: ratio <= EIGHT_OVER_ONE_MOST,
            "{:.2f}×",
        ),
        Goal(
            "bits of a sequence are equal in any batch composition",
            None if changed is None else not changed and not self_test,
            "not measured" if changed is None else _named([*changed, *(self_test or [])]),
        ),
        Goal(
            "greedy outputs through workers are equal with the draft and without it",
            all(outputs) if outputs else None,
            f"{sum(outputs)} of {len(outputs)} comparisons equal" if outputs else "not measured",
        ),
    ]


def _bounded(words: str, value: Any, is_met: Callable[[float], bool], form: str) -> Goal:
    if not isinstance(value, (int, float)):
        return Goal(words, None, "not measured")
    return Goal(words, is_met(value), form.format(value))


def _named(failures: list[str]) -> str:
    return "changed: " + "; ".join(failures) if failures else "all equal"


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    parts: Parts = report["parts"]
    sections = (
        ("", _head(report, parts)),
        ("GOALS", _goals(parts)),
        ("STEPS", _steps(parts)),
        ("WORKERS, greedy, the target's decoding alone against decoding with the draft", _workers(parts)),
        ("TESTS", _tests(parts)),
        ("NOT DONE", _not_done(parts)),
        ("TIME", _times(report, parts)),
    )
    lines: list[str] = []
    for title, own in sections:
        shown = list(own)
        if shown:
            lines += ["", title, *(f"  {line}" for line in shown)] if title else shown
    return "\n".join(lines) + "\n"


def _head(report: Mapping[str, Any], parts: Parts) -> Iterator[str]:
    def own(name: str) -> Any:
        return figure(parts, "device", name)

    yield f"Outrider on a GPU: {own('device') or 'no device was measured'}, commit {report['commit']}"
    yield (
        f"driver {own('driver')}, CUDA {own('cuda')}, torch {own('torch')}, transformers {own('transformers')}, "
        f"Python {own('python')}; {own('hardware')}; {own('measured_at')}"
    )
    sheet, read = own("data_sheet_gb_per_s"), own("read_gb_per_s")
    of_sheet = f" ({read / sheet:.0%} of the data sheet's {sheet:.0f})" if sheet and read else ""
    yield (
        f"reads {read} GB/s{of_sheet}, copies {own('copy_gb_per_s')} GB/s (read and written), "
        f"computes {own('tflop_per_s')} TFLOP/s in bfloat16"
    )
    if missing := own("missing_in_varlen_attn"):
        yield f"torch's attention over block tables lacks {', '.join(missing)}: KV is gathered, without CUDA graphs"
    if missing := own("missing_packages"):
        yield f"packages of a worker that are missing here: {', '.join(missing)}"


def _goals(parts: Parts) -> Iterator[str]:
    for each in goals(parts):
        yield from _wrapped(f"{MARKS[each.is_met]:4}{each.words}: {each.found}", 4)


def _steps(parts: Parts) -> Iterator[str]:
    for model in ("target", "draft"):
        steps: Mapping[str, Mapping[str, float]] = figure(parts, "engine", f"{model}_steps") or {}
        size = figure(parts, "checkpoints", f"{model}_parameters")
        if steps:
            named = f"{model}, {size / 1e9:.3g} B parameters" if size else model
            yield f"{named}; sequences × rows: {STEP_WORDS}"
        for kind, each in steps.items():
            yield (
                f"  {kind.replace('x', ' × '):>6}: {each['ms']:8.2f} ± {each['spread_ms'] / 2:.2f}   "
                f"{each['share_of_limit']:4.0%}   {each['weights_gb_per_s']:.0f}"
            )
    one, sheet = figure(parts, "engine", "target_steps", "1x1"), figure(parts, "device", "data_sheet_gb_per_s")
    if one and sheet:
        yield f"a plain step reads its weights at {one['weights_gb_per_s'] / sheet:.0%} of the data sheet's bandwidth"
    for name, words in (
        ("prompt_of_2000_ms", "a prompt of 2,000 tokens, 512 rows a step"),
        ("prompt_of_2000_in_one_step_ms", "the same in one step"),
    ):
        if (value := figure(parts, "engine", name)) is not None:
            yield f"{words}: {value} ms"
    if (number := figure(parts, "engine", "graphs")) is not None:
        paged = figure(parts, "engine", "attends_over_the_block_table")
        yield f"attention over the block table: {'yes' if paged else 'no'}; CUDA graphs: {number}"
    for name in ("target", "draft"):
        written, loaded = (
            figure(parts, "checkpoints", f"{name}_written_in_s"),
            figure(parts, "engine", f"{name}_loaded_in_s"),
        )
        if written is not None:
            yield f"{name}: written in {written} s, loaded in {'-' if loaded is None else loaded} s"


def _workers(parts: Parts) -> Iterator[str]:
    for part in PLACES:
        name = figure(parts, part, "draft")
        for streams in ("1", "8"):
            own = figure(parts, part, streams)
            if own is None:
                continue
            yield (
                f"draft {name}, {streams} stream{'' if streams == '1' else 's'}: "
                f"{_spread(own['plain_tokens_per_s'])} → {_spread(own['draft_tokens_per_s'])} tokens/s, "
                f"{_spread(own['speedup'], '×')}"
            )
            yield (
                f"    {own['tokens_per_step']} tokens a step, {own['acceptance']:.3f} of {own['num_judged']} judged "
                f"hints accepted, TPOT {own['plain_tpot_ms']} → {own['draft_tpot_ms']} ms"
            )
    wanted, real = (figure(parts, "checkpoints", f"acceptance_{name}") for name in ("wanted", "of_the_weights"))
    if wanted is not None:
        yield f"acceptance by construction: {wanted}, of the weights without layers: {real}"
    yield from figure(parts, "prediction", "lines") or ()


def _spread(value: Mapping[str, Any] | None, unit: str = "") -> str:
    if value is None:
        return "-"
    low, high = value["quartiles"]
    return f"{value['median']:.4g}{unit} ({low:.4g} to {high:.4g})"


def _tests(parts: Parts) -> Iterator[str]:
    counts = [figure(parts, "tests", name) for name in ("passed", "failed", "skipped")]
    if counts[0] is not None:
        yield "{} passed, {} failed, {} skipped".format(*counts)
    failures: Mapping[str, list[str]] = figure(parts, "tests", "failures") or {}
    for name, lines in failures.items():
        yield f"{name}:"
        yield from (f"    {line}" for line in lines)
    if more := figure(parts, "tests", "failures_not_shown"):
        yield f"and {more} more"
    yield from figure(parts, "tests", "printed") or ()


def _not_done(parts: Parts) -> Iterator[str]:
    for name, part in parts.items():
        if part["status"] != "done":
            yield from _wrapped(f"{name}: {part['status']}: {part['why']}", 4)
            yield from (f"    {line}" for line in part.get("error", ()))
        for each in figure(parts, name, "skipped") or () if name != "tests" else ():
            yield from _wrapped(f"{name}, {each}", 4)


def _times(report: Mapping[str, Any], parts: Parts) -> Iterator[str]:
    taken = ", ".join(f"{name} {part['seconds']:.0f}" for name, part in parts.items() if part["seconds"])
    yield from _wrapped(f"seconds: {taken}; together {report['seconds']:.0f} of {report['minutes'] * 60:.0f}", 4)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2, subsequent_indent=" " * indent) or [""]
