"""Data of one profile of a pair. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from command_line.tune.advice import Advice
from command_line.tune.agreement import Acceptance
from command_line.tune.model import Pair
from command_line.tune.placement.prediction import Placements
from command_line.tune.times import StepTimes


@dataclass(frozen=True, slots=True)
class Settings:
    """How models are loaded and how long is measured. `budget_s` applies to each phase: target, draft, sequences,
    ranks, the models where else they could run."""

    dtype: str
    quantization: str  # of the target
    num_threads: int  # of the target; a draft worker has one thread
    context_len: int  # tokens in the KV cache of each sequence whose steps are timed
    num_tokens: int  # generated per prompt
    budget_s: float
    device: str = "cpu"  # cpu or cuda


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model's step times. `spread` is half the interquartile range of one-token steps over their median."""

    times: StepTimes
    num_parameters: int
    spread: float
    context_len: int


@dataclass(frozen=True, slots=True)
class Findings:
    """All measurements and the advice."""

    target: Path
    draft: Path
    settings: Settings
    machine: str  # hardware, for people
    target_profile: ModelProfile
    draft_profile: ModelProfile
    pair: Pair
    acceptance: tuple[Acceptance, ...]  # for γ = 1, 2, ...
    advice: tuple[Advice, ...]  # by increasing batch size
    num_prompts: int
    placements: Placements | None = None  # None: not compared

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pair.texts))

    @property
    def paying(self) -> list[Advice]:
        """Batch sizes at which speculation is recommended."""
        return [each for each in self.advice if each.num_speculative_tokens]
