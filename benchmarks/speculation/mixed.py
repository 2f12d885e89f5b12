"""Mixed traffic, of which 50 % drafts badly.

Requests of two kinds alternate in one closed loop: held-out prompts decoded greedily, and a kind whose hints are
rarely accepted. The question is whether speculation for the second kind slows anybody down. Four modes are compared,
each with its own workers: `off` (no draft), `on` (all requests have a draft, and the target chooses whether to accept
hints), `good only` (the first kind has a draft), `always` (all have one, and the target must accept hints). A target
that is paused shows little of acceptance; `always` shows it for both kinds. The kinds differ in speed, so 50 % of the
requests is not 50 % of the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.shared import plot
from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.options import report, target_model
from benchmarks.shared.worker_pair import Generation, WorkerPair
from benchmarks.speculation.bound import acceptance_rate
from benchmarks.speculation.modes import (
    Mode,
    ModeSlice,
    Window,
    greedy,
    load_parser,
    measure_batches,
    prompts_of,
    speed_figures,
    start_modes,
    step_figures,
    total,
    tpot_figures,
    window,
)
from outrider.sampling_params import SamplingParams

OFF, ON, GOOD_ONLY, ALWAYS = "off", "on", "good only", "always"
GOOD, BAD = "good", "bad"
BAD_KINDS = ("random", "random-hot", "hot", "shuffled")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request."""

    name: str
    prompts: list[list[int]]
    sampling: SamplingParams


@dataclass
class MixedPair(WorkerPair):
    """A pair that sends every prompt with the parameters of its kind."""

    kinds: dict[tuple[int, ...], Kind] = field(default_factory=dict)
    with_draft: frozenset[str] = frozenset()  # names of kinds
    has_seeds: bool = True  # of sampled requests, as the coordinator draws them
    seeds: Iterator[int] = field(default_factory=itertools.count)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        kind = self.kinds[tuple(token_ids)]
        options["use_draft"] = kind.name in self.with_draft
        sampled = kind.sampling
        if self.has_seeds and sampled.temperature:
            sampled = replace(sampled, seed=next(self.seeds))
        return await WorkerPair.generate(self, token_ids, sampled, **options)


def bad_kind(name: str, good: Kind, vocab_size: int, temperature: float) -> Kind:
    """One of BAD_KINDS: random or shuffled prompts, sampled at `temperature` if "hot"."""
    rng = random.Random(7)
    prompts = [list(prompt) for prompt in good.prompts]
    if name.startswith("random"):
        prompts = [[rng.randrange(vocab_size) for _ in prompt] for prompt in prompts]
    else:
        # Hot ones too: a prompt's tokens identify its kind.
        for prompt in prompts:
            if name == "shuffled":
                rng.shuffle(prompt)
            else:
                prompt.pop(0)
    sampling = good.sampling
    if name.endswith("hot"):
        sampling = SamplingParams(temperature=temperature, max_tokens=good.sampling.max_tokens, ignore_eos=True)
    return Kind(BAD, prompts, sampling)


def alternating(kinds: Sequence[Kind]) -> list[list[int]]:
    """Prompts of all kinds, alternating."""
    return [prompt for group in zip(*(kind.prompts for kind in kinds), strict=True) for prompt in group]


def windows_of(name: str, slices: Iterable[ModeSlice], kinds: Mapping[tuple[int, ...], Kind]) -> list[Window]:
    """Results of one kind's requests in each slice."""
    return [
        window(
            [generation for prompt, generation in each.recorded if kinds[tuple(prompt)].name == name],
            each.begin,
            each.end,
        )
        for each in slices
    ]


