"""Trains a draft that predicts several tokens in one forward pass, from the shipped draft (PARD, arXiv 2504.18583).

    python -m demo.parallel --work DIR

The draft learns to read mask tokens: the row of mask j behind a token predicts what the target says j + 1 tokens after
that token. The lessons are those of `demo.teacher`. Most of the rows far from their token are left out, as in the
paper's conditional drop of tokens: a step then costs about twice that of plain distillation. The mask token is the
tokenizer's padding token, which no sequence contains, so the vocabulary stays the target's. Lessons and checkpoint stay
in the work folder, and a run continues from them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo import checkpoints, vocabulary
from demo.distill import PROMPT_WEIGHT, Library, alignment_loss, train_on_lessons
from demo.pretrain import Recipe
from demo.teacher import Lessons
from demo.train import ARGMAX_SHARE, DEMO, write_lessons

MASK_TOKEN_ID = vocabulary.PAD_TOKEN_ID
MAX_OFFSET = 7
"""Mask tokens behind a token in training; the row of the last one predicts the eighth token."""
KEPT_SHARE = 0.65
"""Share of the rows at one offset that are kept at the next one."""
RECIPE = Recipe("parallel", num_steps=20000, limit_s=1200.0, peak_rate=1.5e-3, batch_tokens=2048, weight_decay=0.02)


@dataclass(frozen=True)
class Rows:
    """The rows of a training sequence: its tokens, then mask tokens behind some of them.

    anchors: int64 [num_rows], the index of the token that a row belongs to
    offsets: int64 [num_rows], 0 for the token itself, j for the j-th mask token behind it
    """

    anchors: torch.Tensor
    offsets: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """Index of the token in whose place a row stands; what it predicts comes next.  # int64 [num_rows]"""
        return self.anchors + self.offsets

    def visible(self) -> torch.Tensor:
        """Which rows a row sees: the tokens up to its own, and the masks behind that one up to itself.  # bool
        [num_rows, num_rows]"""
        anchor, offset = self.anchors[:, None], self.offsets[:, None]
        is_before = (self.offsets == 0) & (self.anchors <= anchor)
        is_own = (self.offsets > 0) & (self.anchors == anchor) & (self.offsets <= offset)
        return is_before | is_own


def draw_rows(length: int, first_anchor: int, seed: int) -> Rows:
    """Rows of a sequence of `length` tokens, with masks behind tokens from `first_anchor` on.

    Offset j + 1 keeps `KEPT_SHARE` of the anchors of offset j, so that a kept row sees all masks before it.
    """
    order = first_anchor + torch.randperm(length - first_anchor, generator=torch.Generator().manual_seed(seed))
    anchors, offsets = [torch.arange(length)], [torch.zeros(length, dtype=torch.long)]
    for offset in range(1, MAX_OFFSET + 1):
        kept = order[: int(len(order) * KEPT_SHARE**offset)]
        kept = kept[kept + offset < length].sort().values
        anchors.append(kept)
        offsets.append(torch.full_like(kept, offset))
    return Rows(torch.cat(anchors), torch.cat(offsets))


def row_logits(model: LlamaForCausalLM, token_ids: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Logits of all rows of sequences [num_sequences, length].  # -> [num_sequences, num_rows, vocab]"""
    inputs = token_ids[:, rows.anchors]
    inputs = torch.where(rows.offsets > 0, MASK_TOKEN_ID, inputs)
    visible = rows.visible()[None, None].expand(len(inputs), 1, -1, -1)
    positions = rows.positions[None].expand(len(inputs), -1)
    return model(input_ids=inputs, attention_mask=visible, position_ids=positions, use_cache=False).logits


def parallel_loss(
    model: LlamaForCausalLM, lesson: Lessons, chosen: torch.Tensor, argmax_share: float, seed: int
) -> tuple[torch.Tensor, int]:
    """The alignment loss of some sequences of one set of lessons, mask rows included, and its number of tokens."""
    token_ids = lesson.token_ids[chosen, :-1].long()
    rows = draw_rows(token_ids.shape[1], lesson.prompt_len - 1, seed)
    positions = rows.positions
    weights = torch.where(positions < lesson.prompt_len - 1, PROMPT_WEIGHT, 1.0)
    loss = alignment_loss(
        row_logits(model, token_ids, rows).flatten(0, 1).float(),
        lesson.kept_ids[chosen][:, positions].flatten(0, 1).long(),
        lesson.kept_logprobs[chosen][:, positions].flatten(0, 1).float(),
        weights.expand(len(chosen), -1).flatten(),
        argmax_share,
    )
    return loss, token_ids.numel()


def train(model: LlamaForCausalLM, library: Library, recipe: Recipe, checkpoint: Path) -> None:
    """Trains until the recipe's budget is spent; each pass over the lessons takes in new ones."""
    train_on_lessons(
        *(model, library, recipe, checkpoint),
        lambda lesson, chosen, step: parallel_loss(model, lesson, chosen, ARGMAX_SHARE, seed=step),
    )


def publish(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the draft, with the mask token's id where published PARD checkpoints have it."""
    model.config.pard_token = MASK_TOKEN_ID
    checkpoints.publish(model, tokenizer, folder)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "outrider-demo-parallel")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", help="where training begins")
    parser.add_argument("--out", type=Path, default=DEMO / "parallel_draft")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lesson-minutes", type=float, default=10.0)
    parser.add_argument("--lessons-only", action="store_true", help="only write lessons, while another process trains")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, earlier runs of it included")
    return parser


def main() -> None:
    """Lets the target write lessons, trains on them and publishes the draft."""
    options = build_parser().parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.target)
    target = LlamaForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).eval()
    write_lessons(target, options.target, options.work / "lessons", options.lesson_minutes)
    if options.lessons_only:
        return
    model = LlamaForCausalLM.from_pretrained(options.draft, dtype=torch.bfloat16)
    recipe = replace(RECIPE, limit_s=60 * options.minutes)
    train(model, Library(options.work / "lessons"), recipe, options.work / "parallel.pt")
    publish(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
