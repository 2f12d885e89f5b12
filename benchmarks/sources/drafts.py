"""Compares draft models beside one target: the shipped one and one that reads mask tokens, unless told otherwise.

Every draft has its own pair of workers with their default settings, and slices of load on each follow each other. A
draft that reads mask tokens is measured once for each number of them (`--masks`). `over_first` is the ratio of speeds
to the first draft, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import DEMO, report, target_model
from benchmarks.speculation.modes import (
    Mode,
    ModeSlice,
    load_parser,
    measure_batches,
    prompts_of,
    ratios,
    speed_figures,
    start_modes,
    step_figures,
    total,
)
from outrider.engine.model import MASK_TOKEN_KEYS

PLAIN = "plain"


def reads_masks(draft: Path) -> bool:
    """Whether a model folder's configuration names a mask token."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    return any(config.get(key) is not None for key in MASK_TOKEN_KEYS)


def modes(drafts: Sequence[Path], masks: Sequence[int]) -> list[Mode]:
    """Plain decoding, then each draft."""
    wanted = [Mode(PLAIN, draft_arguments=None)]
    for draft in drafts:
        if reads_masks(draft):
            wanted += [
                Mode(f"{draft.name} {count}", draft_arguments=("--num-mask-tokens", str(count)), draft=draft)
                for count in masks
            ]
        else:
            wanted.append(Mode(draft.name, draft=draft))
    return wanted


def summarize(slices: Mapping[str, Sequence[ModeSlice]]) -> dict[str, Any]:
    """Figures of one batch size by draft."""
    plain, first = slices[PLAIN], list(slices.values())[1]
    summary: dict[str, Any] = {PLAIN: speed_figures(plain, None) | step_figures(total(plain))}
    for name, own in slices.items():
        if name != PLAIN:
            over_first = with_quartiles("over_first", ratios(own, first), 3)
            summary[name] = speed_figures(own, plain) | over_first | step_figures(total(own))
    return summary


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    wanted = modes(arguments.drafts, arguments.masks)
    with target_model(arguments) as target_dir:
        async with start_modes(wanted, target_dir, arguments.draft) as pairs:
            return await measure_batches(arguments, pairs, prompts_of(arguments, target_dir), summarize)


def main() -> None:
    parser = load_parser(__doc__, batch=(1, 8), seconds=2.0, rounds=5)
    folders = [DEMO / "draft", DEMO / "parallel_draft"]
    parser.add_argument("--drafts", type=Path, nargs="+", default=folders, help="model folders (default: the demo's)")
    parser.add_argument("--masks", type=int, nargs="+", default=[3], help="mask tokens in a pass (default 3)")
    arguments = parser.parse_args()
    report(arguments, asyncio.run(run(arguments)))


if __name__ == "__main__":
    main()
