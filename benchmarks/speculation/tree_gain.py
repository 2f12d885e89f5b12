"""Measures the possible gain of verifying a hint tree instead of a path.

A target step that fed several branches at once would have more tokens to accept, for more rows. A real draft grows
best-first trees of N nodes and paths of N nodes at every position where a target step would begin. Each is compared
with the target's greedy tokens, and both with the cost of a step of that many rows. The draft's time is not counted,
so this is an upper bound. Rows of a tree are priced like those of a path: a mask for siblings would not be cheaper.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.step_cost import measure
from benchmarks.shared import plot
from benchmarks.shared.machine import machine
from benchmarks.shared.options import load, parser_of, report, target_model
from command_line.tune.times import StepTimes
from demo.corpus import held_out_prompts
from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived
from draft_worker.runner import run_step
from draft_worker.scheduler import DraftScheduler
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.sampling.sampling import greedy_choices
from outrider.hints.hint_tree import ROOT_ID
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.worker.worker_process import pin_to_cores

NUM_NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31)
PATH, TREE = "path", "tree"


@dataclass(frozen=True, slots=True)
class Generated:
    """A prompt and the target's output."""

    prompt: list[int]
    output: list[int]


def generate(target: Engine, prompt: list[int], num_tokens: int) -> Generated:
    """Greedy output of the target."""
    kv = target.new_sequence()
    output: list[int] = []
    fed = prompt
    while len(output) < num_tokens:
        kv.extend(len(fed))
        fed = greedy_choices(target.forward([SequenceChunk(kv, fed, 1)]))
        output += fed
    kv.free()
    return Generated(prompt, output)


def steps_of(draft: Engine, generated: Generated, num_nodes: int, num_alternatives: int) -> list[tuple[int, int]]:
    """Every step that would verify a whole tree of about `num_nodes` nodes: its rows, and its tokens."""
    # A draft reserves room for an alternative and its child, so some trees have one node more.
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
    greedy = SamplingParams(temperature=0.0, max_tokens=len(generated.output) + num_nodes, ignore_eos=True)
    scheduler.handle(AttachSession("a", 1, "target:1", list(generated.prompt), greedy, 1))
    steps = []
    at = 0
    while at + num_nodes < len(generated.output):
        while (step := scheduler.next_step()) is not None:
            scheduler.finish_step(step, run_step(draft, step, 1 + num_alternatives))
        session = scheduler.progress("a")
        assert session is not None
        children = {(hint.parent_id, hint.token_id): hint.node_id for hint in session.live_hints()}
        node_id, num_accepted = session.cursor or ROOT_ID, 0
        while (child := children.get((node_id, generated.output[at + num_accepted]))) is not None:
            node_id, num_accepted = child, num_accepted + 1
        committed = generated.output[at : at + num_accepted + 1]
        steps.append((1 + len(session.nodes), len(committed)))
        scheduler.handle(
            CommitReceived("a", len(generated.prompt) + at, committed, True, False, len(session.nodes), num_accepted)
        )
        at += len(committed)
    scheduler.handle(CommitReceived("a", len(generated.prompt) + at, [], True, is_finished=True))
    return steps


def summarize(steps: Mapping[str, Mapping[int, Sequence[tuple[int, int]]]], times: StepTimes) -> dict[str, Any]:
    """Summarizes `steps[kind][n]`: rows and tokens of steps with about n hints."""
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
    """Draws speed-ups with a free draft over the number of hints."""
    series = {
        kind: [(int(n), each["speedup"], each["speedup"], each["speedup"]) for n, each in own.items()]
        for kind in (PATH, TREE)
        for own in [result[kind]["by_num_hints"]]
    }
    plot.lines(path, f"Speed over plain decoding, free draft, {result['target']}", series, "hints", "times plain")


def main() -> None:
    parser = parser_of(__doc__, draws="the result")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of step times (default %(default)s)")
    parser.add_argument("--alternatives", type=int, default=4, help="of a tree node (default %(default)s)")
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
        target = load(model_dir)
        sizes = sorted({1, *(n + 1 for n in NUM_NODES)})
        medians = measure({"": target}, arguments.rounds, sizes)[""]
        texts = [
            generate(target, tokenizer.encode(text), arguments.tokens)
            for text in held_out_prompts(arguments.prompts, seed=1)
        ]
    draft = load(arguments.draft)
    steps = {
        kind: {
            n: [step for generated in texts for step in steps_of(draft, generated, n, num_alternatives)]
            for n in NUM_NODES
        }
        for kind, num_alternatives in ((PATH, 0), (TREE, arguments.alternatives))
    }
    times = StepTimes.measured([(int(n), ms) for n, ms in medians.items()])
    name = arguments.target.name + (", grown" if arguments.grown else "")
    report(arguments, {"machine": machine(), "target": name, **summarize(steps, times)}, draw)
