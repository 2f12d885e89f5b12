"""Measures the possible gain of verifying a hint tree instead of a path.

A target step that fed several branches at once would have more tokens to accept, for more rows. A real draft grows
best-first trees of N nodes and paths of N nodes at every position where a target step would begin. Each is compared
with the target's greedy tokens, and both with the cost of a step of that many rows. The draft's time is not counted,
so this is an upper bound. Rows of a tree are priced like those of a path: a mask for siblings would not be cheaper.

`path+lookup` verifies two sources as two branches: the draft's path, and what followed the same tokens earlier in the
text. `--draft` may name an EAGLE-3 head, which has the target's features of all tokens but the last committed one.
`over_path` compares the best of each kind where rows cost what they cost here; `over_path_free_rows` compares their
tokens per step for equal numbers of hints, which is the gain where rows cost nothing.

`--temperature 1` decodes coupled, with another seed for each prompt: the two models agree less often then, and
alternatives are worth more.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.step_cost import measure
from benchmarks.shared import plot
from benchmarks.shared.machine import machine
from benchmarks.shared.options import load, parser_of, report, target_model
from command_line.tune.times import StepTimes
from demo.corpus import held_out_prompts
from draft_worker.heads.loading import features_of
from draft_worker.limits import DraftLimits
from draft_worker.messages import AttachSession, CommitReceived
from draft_worker.runner import run_step
from draft_worker.scheduler import DraftScheduler
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.kind import is_head
from outrider.engine.heads.loading import feature_source, load_head
from outrider.engine.layers.features import packed
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.options import Device, EngineOptions
from outrider.engine.sampling.sampling import likely_choices
from outrider.hints.hint_tree import ROOT_ID
from outrider.sampling_params import SamplingParams
from outrider.text.tokenizer import Tokenizer
from outrider.worker.worker_process import pin_to_cores
from target_worker.hints.token_index import TokenIndex

NUM_NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31)
PATH, TREE, BRANCHES = "path", "tree", "path+lookup"


@dataclass(frozen=True, slots=True)
class Generated:
    """A prompt and the target's output."""

    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    features: bytes = b""  # of all tokens but the last one, as they travel; empty where no head reads them

    def commit(
        self, at: int, end: int, num_features: int, num_verified: int = 0, num_matched: int = 0
    ) -> CommitReceived:
        """The output tokens `[at, end)`, and the features that come with them. num_features: already told."""
        start = len(self.prompt)
        item_bytes = len(self.features) // (start + len(self.output) - 1)
        features = self.features[num_features * item_bytes : (start + end - 1) * item_bytes]
        return CommitReceived(
            *("a", start + at, self.output[at:end], True, False, num_verified, num_matched),
            features=features,
            features_from=num_features,
        )


def sampling_of(temperature: float, seed: int, num_tokens: int) -> SamplingParams:
    """Greedy or, above a temperature of 0, coupled decoding."""
    own_seed = seed if temperature > 0.0 else None
    return SamplingParams(temperature=temperature, seed=own_seed, max_tokens=num_tokens, ignore_eos=True)


def generate(target: Engine, prompt: list[int], sampling: SamplingParams) -> Generated:
    """Output of the target, with the features that it keeps for a head."""
    kv = target.new_sequence()
    output: list[int] = []
    fed = prompt
    while len(output) < sampling.max_tokens:
        kv.extend(len(fed))
        logits = target.forward([SequenceChunk(kv, fed, 1)])
        ((token_id,),), _ = likely_choices(logits, sampling, sampling.seed or 0, [kv.length], 1)
        fed = [token_id]
        output += fed
    features = b"" if target.features is None else packed(target.features, kv.slots(0, kv.length))
    kv.free()
    return Generated(prompt, output, sampling, features)


