"""Next-token training on the corpus, for the target and for the draft's start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from demo.optimizer import Budget, MasterAdamW, learning_rate

CHECKPOINT_EVERY_S = 60.0
PROGRESS_EVERY_STEPS = 20
HELD_OUT_WINDOWS, HELD_OUT_LEN = 128, 256


@dataclass(frozen=True)
class Recipe:
    """Settings of one training stage. A batch always has `batch_tokens` tokens, in rows of either length."""

    name: str
    num_steps: int
    limit_s: float
    peak_rate: float
    warmup_steps: int = 60
    batch_tokens: int = 4096
    short_len: int = 256
    long_len: int = 512
    # Prompts and answers reach past 400 tokens, so the last part of training sees longer rows.
    long_from: float = 0.6
    weight_decay: float = 0.1


def corpus_batch(tokens: torch.Tensor, recipe: Recipe, step: int, progress: float) -> torch.Tensor:
    """Random windows of the token stream, [rows, length + 1]; a function of step and length only."""
    length = recipe.long_len if progress >= recipe.long_from else recipe.short_len
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - length - 1, (recipe.batch_tokens // length,), generator=generator)
    return tokens[starts[:, None] + torch.arange(length + 1)]


def next_token_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of rows [rows, length + 1]."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Mean cross-entropy in nats over evenly spread windows of the held-out token stream."""
    device = next(model.parameters()).device
    starts = torch.linspace(0, len(tokens) - HELD_OUT_LEN - 2, HELD_OUT_WINDOWS).long()
    rows = tokens[starts[:, None] + torch.arange(HELD_OUT_LEN + 1)].to(device)
    losses = [next_token_loss(model, part).item() for part in rows.split(16)]
    return sum(losses) / len(losses)


class Stage:
    """One resumable training loop: model, optimizer, budget, checkpoint file, progress lines."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe, checkpoint: Path) -> None:
        self.model = model
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.optimizer = MasterAdamW(model, weight_decay=recipe.weight_decay)
        self.budget = Budget(recipe.num_steps, recipe.limit_s)
        self.num_tokens = 0
        self.is_done = False
        if checkpoint.exists():
            self._resume(torch.load(checkpoint, map_location=next(model.parameters()).device))

    def _resume(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.budget.step, self.budget.spent_s = state["step"], state["spent_s"]
        self.num_tokens, self.is_done = state["num_tokens"], state["is_done"]
        print(f"{self.recipe.name}: resumed at step {self.budget.step}, done: {self.is_done}", flush=True)

    def save(self) -> None:
        """Write the checkpoint in one rename."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "step": self.budget.step,
            "spent_s": self.budget.elapsed_s(),
            "num_tokens": self.num_tokens,
            "is_done": self.is_done,
        }
        staging = self.checkpoint.with_suffix(".new")
        torch.save(state, staging)
        os.replace(staging, self.checkpoint)

    def run(self, loss_of: Callable[[int, float], tuple[torch.Tensor, int]]) -> None:
        """Train until the budget is spent; `loss_of(step, progress)` gives a loss and its token count."""
        if self.is_done:
            return
        self.model.train()
        saved_at = window_started = time.monotonic()
        window_losses: list[float] = []
        window_tokens = 0
        while (progress := self.budget.progress()) < 1.0:
            loss, num_tokens = loss_of(self.budget.step, progress)
            loss.backward()
            recipe = self.recipe
            rate = learning_rate(recipe.peak_rate, self.budget.step, recipe.warmup_steps, progress)
            self.optimizer.step(rate)
            self.budget.step += 1
            self.num_tokens += num_tokens
            window_losses.append(loss.item())
            window_tokens += num_tokens
            now = time.monotonic()
            if self.budget.step % PROGRESS_EVERY_STEPS == 0:
                speed = window_tokens / (now - window_started)
                print(
                    f"{recipe.name}: step {self.budget.step}/{recipe.num_steps}"
                    f" loss {sum(window_losses) / len(window_losses):.3f} rate {rate:.2e}"
                    f" {speed:.0f} tokens/s ETA {self.budget.remaining_s() / 60:.1f} min",
                    flush=True,
                )
                window_started, window_losses, window_tokens = now, [], 0
            if now - saved_at > CHECKPOINT_EVERY_S:
                self.save()
                saved_at = now
        self.is_done = True
        self.save()
        self.model.eval()


def pretrain(model: LlamaForCausalLM, tokens: torch.Tensor, recipe: Recipe, checkpoint: Path) -> LlamaForCausalLM:
    """Train the model on the token stream, or take it from a finished checkpoint."""
    device = next(model.parameters()).device
    stage = Stage(model, recipe, checkpoint)

    def loss_of(step: int, progress: float) -> tuple[torch.Tensor, int]:
        rows = corpus_batch(tokens, recipe, step, progress).to(device)
        return next_token_loss(model, rows), recipe.batch_tokens

    stage.run(loss_of)
    model.eval()
    return model
