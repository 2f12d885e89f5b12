"""What a profile of a pair holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.cli.tune.advice import Advice
from outrider.cli.tune.agreement import Acceptance
from outrider.cli.tune.model import Pair
from outrider.cli.tune.times import StepTimes


@dataclass(frozen=True, slots=True)
class Settings:
    """How to load and how long to measure. `budget_s` is for each phase: target, draft, texts, ranks."""

    dtype: str
    quantization: str  # of the target
    num_threads: int  # of the target; a draft worker has one
    context_len: int  # tokens behind each sequence whose steps are timed
    num_tokens: int  # generated per prompt
    budget_s: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model's step times; `spread` is the half width of the middle half of one-token steps over their median."""

    times: StepTimes
    num_parameters: int
    spread: float
    context_len: int


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was measured, and the advice."""

    target: Path
    draft: Path
    settings: Settings
    machine: str  # in words
    target_profile: ModelProfile
    draft_profile: ModelProfile
    pair: Pair
    acceptance: tuple[Acceptance, ...]  # for γ = 1, 2, ...
    advice: tuple[Advice, ...]  # by rising batch
    num_prompts: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pair.texts))

    @property
    def paying(self) -> list[Advice]:
        """Batches at which speculation is recommended."""
        return [each for each in self.advice if each.num_speculative_tokens]