def steps_of(
    draft: Engine | HeadEngine,
    generated: Generated,
    num_nodes: int,
    num_alternatives: int,
    *,
    has_lookup: bool = False,
) -> list[tuple[int, int]]:
    """Every step that would verify a whole tree of about `num_nodes` nodes: its rows, and its tokens.

    has_lookup: as many tokens that lookup in the text finds are another branch.
    """
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
    new_features = features_of(draft) if isinstance(draft, HeadEngine) else None
    scheduler = DraftScheduler(limits, draft.allocator, draft.vocab_size, new_features=new_features)
    index = TokenIndex()
    index.append(generated.prompt)
    sampling = replace(generated.sampling, max_tokens=len(generated.output) + num_nodes)
    scheduler.handle(AttachSession("a", 1, "target:1", list(generated.prompt), sampling, sampling.seed or 1))
    scheduler.handle(generated.commit(0, 0, 0))
    steps = []
    at = 0
    while at + num_nodes < len(generated.output):
        while (step := scheduler.next_step()) is not None:
            scheduler.finish_step(step, run_step(draft, step, 1 + num_alternatives))
        session = scheduler.progress("a")
        assert session is not None
        said = generated.output[at : at + num_nodes]
        children = {(hint.parent_id, hint.token_id): hint.node_id for hint in session.live_hints()}
        root = session.cursor or ROOT_ID
        num_accepted = num_followed(children, root, said)
        num_new, num_found = 0, 0
        if has_lookup:
            found, _ = index.continuation([], num_nodes)
            num_new = len(found) - num_followed(children, root, found)
            num_found = sum(itertools.takewhile(bool, map(operator.eq, found, said)))
        end = at + 1 + max(num_accepted, num_found)
        steps.append((1 + len(session.nodes) + num_new, end - at))
        num_features = max(len(generated.prompt) + at - 1, 0)
        scheduler.handle(generated.commit(at, end, num_features, len(session.nodes), num_accepted))
        index.append(generated.output[at:end])
        at = end
    scheduler.handle(CommitReceived("a", len(generated.prompt) + at, [], True, is_finished=True))
    return steps


def num_followed(children: Mapping[tuple[int, int], int], root: int, token_ids: Sequence[int]) -> int:
    """How many of these tokens the tree has below `root`, one below the other. children: by parent and token."""
    count, node_id = 0, root
    for token_id in token_ids:
        if (child := children.get((node_id, token_id))) is None:
            break
        count, node_id = count + 1, child
    return count


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
    path = result[PATH]
    for kind, own in result.items():
        if kind != PATH:
            own["over_path"] = round(own["speedup"] / path["speedup"], 3)
            own["over_path_free_rows"] = {
                n: round(each["tokens_per_step"] / path["by_num_hints"][n]["tokens_per_step"], 3)
                for n, each in own["by_num_hints"].items()
            }
    return result


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws speed-ups with a free draft over the number of hints."""
    series = {
        kind: [(int(n), each["speedup"], each["speedup"], each["speedup"]) for n, each in own.items()]
        for kind in (PATH, TREE, BRANCHES)
        for own in [result[kind]["by_num_hints"]]
    }
    plot.lines(path, f"Speed over plain decoding, free draft, {result['target']}", series, "hints", "times plain")


def load_draft(folder: Path, target_dir: Path, target: Engine) -> Engine | HeadEngine:
    """A draft model, or a head, whose features the target keeps from now on."""
    if not is_head(folder):
        return load(folder)
    target.tap(feature_source(folder, target_dir, target.config.dtype, "cpu"))
    return load_head(EngineOptions(model=folder, device=Device.CPU, has_trees=True), target_dir)


def main() -> None:
    parser = parser_of(__doc__, draws="the result")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="per prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of step times (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--alternatives", type=int, default=4, help="of a tree node (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.prompts < 1 or arguments.rounds < 1:
        parser.error("--prompts and --rounds must be at least 1")
    if not 0.0 <= arguments.temperature < math.inf:
        parser.error("--temperature must be 0 or more")
    if arguments.tokens <= max(NUM_NODES):
        parser.error(f"--tokens must be more than {max(NUM_NODES)}, the size of the largest tree")
    if not (arguments.draft / "config.json").is_file():
        parser.error(f"--draft {arguments.draft} has no config.json; name a folder in Hugging Face format")
    pin_to_cores("0")
    with target_model(arguments) as model_dir:
        tokenizer = Tokenizer(model_dir)
        target = load(model_dir)
        draft = load_draft(arguments.draft, model_dir, target)
        sizes = sorted({1, *(n + 1 for n in NUM_NODES)})
        medians = measure({"": target}, arguments.rounds, sizes)[""]
        texts = [
            generate(target, tokenizer.encode(text), sampling_of(arguments.temperature, seed, arguments.tokens))
            for seed, text in enumerate(held_out_prompts(arguments.prompts, seed=1))
        ]
    ways = {PATH: (0, False), TREE: (arguments.alternatives, False), BRANCHES: (0, True)}
    steps = {
        kind: {
            n: [
                step
                for generated in texts
                for step in steps_of(draft, generated, n, num_alternatives, has_lookup=has_lookup)
            ]
            for n in NUM_NODES
        }
        for kind, (num_alternatives, has_lookup) in ways.items()
    }
    times = StepTimes.measured([(int(n), ms) for n, ms in medians.items()])
    name = arguments.target.name + (", grown" if arguments.grown else "")
    asked = {"target": name, "draft": arguments.draft.name, "temperature": arguments.temperature}
    result = {"machine": machine(), **asked, **summarize(steps, times)}
    report(arguments, result, draw)
