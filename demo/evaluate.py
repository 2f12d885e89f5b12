"""Measures the agreement of draft and target: acceptance rate and mean acceptance length.

    python -m demo.evaluate [--target DIR] [--draft DIR ...] [--json]

The target continues held-out prompts greedily. Then each sequence is walked as in speculative decoding: after a
committed prefix the draft predicts up to five tokens, those that equal the sequence are accepted, and one more token
comes from the target. A hint is verified only if all hints before it in its block were accepted, so the draft has
then read exactly the target's tokens. One forward pass of the draft over the sequence therefore gives every hint that
can be accepted, and walking is counting.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo.corpus import held_out_prompts

DEMO = Path(__file__).parent


@dataclass(frozen=True)
class Walk:
    """Counts of one or more walks; a step is one forward pass of the target."""

    num_steps: int = 0
    num_hints: int = 0
    num_accepted: int = 0

    def __add__(self, other: Walk) -> Walk:
        return Walk(
            self.num_steps + other.num_steps,
            self.num_hints + other.num_hints,
            self.num_accepted + other.num_accepted,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted hints over verified hints."""
        return self.num_accepted / self.num_hints if self.num_hints else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target step: 1 + accepted over steps."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0


def walk(is_match: Sequence[bool], num_tokens: int, num_hints: int) -> Walk:
    """Walks one sequence; `is_match[i]` tells whether the draft, having read it up to i, predicts token i.

    Steps begin while fewer than `num_tokens` tokens are committed. The sequence must be `num_hints` longer than that,
    so that the last block is as long as any other.
    """
    if len(is_match) < num_tokens + num_hints:
        raise ValueError(f"{len(is_match)} tokens cannot be walked for {num_tokens} in blocks of {num_hints}")
    total = Walk()
    position = 0
    while position < num_tokens:
        block = is_match[position : position + num_hints]
        accepted = next((i for i, matched in enumerate(block) if not matched), num_hints)
        total += Walk(1, num_hints, accepted)
        position += accepted + 1
    return total


@dataclass(frozen=True)
class Texts:
    """Prompts with greedy continuations; prompts are padded on the left.

    token_ids, attention_mask: int64 [prompts, prompt_len + answer_len]
    """

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt_len: int

    @property
    def answers(self) -> torch.Tensor:
        """int64 [prompts, answer_len]."""
        return self.token_ids[:, self.prompt_len :]


@torch.inference_mode()
def greedy_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], answer_len: int
) -> Texts:
    """Continues every prompt by exactly `answer_len` tokens, past an end token if there is one."""
    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    prompt_len = max(len(row) for row in rows)
    token_ids = torch.tensor([[0] * (prompt_len - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor(
        [[0] * (prompt_len - len(row)) + [1] * (len(row) + answer_len) for row in rows], device=model.device
    )
    cache = None
    inputs = token_ids
    for index in range(answer_len):
        seen = mask[:, : prompt_len + index]
        positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, -inputs.shape[1] :]
        output = model(
            input_ids=inputs,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        inputs = output.logits[:, -1].argmax(-1, keepdim=True)
        token_ids = torch.cat([token_ids, inputs], dim=1)
    return Texts(token_ids, mask, prompt_len)


@torch.inference_mode()
def matches(draft: PreTrainedModel, texts: Texts) -> torch.Tensor:
    """Positions where the draft, having read the sequence so far, predicts its next token: bool [prompts,
    answer_len]."""
    positions = (texts.attention_mask.cumsum(-1) - 1).clamp_min(0)
    said: list[torch.Tensor] = []
    for ids, mask, where in zip(
        texts.token_ids.split(16), texts.attention_mask.split(16), positions.split(16), strict=True
    ):
        logits = draft(input_ids=ids, attention_mask=mask, position_ids=where, use_cache=False).logits
        said.append(logits[:, texts.prompt_len - 1 : -1].argmax(-1))
    return torch.cat(said) == texts.answers


def draft_acceptance(draft: PreTrainedModel, texts: Texts, num_hints: int) -> torch.Tensor:
    """Which guesses of blocks behind all tokens of the answers are accepted: right, with all before them in the block.

    # bool [prompts * (answer_len - num_hints + 1), num_hints]
    """
    blocks = matches(draft, texts).unfold(1, num_hints, 1)
    return blocks.flatten(0, 1).cumprod(dim=1).bool()


def table_line(name: str, accepted: torch.Tensor, others: torch.Tensor | None = None) -> str:
    """One line of a table: the share of guesses accepted at each place of a block, the mean number accepted of a block,
    and its ratio to that of other blocks.

    accepted, others: bool [num_blocks, num_hints]
    """
    shares = accepted.float().mean(dim=0)
    values = [f"{share:.1%}" for share in shares.tolist()] + [f"{shares.sum():.2f}"]
    if others is not None:
        values.append(f"{shares.sum() / others.float().mean(dim=0).sum():.1%}")
    return f"| {name} | " + " | ".join(values) + " |"


@dataclass(frozen=True)
class Report:
    """Scores of one pair on one set of prompts."""

    target: str
    draft: str
    num_prompts: int
    num_tokens: int
    num_hints: int
    draft_acceptance_rate: float
    mean_acceptance_length: float
    top1_agreement: float


def measure(draft: PreTrainedModel, texts: Texts, *, num_tokens: int, num_hints: int) -> tuple[Walk, float]:
    """Walks all sequences; also returns the share of tokens that the draft predicts."""
    matched = matches(draft, texts)
    total = sum((walk(row, num_tokens, num_hints) for row in matched.tolist()), Walk())
    return total, matched.float().mean().item()


def evaluate_pair(target_dir: Path, draft_dirs: list[Path], options: argparse.Namespace) -> list[Report]:
    """Score each draft against the target."""
    dtype = getattr(torch, options.dtype)

    def load(folder: Path) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.to(options.device).eval()

    tokenizer = AutoTokenizer.from_pretrained(target_dir, local_files_only=True)
    prompts = held_out_prompts(options.prompts)
    texts = greedy_texts(load(target_dir), tokenizer, prompts, options.tokens + options.hints)
    reports = []
    for draft_dir in draft_dirs:
        total, agreement = measure(load(draft_dir), texts, num_tokens=options.tokens, num_hints=options.hints)
        reports.append(
            Report(
                target=str(target_dir),
                draft=str(draft_dir),
                num_prompts=len(prompts),
                num_tokens=options.tokens,
                num_hints=options.hints,
                draft_acceptance_rate=round(total.acceptance_rate, 4),
                mean_acceptance_length=round(total.mean_acceptance_length, 3),
                top1_agreement=round(agreement, 4),
            )
        )
    return reports


def main() -> None:
    """Print one report per draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, nargs="+", default=[DEMO / "draft"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100, help="greedy tokens per prompt")
    parser.add_argument("--hints", type=int, default=5, help="hints per target step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="more are slower where cores are shared")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reports = evaluate_pair(options.target, options.draft, options)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
        return
    for report in reports:
        print(
            f"{report.draft}: acceptance {report.draft_acceptance_rate:.1%},"
            f" mean acceptance length {report.mean_acceptance_length:.2f},"
            f" top-1 agreement {report.top1_agreement:.1%}"
        )


if __name__ == "__main__":
    main()
