"""Trains an EAGLE-3 head for the shipped target (Li et al., 2503.01840).

    python -m demo.eagle3 --work DIR

The head reads what the target's layers knew of a token; where the target has not been there yet, its own output takes
that place. Training runs both, as the paper's training-time test does, with the loss of `demo.distill` on every row. A
chain of rows that feed each other is deeper than one block of hints, because a draft worker rides ahead: the features
of the last committed tokens are still on their way when it drafts behind them. Every depth keeps a share of the chains
of the one before, so that a step has about three times the rows of plain distillation, and not thirteen times.

The lessons are those of `demo.teacher`; the target's hidden states are computed again in every step. Lessons and
checkpoint stay in the work folder, and a run continues from them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from demo.distill import PROMPT_WEIGHT, Library, alignment_loss, train_on_lessons
from demo.eagle3.head import Head, hidden_states, logits_of, unroll
from demo.pretrain import Recipe
from demo.teacher import Lessons
from demo.train import ARGMAX_SHARE, DEMO, write_lessons

MAX_DEPTH = 12
"""Rows of a chain: eight tokens whose features are on their way, and behind them a block of hints."""
FIRST_SHARE = 0.5
"""Share of the answer's tokens behind which a chain begins."""
KEPT_SHARE = 0.92
"""Share of the chains that a depth keeps of the depth before it."""
RECIPE = Recipe("eagle3", num_steps=20000, limit_s=3420.0, peak_rate=3e-3, batch_tokens=1024, weight_decay=0.02)
SEED = 3


def draw_chains(length: int, first_base: int, seed: int) -> list[torch.Tensor]:
    """The bases of the chains that reach each depth from 1 on: indices of tokens, ascending.

    The row of a base has the target's feature; the row at depth k stands k tokens behind it.
    """
    order = first_base + torch.randperm(length - first_base, generator=torch.Generator().manual_seed(seed))
    chains = []
    for depth in range(1, MAX_DEPTH + 1):
        kept = order[: int(len(order) * FIRST_SHARE * KEPT_SHARE ** (depth - 1))]
        chains.append(kept[kept + depth < length].sort().values)
    return chains


def unrolled_loss(
    head: Head, target: LlamaForCausalLM, lesson: Lessons, chosen: torch.Tensor, argmax_share: float, seed: int
) -> tuple[torch.Tensor, int]:
    """The alignment loss of some sequences of one set of lessons over the rows of all depths, and its token count."""
    token_ids = lesson.token_ids[chosen, :-1].long()
    hidden = hidden_states(target, token_ids, head.layer_ids)
    depths = unroll(head, target, token_ids, hidden, draw_chains(token_ids.shape[1], lesson.prompt_len - 1, seed))
    positions = torch.cat([each.positions for each in depths])
    weights = torch.where(positions < lesson.prompt_len - 1, PROMPT_WEIGHT, 1.0)
    logits = logits_of(head, target, torch.cat([each.states for each in depths], dim=1))
    loss = alignment_loss(
        logits.flatten(0, 1).float(),
        lesson.kept_ids[chosen][:, positions].flatten(0, 1).long(),
        lesson.kept_logprobs[chosen][:, positions].flatten(0, 1).float(),
        weights.expand(len(chosen), -1).flatten(),
        argmax_share,
    )
    return loss, token_ids.numel()


def train(head: Head, target: LlamaForCausalLM, library: Library, recipe: Recipe, checkpoint: Path) -> None:
    """Trains until the recipe's budget is spent; each pass over the lessons takes in new ones."""
    target.requires_grad_(False)
    train_on_lessons(
        *(head, library, recipe, checkpoint),
        lambda lesson, chosen, step: unrolled_loss(head, target, lesson, chosen, ARGMAX_SHARE, seed=step),
    )


def published_config(head: Head) -> dict[str, Any]:
    """The head's configuration in the original layout, which SafeAILab publishes and vLLM reads."""
    config = head.config
    layer_ids = list(head.layer_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "dtype": "bfloat16",
    }


def publish(head: Head, folder: Path) -> None:
    """Writes the head in bfloat16; each file is replaced in one rename."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    tensors = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    (staging / "config.json").write_text(json.dumps(published_config(head), indent=2) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(staging.iterdir()):
        file.chmod(0o644)
        os.replace(file, folder / file.name)
    staging.rmdir()


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "outrider-demo-eagle3")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--out", type=Path, default=DEMO / "eagle3_head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lesson-minutes", type=float, default=14.0)
    parser.add_argument("--lessons-only", action="store_true", help="only write lessons, while another process trains")
    parser.add_argument("--minutes", type=float, default=57.0, help="of training, earlier runs of it included")
    return parser


def main() -> None:
    """Lets the target write lessons, trains on them and publishes the head."""
    options = build_parser().parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    write_lessons(target, options.target, options.work / "lessons", options.lesson_minutes)
    if options.lessons_only:
        return
    torch.manual_seed(SEED)
    head = Head(target.config).to(target.dtype)
    recipe = replace(RECIPE, limit_s=60 * options.minutes)
    train(head, target, Library(options.work / "lessons"), recipe, options.work / "eagle3.pt")
    publish(head, options.out)


if __name__ == "__main__":
    main()
