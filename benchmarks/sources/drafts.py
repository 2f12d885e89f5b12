"""Compares sources of hints beside one target: the shipped draft and one that reads mask tokens, unless told otherwise.

Every source has its own pair of workers with their default settings, and slices of load on each follow each other. A
draft that reads mask tokens is measured once for each number of them (`--masks`). An EAGLE-3 head is measured on a
draft worker (`remote`) and beside the target's model (`local`), other heads there alone. `--early-exit` measures the
target's own first layers as a draft, and `lookup` the target without a draft worker. `over_first` is the ratio of
speeds to the first source, round by round. For draft workers, `free_draft` is the speed of a draft of the same
acceptance that costs nothing and is always in time (`benchmarks.speculation.bound`): nothing gained by drafting faster
can exceed it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import DEMO, report, target_model
from benchmarks.speculation.modes import (
    Mode,
    ModeSlice,
    bound_figures,
    load_parser,
    measure_batches,
    prompts_of,
    ratios,
    speed_figures,
    start_modes,
    step_figures,
    total,
)
from command_line.draft_kinds import Kind, kind_of_folder

PLAIN = "plain"
LOOKUP = Mode("lookup", ("--lookup",), None, has_local_hints=True)


def head_modes(head: Path, kind: Kind, target_dir: Path) -> list[Mode]:
    """A head where it can run."""
    beside = ("--draft-head", str(head))
    local = Mode(f"{head.name} local", beside, None, has_local_hints=True)
    if kind is not Kind.EAGLE3:
        return [local]
    tokenizer = ("--target-tokenizer", str(target_dir))
    return [Mode(f"{head.name} remote", (*beside, "--no-local-head"), tokenizer, draft=head), local]


def modes(drafts: Sequence[Path], masks: Sequence[int], early_exit: Sequence[int], target_dir: Path) -> list[Mode]:
    """Plain decoding, then each source."""
    wanted = [Mode(PLAIN, draft_arguments=None)]
    for draft in drafts:
        match kind_of_folder(draft):
            case Kind.MODEL:
                wanted.append(Mode(draft.name, draft=draft))
            case Kind.MASKS:
                wanted += [
                    Mode(f"{draft.name} {count}", draft_arguments=("--num-mask-tokens", str(count)), draft=draft)
                    for count in masks
                ]
            case kind:
                wanted += head_modes(draft, kind, target_dir)
    for layer in early_exit:
        arguments = ("--early-exit-layer", str(layer))
        wanted.append(Mode(f"{layer} layers", draft_arguments=arguments, draft=target_dir))
    return [*wanted, LOOKUP]


def summarize(local_names: Collection[str], slices: Mapping[str, Sequence[ModeSlice]]) -> dict[str, Any]:
    """Figures of one batch size by source. local_names: sources beside the target, whose time is a part of its steps'
    intervals, and which hint in some steps alone: no bound is known for them."""
    plain, first = slices[PLAIN], list(slices.values())[1]
    summary: dict[str, Any] = {PLAIN: speed_figures(plain, None) | step_figures(total(plain))}
    for name, own in slices.items():
        if name != PLAIN:
            over_first = with_quartiles("over_first", ratios(own, first), 3)
            figures, totals = speed_figures(own, plain), total(own)
            summary[name] = figures | over_first | step_figures(totals)
            if name not in local_names:
                summary[name] |= bound_figures(totals, total(plain), figures["speedup"])
    return summary


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with target_model(arguments) as target_dir:
        wanted = modes(arguments.drafts, arguments.masks, arguments.early_exit, target_dir)
        async with start_modes(wanted, target_dir, arguments.draft) as pairs:
            local_names = {mode.name for mode in wanted if mode.has_local_hints}
            prompts = prompts_of(arguments, target_dir)
            return await measure_batches(arguments, pairs, prompts, functools.partial(summarize, local_names))


def main() -> None:
    parser = load_parser(__doc__, batch=(1, 8), seconds=2.0, rounds=5)
    folders = [DEMO / "draft", DEMO / "parallel_draft"]
    parser.add_argument(
        "--drafts", type=Path, nargs="+", default=folders, help="model folders, or heads for the target (default: demo)"
    )
    parser.add_argument("--masks", type=int, nargs="+", default=[3], help="mask tokens in a pass (default 3)")
    parser.add_argument(
        "--early-exit", type=int, nargs="+", default=[], metavar="N", help="the target's first N layers"
    )
    arguments = parser.parse_args()
    for folder in arguments.drafts:
        if not (folder / "config.json").is_file():
            parser.error(f"--drafts {folder} has no config.json; name folders of models or draft heads")
    report(arguments, asyncio.run(run(arguments)))


if __name__ == "__main__":
    main()
