"""What verifying a whole hint tree could gain over verifying one path: `python -m benchmarks.tree_gain --help`.

A target step that fed several branches at once would have more tokens to accept, for more rows. Here a real draft grows
trees of N nodes, best-first, and paths of N nodes, below every place where a step of the target would begin; each is
held against what the target says there (greedy), and both against what a step of that many rows costs. The draft has
all the time it wants, so this is the most that could be had. Rows of a tree are priced as those of a path are: a mask
for siblings would cost no less.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.machine import machine
from benchmarks.step_cost import measure
from benchmarks.target_model import DEMO, add_target_arguments, target_model
from demo.corpus import held_out_prompts
from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitHeard
from draft_worker.runner import run_step
from draft_worker.scheduler import DraftScheduler
from outrider.cli.tune.times import StepTimes
from outrider.engine.loading import load_model
from outrider.engine.model import Engine, EngineConfig, SequenceChunk
from outrider.engine.sampling import greedy_choices
from outrider.hint_tree import ROOT_ID
from outrider.sampling_params import SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.worker_process import pin_to_cores

NUM_NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31)
PATH, TREE = "path", "tree"


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and what the target says after it."""

    prompt: list[int]
    output: list[int]


def say(target: Engine, prompt: list[int], num_tokens: int) -> Said:
    """Greedy."""
    kv = target.new_sequence()
    output: list[int] = []
    fed = prompt
    while len(output) < num_tokens:
        kv.extend(len(fed))
        fed = greedy_choices(target.forward([SequenceChunk(kv, fed, 1)]))
        output += fed
    kv.free()
    return Said(prompt, output)


def steps_of(draft: Engine, said: Said, num_nodes: int, num_alternatives: int) -> list[tuple[int, int]]:
    """Every step that would verify a whole tree of about `num_nodes`: its rows, and the tokens that it would give."""
    # A draft keeps room for an alternative and its child; so trees have a node more now and then.
    limits = DraftLimits(
        max_num_seqs=1,
        max_nodes=num_nodes + (num_nodes > 1),
        max_lookahead=num_nodes,
        max_alternatives=num_alternatives,
        max_nodes_per_step=1,
        max_chain_nodes=0,
        min_reach=0.0,
    )
    scheduler = DraftScheduler(limits, draft.allocator, draft.vocab_size)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(said.output) + num_nodes, ignore_eos=True)
    scheduler.handle(AttachSession("a", 1, "target:1", list(said.prompt), greedy, 1))
    steps = []
    at = 0
    while at + num_nodes < len(said.output):
        while (step := scheduler.next_step()) is not None:
            scheduler.finish_step(step, run_step(draft, step, 1 + num_alternatives))
        session = scheduler.progress("a")
        assert session is not None
        children = {(hint.parent_id, hint.token_id): hint.node_id for hint in session.live_hints()}
        node_id, num_held = session.cursor or ROOT_ID, 0
        while (child := children.get((node_id, said.output[at + num_held]))) is not None:
            node_id, num_held = child, num_held + 1
        committed = said.output[at : at + num_held + 1]
        steps.append((1 + len(session.nodes), len(committed)))
        scheduler.handle(
            CommitHeard("a", len(said.prompt) + at, committed, True, False, len(session.nodes), num_held)
        )
        at += len(committed)
    scheduler.handle(CommitHeard("a", len(said.prompt) + at, [], True, is_finished=True))
    return steps


def summarize(
    steps: Mapping[str, Mapping[int, Sequence[tuple[int, int]]]], times: StepTimes
) -> dict[str, Any]:
    """`steps[kind][n]`: rows and tokens of steps with about n hints."""
    result: dict[str, Any] = {}
    for kind, by_size in steps.items():
        figures = {}
        for n, own in by_size.items():
            step_ms = times.at(statistics.fmean(rows for rows, _ in own))
            tokens = statistics.fmean(count for _, count in own)
            figures[str(n)] = {
                "tokens_per_step": round(tokens, 3),
                "step_ms": round(step_ms, 3),
                "speedup": round(tokens / step_ms * times.at(1), 3),
            }
        best = max(figures, key=lambda n: figures[n]["speedup"])
        result[kind] = {"by_num_hints": figures, "best": int(best), "speedup": figures[best]["speedup"]}
    result["tree_over_path"] = round(result[TREE]["speedup"] / result[PATH]["speedup"], 3)
    return result


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Speed-ups over the number of hints; the free draft's."""
    series = {
        kind: [(int(n), each["speedup"], each["speedup"], each["speedup"]) for n, each in own.items()]
        for kind in (PATH, TREE)
        for own in [result[kind]["by_num_hints"]]
    }
    plot.lines(
        path, f"Speed over plain decoding, free draft, {result['target']}", series, "hints", "times plain"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_target_arguments(parser)
    parser.add_argument("--draft", type=Path, default=DEMO / "draft")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of step times (default %(default)s)")
    parser.add_argument(
        "--alternatives", type=int, default=4, help="that a node of a tree has (default %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the result")
    arguments = parser.parse_args()
    if arguments.prompts < 1 or arguments.rounds < 1:
        parser.error("--prompts and --rounds must be at least 1")
    if arguments.tokens <= max(NUM_NODES):
        parser.error(f"--tokens must be more than {max(NUM_NODES)}, the size of the largest tree")
    if not (arguments.draft / "config.json").is_file():
        parser.error(f"--draft {arguments.draft} has no config.json; name a folder in Hugging Face format")
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        tokenizer = Tokenizer(model_dir)
        target = load_model(EngineConfig(model_dir))
        sizes = sorted({1, *(n + 1 for n in NUM_NODES)})
        medians = measure({"": target}, arguments.rounds, sizes)[""]
        texts = [
            say(target, tokenizer.encode(text), arguments.tokens)
            for text in held_out_prompts(arguments.prompts, seed=1)
        ]
    draft = load_model(EngineConfig(arguments.draft))
    steps = {
        kind: {
            n: [step for said in texts for step in steps_of(draft, said, n, num_alternatives)]
            for n in NUM_NODES
        }
        for kind, num_alternatives in ((PATH, 0), (TREE, arguments.alternatives))
    }
    times = StepTimes.measured([(int(n), ms) for n, ms in medians.items()])
    name = arguments.target.name + (", grown" if arguments.grown else "")
    result = {"machine": machine(), "target": name, **summarize(steps, times)}
    print(json.dumps(result, indent=1))
    if arguments.plot is not None:
        draw(result, arguments.plot)


if __name__ == "__main__":
    main()
