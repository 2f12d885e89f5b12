"""Settings of a memory worker: bounds (I7) and vocabulary. Pure, and loads without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draft_worker.limits import DraftLimits
from outrider.engine.options import EngineOptions
from outrider.settings import CAPACITY, MODEL, REQUIRED, SPECULATION, check, same_as, setting

MEMORY_NAME = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Settings of the tokens that are remembered, and of the process. Raises ConfigurationError, naming the flag."""

    tokenizer: Path = setting(
        REQUIRED, "the target's model folder, or one with its tokenizer's files, whose token ids are remembered",
        MODEL, "folder",
    )  # fmt: skip
    served_model_name: str = setting(
        MEMORY_NAME, "name by which a coordinator's --models file admits it among a model's draft models", MODEL, "name"
    )
    cpu_affinity: str | None = same_as(EngineOptions, "cpu_affinity")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Bounds of one memory worker (I7). Raises ConfigurationError, naming the flag."""

    max_memory_tokens: int = setting(
        1 << 20, "tokens remembered, 50 to 130 bytes each; beyond that the oldest of the tenant with the most are "
        "forgotten",
        CAPACITY, "tokens", at_least=4096,
    )  # fmt: skip
    max_scopes: int = setting(
        1024, "tenants, times their cache salts, that are remembered; beyond that the tenant with the most forgets the "
        "one that was silent longest",
        CAPACITY, "scopes", at_least=1,
    )  # fmt: skip
    max_num_seqs: int = setting(1024, "sessions followed at once", CAPACITY, "sessions", at_least=1)
    max_model_len: int = setting(
        1 << 18, "longest sequence that is followed, prompt and output", CAPACITY, "tokens", at_least=2
    )
    max_nodes: int = same_as(DraftLimits, "max_nodes", 48)
    max_lookahead: int = same_as(DraftLimits, "max_lookahead")
    min_reach: float = setting(
        0.03, "least probability of reaching a hint for it to be sent", SPECULATION, at_least=0, at_most=1,
        is_advanced=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
