"""Writes the checkpoints of both shapes, and checks how often they agree."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.gpu.checkpoints import (
    LLAMA_1B,
    LLAMA_8B,
    TINY_DRAFT,
    TINY_TARGET,
    Shape,
    chosen_tokens,
    num_bytes_on_disk,
    write,
)
from benchmarks.gpu.language import ACCEPTANCE, END_TOKEN_ID, SEED, Language, made_language
from benchmarks.gpu.outcome import Outcome, Setting

NUM_CHECKED: Final = 4096  # tokens


@dataclass(frozen=True, slots=True)
class Models:
    """Shapes of both models of a session, and their language."""

    target: Shape
    draft: Shape
    language: Language


def models_of(setting: Setting) -> Models:
    """The models of a session."""
    shapes = (TINY_TARGET, TINY_DRAFT) if setting.is_tiny else (LLAMA_8B, LLAMA_1B)
    return Models(*shapes, made_language(is_tiny=setting.is_tiny))


def prompts_of(language: Language, num_prompts: int, num_tokens: int, seed: int = 7) -> list[list[int]]:
    """Prompts of random tokens, none of them the end token."""
    generator = np.random.default_rng(seed)
    vocab_size = len(language.successors)
    drawn: list[list[int]] = generator.integers(END_TOKEN_ID + 1, vocab_size, (num_prompts, num_tokens)).tolist()
    return drawn


def run(setting: Setting, outcome: Outcome) -> None:
    """Writes both folders. Raises OSError where the disk lacks room for them."""
    models = models_of(setting)
    setting.scratch.mkdir(parents=True, exist_ok=True)
    needed, free = num_bytes_on_disk(models.target, models.draft), shutil.disk_usage(setting.scratch).free
    is_there = setting.target.exists() and setting.draft.exists()
    if free < needed and not is_there:
        raise OSError(
            f"{setting.scratch} has {free / 1e9:.0f} GB free, the checkpoints take {needed / 1e9:.0f}: "
            "name another folder with --scratch"
        )
    language = models.language
    for name, shape, folder, is_target in (
        ("target", models.target, setting.target, True),
        ("draft", models.draft, setting.draft, False),
    ):
        outcome.put(f"{name}_parameters", shape.num_parameters)
        seconds = write(folder, shape, language, is_target=is_target, seed=SEED + 1 + is_target, device=setting.device)
        outcome.put(f"{name}_written_in_s", round(seconds, 1))
    outcome.put("acceptance_wanted", ACCEPTANCE)
    outcome.put("acceptance_of_the_language", round(language.acceptance, 4))
    tokens = [int(each) for each in language.walk(1, min(NUM_CHECKED, models.target.vocab_size - 2))]
    said = chosen_tokens(setting.target, tokens, setting.device)
    guessed = chosen_tokens(setting.draft, tokens, setting.device)
    outcome.put("target_says_the_successor", round(float(np.mean(np.array(said) == language.successors[tokens])), 4))
    outcome.put("acceptance_of_the_weights", round(float(np.mean(np.array(said) == np.array(guessed))), 4))
