"""Trains a copy of the shipped target for early exit (LayerSkip, Elhoushi et al., 2404.16710).

    python -m demo.early_exit --work DIR

The first layers of the copy, with its final norm and its output layer, become a draft of the whole: the engine runs
them with `--early-exit-layer N`. Two losses are summed, both against what the target says in the lessons of
`demo.teacher`: that of all layers, the divergence alone, which is near zero at the start and keeps them where they are,
and that of the first ones. Steps take turns with the number of first layers, as in the paper's rotation. No layers are
dropped: that saves time where training is long, and costs accuracy.

The copy is not shipped. Lessons and checkpoint stay in the work folder, and a run continues from them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo import checkpoints, corpus
from demo.distill import PROMPT_WEIGHT, Library, alignment_loss, train_on_lessons
from demo.pretrain import Recipe, held_out_loss
from demo.teacher import Lessons
from demo.train import ARGMAX_SHARE, DEMO, token_stream, write_lessons

EXITS = (2, 3, 4)
"""Numbers of first layers that learn to guess."""
RECIPE = Recipe("early exit", num_steps=20000, limit_s=720.0, peak_rate=1e-3, batch_tokens=1024, weight_decay=0.02)


def exit_logits(model: LlamaForCausalLM, token_ids: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the first layers and after all.  # [batch, length] -> [batch, length, vocab] each"""
    body = model.model
    states = body.embed_tokens(token_ids)
    positions = torch.arange(token_ids.shape[1])[None]
    rotary = body.rotary_emb(states, positions)
    early = states
    for number, layer in enumerate(body.layers, start=1):
        states = layer(states, position_ids=positions, position_embeddings=rotary)
        if number == num_layers:
            early = states
    return model.lm_head(body.norm(early)), model.lm_head(body.norm(states))


def exit_losses(
    model: LlamaForCausalLM, lesson: Lessons, chosen: torch.Tensor, num_layers: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The losses of the first layers and of all of them on some sequences of one set of lessons, and their tokens."""
    token_ids = lesson.token_ids[chosen, :-1].long()
    weights = torch.ones(token_ids.shape)
    weights[:, : lesson.prompt_len - 1] = PROMPT_WEIGHT

    def loss(logits: torch.Tensor, argmax_share: float) -> torch.Tensor:
        return alignment_loss(
            logits.flatten(0, 1).float(),
            lesson.kept_ids[chosen].flatten(0, 1).long(),
            lesson.kept_logprobs[chosen].flatten(0, 1).float(),
            weights.flatten(),
            argmax_share,
        )

    early, full = exit_logits(model, token_ids, num_layers)
    return loss(early, ARGMAX_SHARE), loss(full, 0.0), token_ids.numel()


def train(model: LlamaForCausalLM, library: Library, recipe: Recipe, checkpoint: Path) -> None:
    """Trains until the recipe's budget is spent; each pass over the lessons takes in new ones."""

    def loss_of(lesson: Lessons, chosen: torch.Tensor, step: int) -> tuple[torch.Tensor, int]:
        early, full, num_tokens = exit_losses(model, lesson, chosen, EXITS[step % len(EXITS)])
        return early + full, num_tokens

    train_on_lessons(model, library, recipe, checkpoint, loss_of)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    cache = Path.home() / ".cache"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=cache / "outrider-demo-early-exit")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--out", type=Path, default=cache / "outrider-demo-early-exit" / "model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lesson-minutes", type=float, default=5.0)
    parser.add_argument("--minutes", type=float, default=12.0, help="of training, earlier runs of it included")
    return parser


def main() -> None:
    """Lets the target write lessons, trains a copy of it on them and publishes that."""
    options = build_parser().parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.target)
    model = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    write_lessons(model, options.target, options.work / "lessons", options.lesson_minutes)
    held_out = token_stream(tokenizer, corpus.held_out_files())
    before = held_out_loss(model, held_out)
    recipe = replace(RECIPE, limit_s=60 * options.minutes)
    train(model, Library(options.work / "lessons"), recipe, options.work / "early_exit.pt")
    checkpoints.publish(model, tokenizer, options.out)
    print(f"held-out loss {before:.3f} before, {held_out_loss(model, held_out):.3f} after; {options.out}", flush=True)


if __name__ == "__main__":
    main()
