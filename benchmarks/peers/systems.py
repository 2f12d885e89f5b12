"""Systems to compare, and the commands of the peers' processes. Pure."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

PLAIN: Final = "plain"
DRAFT: Final = "draft"
WEAK: Final = "weak"
MAX_MODEL_LEN: Final = 640  # most held-out prompts have 27 to 190 tokens, and a few of other scripts up to 450


class Family(StrEnum):
    OUTRIDER = "outrider"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class System:
    """One way to generate. Outrider's target has core 0 and its draft core 1, or with two target cores both, as with
    `outrider serve --share-cores`; a peer runs both models on all its cores."""

    family: Family
    mode: str  # PLAIN, DRAFT or WEAK
    num_target_cores: int

    @property
    def name(self) -> str:
        """Name such as outrider-draft or vllm-draft-2, where 2 is the number of cores."""
        is_apart = self.family is Family.OUTRIDER and self.num_target_cores == 1
        cores = "" if is_apart else f"-{self.num_target_cores}"
        return f"{self.family}-{self.mode}{cores}"

    @property
    def num_cores(self) -> int:
        """Number of cores of target and draft together."""
        has_draft_core = self.family is Family.OUTRIDER and self.mode != PLAIN and self.num_target_cores == 1
        return self.num_target_cores + has_draft_core

    @property
    def plain(self) -> System:
        """The same system without a draft."""
        return System(self.family, PLAIN, self.num_target_cores)

    @property
    def batch_max(self) -> int | None:
        """Largest batch; None: any. transformers' assisted generation takes one request."""
        return 1 if self.family is Family.TRANSFORMERS else None


def all_systems(*, has_vllm: bool, has_weak_draft: bool) -> list[System]:
    """All systems, in the order of the first round."""
    modes = [PLAIN, DRAFT, *([WEAK] if has_weak_draft else [])]
    families = [Family.OUTRIDER, Family.TRANSFORMERS, *([Family.VLLM] if has_vllm else [])]
    return [System(family, mode, cores) for family in families for cores in (1, 2) for mode in modes]


def select(systems: Sequence[System], patterns: Sequence[str]) -> list[System]:
    """Systems whose name fits a pattern, such as vllm-*-2; all without patterns.

    Raises ArgumentTypeError for a pattern that fits none.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(system.name, pattern) for system in systems):
            known = ", ".join(system.name for system in systems)
            raise argparse.ArgumentTypeError(f"no system fits {pattern!r}; there are {known}")
    return [
        system
        for system in systems
        if not patterns or any(fnmatch.fnmatchcase(system.name, pattern) for pattern in patterns)
    ]


def peer_command(
    system: System,
    *,
    target: Path,
    drafts: Mapping[str, Path],
    vllm_python: Path | None,
    num_speculative_tokens: int,
    max_num_seqs: int,
    max_model_len: int = MAX_MODEL_LEN,
) -> list[str]:
    """Command of a peer's process, to run in the folder above `benchmarks`. `drafts` by mode."""
    settings = {
        "target": str(target.resolve()),
        "draft": None if system.mode == PLAIN else str(drafts[system.mode].resolve()),
        "cores": list(range(system.num_target_cores)),
        "num_speculative_tokens": num_speculative_tokens,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
    }
    python = str(vllm_python) if system.family is Family.VLLM else sys.executable
    return [python, "-m", f"benchmarks.peers.{system.family}_engine", json.dumps(settings)]


def peer_environment(system: System, preload: Sequence[Path]) -> dict[str, str]:
    """Environment variables beside the inherited ones. `preload`: libraries for vLLM."""
    last = system.num_target_cores - 1
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if last == 0:
        # Two threads on one core would spin while they wait for each other. With more cores vLLM chooses well
        # by itself.
        environment["OMP_NUM_THREADS"] = "1"
    if system.family is Family.VLLM:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0" if last == 0 else f"0-{last}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if preload:
            environment["LD_PRELOAD"] = ":".join(map(str, preload))
    return environment
