"""Measures a client's prediction of its output: with edits, without any, and a useless one.

The truth is the target's own output: greedy, or with a temperature and a seed, where it repeats itself less. The
prediction is that text with `--edits` of its lines inserted, deleted or changed; the useless one is a held-out file of
the same length. Each is compared with the same request without a prediction, at a target with lookup and at one
without, and no draft worker. All requests of a prompt follow each other in an order that rotates, so that a change of
the machine's load affects all of them. Speeds do not include prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared.figures import with_quartiles
from benchmarks.shared.machine import machine
from benchmarks.shared.options import given, parser_of, report, say, target_model
from benchmarks.shared.worker_pair import Generation, WorkerPair, worker_pair
from demo.corpus import held_out_files, held_out_prompts
from outrider.sampling_params import SamplingParams, SpeculationSettings
from outrider.text.tokenizer import Tokenizer

NONE, EDITED, USELESS = "none", "edited", "useless"
TARGETS = {"no lookup": ("--no-lookup",), "lookup": ("--lookup",)}
PROMPT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and what is predicted for it, as token ids."""

    prompt: list[int]
    predictions: dict[str, list[int]]


@dataclass(slots=True)
class Runs:
    """Results of one target, by the kind of prediction; entry i of each is of the same prompt and round."""

    by_kind: dict[str, list[Generation]] = field(default_factory=lambda: {NONE: [], EDITED: [], USELESS: []})

    def summary(self) -> dict[str, Any]:
        """Steps and speeds, and the ratios of both to those without a prediction."""
        plain, figures = self.by_kind[NONE], {}
        for kind, runs in self.by_kind.items():
            stats = [each.finished.stats for each in runs]
            figures[kind] = {
                **with_quartiles("tokens_per_step", [len(r.token_ids) / r.finished.stats.num_steps for r in runs], 2),
                **with_quartiles("tokens_per_s", [each.decode_tokens_per_s for each in runs], 1),
                "accepted_prediction_tokens": sum(each.num_accepted_prediction_tokens for each in stats),
                "rejected_prediction_tokens": sum(
                    each.num_prediction_tokens - each.num_accepted_prediction_tokens for each in stats
                ),
                "lookup_tokens": sum(each.num_lookup_tokens for each in stats),
            }
            if kind != NONE:
                pairs = list(zip(runs, plain, strict=True))
                steps = [b.finished.stats.num_steps / a.finished.stats.num_steps for a, b in pairs]
                speeds = [a.decode_tokens_per_s / b.decode_tokens_per_s for a, b in pairs]
                figures[kind] |= with_quartiles("fewer_steps", steps, 2) | with_quartiles("speedup", speeds, 3)
                figures[kind]["num_different_texts"] = sum(a.token_ids != b.token_ids for a, b in pairs)
        return figures


def edited(text: str, share: float, rng: random.Random) -> str:
    """Inserts, deletes and changes lines in turn, `share` of all lines and at least one; never the last line."""
    lines = text.split("\n")
    count = min(max(round(share * len(lines)), 1), len(lines) - 1)
    for number, at in enumerate(sorted(rng.sample(range(len(lines) - 1), count), reverse=True)):
        line = lines[at]
        indent = line[: len(line) - len(line.lstrip())]
        match number % 3:
            case 0:
                lines.insert(at, f"{indent}value_{rng.randrange(100)} = compute({rng.randrange(100)})")
            case 1:
                del lines[at]
            case _:
                words = line.split(" ")
                words[-1] = f"other_{rng.randrange(100)}"
                lines[at] = " ".join(words)
    return "\n".join(lines)


async def ask(pair: WorkerPair, case: Case, kind: str, arguments: argparse.Namespace) -> Generation:
    """One request with a prediction of this kind."""
    seed = arguments.seed if arguments.temperature else None
    return await pair.generate(
        case.prompt,
        SamplingParams(temperature=arguments.temperature, seed=seed, max_tokens=arguments.tokens, ignore_eos=True),
        speculation=SpeculationSettings(enabled=True),
        prediction=case.predictions.get(kind, ()),
    )


async def cases_of(pair: WorkerPair, tokenizer: Tokenizer, arguments: argparse.Namespace) -> list[Case]:
    """The prompts, with predictions made from the target's own output."""
    rng = random.Random(arguments.seed)
    files = [each.text for each in held_out_files()]
    prompts = held_out_prompts(arguments.prompts, seed=arguments.seed, chars_max=PROMPT_CHARS_MAX)
    cases, sizes = [], []
    for prompt in prompts:
        case = Case(tokenizer.encode(prompt), {})
        text = tokenizer.decode((await ask(pair, case, NONE, arguments)).token_ids)
        other = rng.choice([each for each in files if len(each) > len(text) and prompt not in each])
        for kind, predicted in ((EDITED, edited(text, arguments.edits, rng)), (USELESS, other[: len(text)])):
            case.predictions[kind] = tokenizer.encode(predicted, add_special_tokens=False)
        cases.append(case)
        sizes.append(len(text.encode()))
    say(f"outputs have {min(sizes)} to {max(sizes)} bytes")
    return cases


async def measure(
    pairs: dict[str, WorkerPair], cases: Sequence[Case], arguments: argparse.Namespace
) -> dict[str, Runs]:
    """Runs every case at every target with every kind of prediction; the first round is not counted."""
    results = {name: Runs() for name in pairs}
    variants = [(name, kind) for name in pairs for kind in (NONE, EDITED, USELESS)]
    for index in range(-1, arguments.rounds):
        for number, case in enumerate(cases if index >= 0 else cases[:1]):
            turn = (index + number) % len(variants)
            for name, kind in variants[turn:] + variants[:turn]:
                run = await ask(pairs[name], case, kind, arguments)
                if index >= 0:
                    results[name].by_kind[kind].append(run)
        say(f"round {index + 1} of {arguments.rounds}")
    return results


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        model_dir = stack.enter_context(target_model(arguments))
        pairs = {}
        for name, flags in TARGETS.items():
            words = ["--cpu-affinity", "0", *flags, *arguments.target_argument]
            pairs[name] = await stack.enter_async_context(worker_pair(model_dir, None, target_arguments=words))
        cases = await cases_of(pairs["no lookup"], Tokenizer(model_dir), arguments)
        results = await measure(pairs, cases, arguments)
    return {
        "machine": machine(),
        "arguments": given(arguments),
        **{name: runs.summary() for name, runs in results.items()},
    }


def main() -> None:
    parser = parser_of(__doc__, has_draft=False)
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=900, help="per output, about 3.5 KiB (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="passes over the prompts (default %(default)s)")
    parser.add_argument("--edits", type=float, default=0.05, help="share of edited lines (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and edits (default %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: greedy (default); above: coupled by the seed"
    )
    parser.add_argument(
        "--target-argument", action="append", default=[], help="passed on, such as --num-local-tokens=8"
    )
    arguments = parser.parse_args()
    if arguments.prompts < 1 or arguments.rounds < 1 or not 0 < arguments.edits < 1:
        parser.error("--prompts and --rounds must be at least 1, --edits between 0 and 1")
    report(arguments, asyncio.run(run(arguments)))
