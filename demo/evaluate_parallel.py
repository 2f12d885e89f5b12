"""Measures how often a parallel draft is right, by the number of mask tokens it looks across.

    python -m demo.evaluate_parallel [--target DIR] [--draft DIR ...]

The target continues held-out prompts greedily. Behind tokens of these sequences the draft reads mask tokens, and what
the row of the token and those of the masks predict is compared with what the target said. A guess is accepted if it and
all before it in the same pass are right, so the sum over the first K rows is what one pass of K rows gives.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from demo.corpus import held_out_prompts
from demo.evaluate import DEMO, Texts, greedy_texts
from demo.parallel import Rows, row_logits

NUM_ROWS = 8
ANCHOR_EVERY = 3
"""Masks stand behind every third token: enough to measure, and a pass stays small."""


def rows_behind(anchors: torch.Tensor, length: int, num_rows: int) -> Rows:
    """All tokens of a sequence, then `num_rows` - 1 masks behind each of `anchors`."""
    num_masks = num_rows - 1
    return Rows(
        torch.cat([torch.arange(length), anchors.repeat_interleave(num_masks)]),
        torch.cat([torch.zeros(length, dtype=torch.long), torch.arange(1, num_rows).repeat(len(anchors))]),
    )


@torch.inference_mode()
def offset_matches(draft: LlamaForCausalLM, texts: Texts, num_rows: int = NUM_ROWS) -> torch.Tensor:
    """Whether each row of a pass predicts the target's token.  # bool [num_anchors, num_rows]"""
    found: list[torch.Tensor] = []
    for ids, mask in zip(texts.token_ids, texts.attention_mask, strict=True):
        num_padding = int((mask == 0).sum())
        token_ids = ids[num_padding:]
        first = texts.prompt_len - num_padding - 1
        anchors = torch.arange(first, len(token_ids) - num_rows, ANCHOR_EVERY)
        rows = rows_behind(anchors, len(token_ids), num_rows)
        said = row_logits(draft, token_ids[None], rows)[0].argmax(-1)
        of_masks = said[len(token_ids) :].view(len(anchors), num_rows - 1)
        followers = anchors[:, None] + 1 + torch.arange(num_rows)
        found.append(torch.cat([said[anchors, None], of_masks], dim=1) == token_ids[followers])
    return torch.cat(found)


def table(matches: torch.Tensor) -> str:
    """Lines of a table: right at each row, right up to there, and the mean number accepted of a pass."""
    right = matches.float()
    up_to_there = right.cumprod(dim=1).mean(dim=0)
    columns = {
        "row": [str(row) for row in range(1, 1 + right.shape[1])],
        "right": [f"{share:.1%}" for share in right.mean(dim=0).tolist()],
        "right up to there": [f"{share:.1%}" for share in up_to_there.tolist()],
        "mean accepted of K rows": [f"{tokens:.2f}" for tokens in up_to_there.cumsum(dim=0).tolist()],
    }
    return "\n".join(f"| {name} | " + " | ".join(values) + " |" for name, values in columns.items())


def main() -> None:
    """Print one table per draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, nargs="+", default=[DEMO / "draft", DEMO / "parallel_draft"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100, help="greedy tokens per prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def load(folder: Path) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()

    tokenizer = AutoTokenizer.from_pretrained(options.target, local_files_only=True)
    prompts = held_out_prompts(options.prompts)
    texts = greedy_texts(load(options.target), tokenizer, prompts, options.tokens + NUM_ROWS)
    for folder in options.draft:
        print(f"{folder}\n{table(offset_matches(load(folder), texts))}", flush=True)


if __name__ == "__main__":
    main()
