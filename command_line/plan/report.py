"""Prints the plan of a device, as a table or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from command_line.plan.device_plan import DevicePlan
from command_line.terminal import TerminalConsole
from outrider.engine.kv.kv_plan import ModelMemory, in_words


def as_json(found: DevicePlan) -> dict[str, Any]:
    parts = {role: _parts(each.needs) for role, each in found.loads.items()}
    return {
        **parts["target"],
        "draft": parts.get("draft"),
        "num_tokens": found.num_tokens,
        "sessions_by_length": found.sessions_by_length,
        "missing": found.missing,
        "memory": found.memory.free,
        "usable": found.usable,
        "starts": found.refusal is None,
        "refusal": found.refusal,
        "workers": {role: asdict(each) | {"num_tokens": each.num_tokens} for role, each in found.workers.items()},
    }


def _parts(model: ModelMemory) -> dict[str, int]:
    return {name: getattr(model, name) for name in ("weights", "kv_per_token", "step", "process")}


def report(found: DevicePlan, *, is_given: bool) -> None:
    console = TerminalConsole()
    free = found.memory.free
    rest = "; the rest is held back (--memory-utilization)" if found.usable < free else ""
    console.print(
        f"{found.loads['target'].options.model.resolve().name}: {in_words(found.usable)} of each rank's device may be "
        f"used. That is {found.usable / free:.0%} of {in_words(free)} "
        f"({'--memory' if is_given else 'what is free here'}){rest}.",
        soft_wrap=True,
    )
    table = Table()
    table.add_column("")
    for role in found.loads:
        table.add_column(role, justify="right")
    for label, name in (
        ("weights", "weights"),
        ("a step's work", "step"),
        ("the process", "process"),
        ("KV of a token", "kv_per_token"),
    ):
        table.add_row(label, *(in_words(getattr(each.needs, name)) for each in found.loads.values()))
    console.print(table)
    if found.refusal is not None:
        console.print(f"It does not fit. A worker would refuse to start: {found.refusal}.", soft_wrap=True)
        return
    console.print(f"KV of {found.num_tokens:,} tokens fits. Sessions at once, by their length in tokens:")
    shown = (f"{length:,}: {n:,}" for length, n in found.sessions_by_length.items())
    console.print("  " + "   ".join(shown), soft_wrap=True)
    for role, each in found.workers.items():
        console.print(
            f"A {role} worker starts: {in_words(each.num_bytes)} on each rank for KV of {each.num_tokens:,} tokens; "
            f"longest sequence {each.max_model_len:,}.",
            soft_wrap=True,
        )