def kind_figures(own: Sequence[Window], off: Sequence[Window] | None) -> dict[str, Any]:
    """Speed, time per token and acceptance of one kind; ratios to the mode without drafts, round by round."""
    num_steps = sum(each.num_steps for each in own)
    figures: dict[str, Any] = {
        "tokens_per_s": round(statistics.median(each.tokens_per_s for each in own), 1),
        "tokens_per_step": round(sum(each.num_tokens for each in own) / max(num_steps, 1), 3),
        "acceptance": round(
            acceptance_rate(sum(each.num_accepted for each in own), sum(each.num_rejected for each in own)), 3
        ),
        "requests": sum(len(each.tpot_ms) for each in own),
    }
    figures |= tpot_figures([ms for each in own for ms in each.tpot_ms])
    if off is not None:
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(own, off, strict=True) if b.tokens_per_s]
        figures |= with_quartiles("tokens_per_s_over_off", ratios, 3)
        before = tpot_figures([ms for each in off for ms in each.tpot_ms])
        for name in before.keys() & figures.keys():
            figures[f"{name}_over_off"] = round(figures[name] / before[name], 3)
    return figures


def summarize(slices: Mapping[str, Sequence[ModeSlice]], kinds: Mapping[tuple[int, ...], Kind]) -> dict[str, Any]:
    """Figures of one batch size: by mode, all requests together and by kind."""
    summary: dict[str, Any] = {}
    for mode, own in slices.items():
        together = speed_figures(own, None if mode == OFF else slices[OFF]) | step_figures(total(own))
        by_kind = {
            name: kind_figures(
                windows_of(name, own, kinds),
                None if mode == OFF else windows_of(name, slices[OFF], kinds),
            )
            for name in (GOOD, BAD)
        }
        summary[mode] = {"together": together, **by_kind}
    return summary


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws the median time per output token by kind, with whiskers up to the 99th percentile."""
    groups = {
        f"{name}, {num_streams} streams": {
            mode: (each[name]["tpot_ms_p50"], each[name]["tpot_ms_p50"], each[name]["tpot_ms_p99"])
            for mode, each in figures.items()
            if "tpot_ms_p50" in each[name]
        }
        for num_streams, figures in result["batch"].items()
        for name in (GOOD, BAD)
    }
    title = f"Time per output token in mixed traffic, p50 up to p99, {result['load']['target']}"
    plot.bars(path, title, groups, "ms")


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    both = frozenset({GOOD, BAD})
    drafted = {OFF: frozenset[str](), ON: both, GOOD_ONLY: frozenset({GOOD}), ALWAYS: both}
    modes = [
        Mode(OFF, draft_arguments=None),
        Mode(ON),
        Mode(GOOD_ONLY),
        Mode(ALWAYS, target_arguments=("--always-listen",)),
    ]
    with target_model(arguments) as target_dir:
        good = Kind(GOOD, prompts_of(arguments, target_dir), greedy(arguments))
        config = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
        bad = bad_kind(arguments.bad_kind, good, config["vocab_size"], arguments.temperature)
        kinds = {tuple(prompt): kind for kind in (good, bad) for prompt in kind.prompts}
        async with start_modes(modes, target_dir, arguments.draft) as started:
            pairs = {
                name: MixedPair(
                    *(pair.target, pair.draft, pair.target_stub, pair.draft_stub),
                    kinds=kinds,
                    with_draft=drafted[name],
                    has_seeds=not arguments.rejection,
                )
                for name, pair in started.items()
            }
            result = await measure_batches(
                arguments, pairs, alternating([good, bad]), lambda slices: summarize(slices, kinds)
            )
    result["load"] |= {"bad_kind": arguments.bad_kind, "temperature": arguments.temperature}
    return result


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = load_parser(__doc__, batch=(8, 32), seconds=4.0, rounds=4)
    parser.add_argument(
        "--bad-kind",
        choices=BAD_KINDS,
        default="random-hot",
        help="prompts of random tokens or shuffled ones; hot: sampled (default %(default)s)",
    )
    parser.add_argument(
        "--rejection", action="store_true", help="sample by rejection instead of coupled decoding with a seed each"
    )
    parser.add_argument("--temperature", type=float, default=1.3, help="of hot requests (default %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw)
