"""Traffic of which half drafts badly: `python -m benchmarks.mixed --help`.

Requests of two kinds take turns in one closed loop: held-out prompts decoded greedily, and a kind on which the draft's
hints rarely hold. The question is whether speculating for the second kind hurts anybody. Four ways are compared, each
with workers of its own: `off` (nobody has a draft), `on` (everybody has one, and the target decides whether to listen),
`good only` (the first kind has one), `always` (everybody has one, and the target must listen). Where a target does not
listen there is little to see of acceptance; `always` shows it for both kinds. Kinds differ in how fast they are
answered, so half of the requests is not half of the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.bound import acceptance_rate
from benchmarks.modes import (
    Mode,
    ModeSlice,
    RecordingPair,
    Window,
    add_load_arguments,
    greedy,
    measure_batches,
    middle,
    prompts_of,
    report,
    speed_figures,
    start_modes,
    step_figures,
    total,
    tpot_figures,
    window,
)
from benchmarks.target_model import target_model
from benchmarks.worker_pair import Generation
from outrider.sampling_params import SamplingParams

OFF, ON, GOOD_ONLY, ALWAYS = "off", "on", "good only", "always"
GOOD, BAD = "good", "bad"
BAD_KINDS = ("random", "random-hot", "hot", "shuffled")


@dataclass(frozen=True, slots=True)
class Kind:
    """What half of the requests have in common."""

    name: str
    prompts: list[list[int]]
    sampling: SamplingParams


@dataclass
class MixedPair(RecordingPair):
    """Asks every prompt in the way of its kind."""

    kinds: dict[tuple[int, ...], Kind] = field(default_factory=dict)
    with_draft: frozenset[str] = frozenset()  # names of kinds

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> Generation:
        kind = self.kinds[tuple(token_ids)]
        options["use_draft"] = kind.name in self.with_draft
        return await RecordingPair.generate(self, token_ids, kind.sampling, **options)


def bad_kind(name: str, good: Kind, vocab_size: int, temperature: float) -> Kind:
    """One of BAD_KINDS: prompts of random tokens, or shuffled ones; sampled at `temperature` where it is "hot"."""
    rng = random.Random(7)
    prompts = [list(prompt) for prompt in good.prompts]
    if name.startswith("random"):
        prompts = [[rng.randrange(vocab_size) for _ in prompt] for prompt in prompts]
    else:
        # Hot ones too: a prompt's tokens say which kind it is.
        for prompt in prompts:
            if name == "shuffled":
                rng.shuffle(prompt)
            else:
                prompt.pop(0)
    sampling = good.sampling
    if name.endswith("hot"):
        sampling = SamplingParams(
            temperature=temperature, max_tokens=good.sampling.max_tokens, ignore_eos=True
        )
    return Kind(BAD, prompts, sampling)


def alternating(kinds: Sequence[Kind]) -> list[list[int]]:
    """Prompts of all kinds in turns."""
    return [prompt for group in zip(*(kind.prompts for kind in kinds), strict=True) for prompt in group]


def windows_of(name: str, slices: Iterable[ModeSlice], kinds: Mapping[tuple[int, ...], Kind]) -> list[Window]:
    """What the requests of one kind got in each slice."""
    return [
        window(
            [generation for prompt, generation in each.recorded if kinds[tuple(prompt)].name == name],
            each.begin,
            each.end,
        )
        for each in slices
    ]


def kind_figures(own: Sequence[Window], off: Sequence[Window] | None) -> dict[str, Any]:
    """Speed, time per token and acceptance of one kind; ratios to nobody having a draft, round by round."""
    tokens_per_s, *_ = middle([each.tokens_per_s for each in own])
    num_steps = sum(each.num_steps for each in own)
    figures: dict[str, Any] = {
        "tokens_per_s": round(tokens_per_s, 1),
        "tokens_per_step": round(sum(each.num_tokens for each in own) / max(num_steps, 1), 3),
        "acceptance": round(
            acceptance_rate(sum(each.num_accepted for each in own), sum(each.num_rejected for each in own)), 3
        ),
        "requests": sum(len(each.tpot_ms) for each in own),
    }
    figures |= tpot_figures([ms for each in own for ms in each.tpot_ms])
    if off is not None:
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(own, off, strict=True) if b.tokens_per_s]
        ratio, *quartiles = middle(ratios)
        figures["tokens_per_s_over_off"] = round(ratio, 3)
        figures["tokens_per_s_over_off_quartiles"] = [round(each, 3) for each in quartiles]
        before = tpot_figures([ms for each in off for ms in each.tpot_ms])
        for name in before.keys() & figures.keys():
            figures[f"{name}_over_off"] = round(figures[name] / before[name], 3)
    return figures


def summarize(
    slices: Mapping[str, Sequence[ModeSlice]], kinds: Mapping[tuple[int, ...], Kind]
) -> dict[str, Any]:
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
    """Median time per output token by kind, whiskers up to the 99th percentile."""
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
                )
                for name, pair in started.items()
            }
            result = await measure_batches(
                arguments, pairs, alternating([good, bad]), lambda slices: summarize(slices, kinds)
            )
    result["load"] |= {"bad_kind": arguments.bad_kind, "temperature": arguments.temperature}
    return result


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_load_arguments(parser, batch=(8, 32), seconds=4.0, rounds=4)
    parser.add_argument(
        "--bad-kind",
        choices=BAD_KINDS,
        default="random-hot",
        help="prompts of random tokens or shuffled ones; hot: sampled (default %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.3, help="of hot requests (default %(default)s)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    report(arguments, asyncio.run(run(arguments)), draw)


if __name__ == "__main__":
    main()
