"""Measures how often an EAGLE-3 head is right, with the target's features at hand and with late ones.

    python -m demo.eagle3.evaluate [--target DIR] [--head DIR] [--drafts DIR ...]

The target continues held-out prompts greedily. Behind tokens of these sequences the head drafts, and its guesses are
compared with what the target said. A guess is accepted if it and all before it are right. *Local* is a head beside its
target: the features of all tokens before the last committed one are there. With a delay of R the last R of those are
still on their way, and the head's own outputs take their place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from demo.corpus import held_out_prompts
from demo.eagle3.head import Head, hidden_states, logits_of, unroll
from demo.evaluate import DEMO, Texts, draft_acceptance, greedy_texts, table_line

DELAYS = (0, 1, 2, 4, 8)
NUM_HINTS = 5


def load(folder: Path, target: LlamaForCausalLM) -> Head:
    """A published head, in the target's type."""
    head = Head(target.config)
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.to(target.dtype).eval()


@torch.inference_mode()
def depth_matches(head: Head, target: LlamaForCausalLM, token_ids: torch.Tensor, num_depths: int) -> torch.Tensor:
    """Whether the row at each depth of each token predicts the token after it; False where there is no such row.

    token_ids: int64 [length]  # -> bool [num_depths, length]
    """
    length = len(token_ids)
    chains = [torch.arange(1, length - depth) for depth in range(1, num_depths)]
    hidden = hidden_states(target, token_ids[None], head.layer_ids)
    found = torch.zeros(num_depths, length, dtype=torch.bool)
    followers = torch.cat([token_ids[1:], token_ids.new_tensor([-1])])
    for right, depth in zip(found, unroll(head, target, token_ids[None], hidden, chains), strict=True):
        said = logits_of(head, target, depth.states)[0].argmax(-1)
        right[depth.positions] = said == followers[depth.positions]
    return found


def accepted(right: torch.Tensor, anchors: torch.Tensor, delay: int, num_hints: int) -> torch.Tensor:
    """Which guesses behind committed prefixes that end at `anchors` are accepted.  # bool [num_anchors, num_hints]

    right: of `depth_matches`
    """
    ahead = torch.arange(num_hints)
    return right[delay + ahead, anchors[:, None] + ahead].cumprod(dim=1).bool()


def anchors_of(texts: Texts, row: int, num_hints: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence without its padding, and the last tokens of all committed prefixes that are drafted behind."""
    num_padding = int((texts.attention_mask[row] == 0).sum())
    token_ids = texts.token_ids[row, num_padding:]
    return token_ids, torch.arange(texts.prompt_len - num_padding - 1, len(token_ids) - num_hints)


def head_acceptance(
    head: Head, target: LlamaForCausalLM, texts: Texts, delays: tuple[int, ...] = DELAYS, num_hints: int = NUM_HINTS
) -> dict[int, torch.Tensor]:
    """Accepted guesses by delay.  # bool [num_anchors, num_hints] each"""
    found: dict[int, list[torch.Tensor]] = {delay: [] for delay in delays}
    for row in range(len(texts.token_ids)):
        token_ids, anchors = anchors_of(texts, row, num_hints)
        right = depth_matches(head, target, token_ids, max(delays) + num_hints)
        for delay, parts in found.items():
            parts.append(accepted(right, anchors, delay, num_hints))
    return {delay: torch.cat(parts) for delay, parts in found.items()}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--head", type=Path, default=DEMO / "eagle3_head")
    parser.add_argument("--drafts", type=Path, nargs="*", default=[DEMO / "draft"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=100, help="greedy tokens per prompt")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def model(folder: Path) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()

    target = model(options.target)
    tokenizer = AutoTokenizer.from_pretrained(options.target, local_files_only=True)
    texts = greedy_texts(target, tokenizer, held_out_prompts(options.prompts), options.tokens + NUM_HINTS)
    print("| | " + " | ".join(f"guess {number}" for number in range(1, NUM_HINTS + 1)) + " | accepted | of local |")
    for folder in options.drafts:
        print(table_line(folder.name, draft_acceptance(model(folder), texts, NUM_HINTS)), flush=True)
    by_delay = head_acceptance(load(options.head, target), target, texts)
    for delay, guesses in by_delay.items():
        name = f"{options.head.name}, " + (f"{delay} features late" if delay else "local")
        print(table_line(name, guesses, by_delay[0]), flush=True)


if __name__ == "__main__":
    main()
