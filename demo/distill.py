"""Distillation: trains the draft to predict the target's tokens, on the target's own output."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from demo.pretrain import Recipe, Stage
from demo.teacher import Lessons, load_lessons

# About 50 % of a row is prompt, which is corpus text; at this weight it makes up about 25 % of the loss.
PROMPT_WEIGHT = 0.5


def alignment_loss(
    logits: torch.Tensor,
    kept_ids: torch.Tensor,
    kept_logprobs: torch.Tensor,
    weights: torch.Tensor,
    argmax_share: float,
) -> torch.Tensor:
    """Weighted mean over positions of a mix of two losses, in nats.

    One is the KL divergence from the target's distribution, with all tokens that were not kept counted as one;
    acceptance under sampling depends on it. The other is the cross-entropy of the target's first choice; greedy
    acceptance depends on it.

    logits: float [positions, vocab], the draft's
    kept_ids, kept_logprobs: [positions, kept], the target's best tokens, best first
    weights: float [positions]
    """
    draft_kept = functional.log_softmax(logits, dim=-1).gather(-1, kept_ids)
    target_probs = kept_logprobs.exp()
    target_rest = (1 - target_probs.sum(-1)).clamp_min(1e-4)
    draft_rest = (1 - draft_kept.exp().sum(-1)).clamp_min(1e-4)
    divergence = (target_probs * (kept_logprobs - draft_kept)).sum(-1)
    divergence = divergence + target_rest * (target_rest.log() - draft_rest.log())
    loss = (1 - argmax_share) * divergence - argmax_share * draft_kept[:, 0]
    return (loss * weights).sum() / weights.sum()


def batches(lessons: list[Lessons], batch_tokens: int, epoch: int) -> list[tuple[Lessons, torch.Tensor]]:
    """One pass over all rows in random order, rows of a batch from one set: (lessons, row indices)."""
    rng = random.Random(epoch)
    result: list[tuple[Lessons, torch.Tensor]] = []
    for number, lesson in enumerate(lessons):
        num_rows, length = lesson.token_ids.shape
        generator = torch.Generator().manual_seed(epoch * 100_003 + number)
        order = torch.randperm(num_rows, generator=generator)
        result += [(lesson, part) for part in order.split(max(1, batch_tokens // length))]
    rng.shuffle(result)
    return result


def lesson_loss(
    model: LlamaForCausalLM, lesson: Lessons, rows: torch.Tensor, argmax_share: float
) -> tuple[torch.Tensor, int]:
    """The alignment loss of some rows of one set of lessons, and how many positions it covers."""
    device = next(model.parameters()).device
    inputs = lesson.token_ids[rows, :-1].to(device).long()
    logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
    weights = torch.ones(inputs.shape, device=device)
    weights[:, : lesson.prompt_len - 1] = PROMPT_WEIGHT
    loss = alignment_loss(
        logits,
        lesson.kept_ids[rows].flatten(0, 1).to(device).long(),
        lesson.kept_logprobs[rows].flatten(0, 1).to(device).float(),
        weights.flatten(),
        argmax_share,
    )
    return loss, inputs.numel()


class Library:
    """The lessons in a folder; another process may add to them while they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[Path, Lessons] = {}

    def all(self) -> list[Lessons]:
        """Every finished file so far."""
        for path in sorted(self.folder.glob("*.pt")):
            if path not in self._loaded:
                self._loaded[path] = load_lessons(path)
        return list(self._loaded.values())


LessonLoss = Callable[[Lessons, torch.Tensor, int], tuple[torch.Tensor, int]]
"""The loss of some rows of one set of lessons in a step, and its number of tokens: (lessons, row indices, step)."""


def train_on_lessons(
    model: torch.nn.Module, library: Library, recipe: Recipe, checkpoint: Path, loss: LessonLoss
) -> None:
    """Trains until the recipe's budget is spent; each pass over the lessons takes in new ones."""
    queue: list[tuple[Lessons, torch.Tensor]] = []

    def loss_of(step: int, progress: float) -> tuple[torch.Tensor, int]:
        if not queue:
            lessons = library.all()
            if not lessons:
                raise FileNotFoundError(f"no lessons in {library.folder}")
            # A run that continues does not begin again with the sequences that it began with before.
            queue.extend(batches(lessons, recipe.batch_tokens, epoch=step))
            print(f"{recipe.name}: a pass over {len(lessons)} files, {len(queue)} batches", flush=True)
        lesson, rows = queue.pop()
        return loss(lesson, rows, step)

    Stage(model, recipe, checkpoint).run(loss_of)
    model.eval()


def distill(
    model: LlamaForCausalLM, library: Library, recipe: Recipe, checkpoint: Path, *, argmax_share: float
) -> None:
    """Train the draft on the lessons until the recipe's budget is spent."""
    train_on_lessons(
        *(model, library, recipe, checkpoint),
        lambda lesson, rows, _: lesson_loss(model, lesson, rows, argmax_share),
    )
