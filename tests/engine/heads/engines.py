"""Heads of the tiny checkpoints, loaded; folders go away with the test process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from outrider.engine.heads.eagle3 import Eagle3Projection
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.loading import load_head, load_medusa, load_projection
from outrider.engine.heads.medusa import MedusaHeads
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.layers import linear
from outrider.engine.sequence_chunk import SequenceChunk
from tests import models
from tests.engine.heads.checkpoints import EAGLE3_CASES, MEDUSA_CASES, write_target
from tests.engine.heads.mtp_checkpoints import MTP_CASES

ATTENDING = (*EAGLE3_CASES, *MTP_CASES)
CASES = {case.name: case for case in (*ATTENDING, *MEDUSA_CASES)}


@functools.cache
def folders(name: str) -> tuple[Path, Path]:
    """The folders of a case's head and of its target; an MTP layer is in its target's."""
    case = CASES[name]
    root = models.root_dir() / f"head-{name}"
    head = case.write(root / "head")
    return head, head if case in MTP_CASES else write_target(root / "target", case.target_hidden)


@functools.cache
def head_engine(name: str, dtype: str = "float32") -> HeadEngine:
    head, target = folders(name)
    with without_probes():
        return load_head(models.engine_config(head, dtype, kv_cache_gib=0.004), target)


@functools.cache
def medusa(name: str) -> MedusaHeads:
    with without_probes():
        return load_medusa(*folders(name), torch.float32)


@functools.cache
def projection(name: str) -> Eagle3Projection:
    with without_probes():
        return load_projection(*folders(name), torch.float32)


@functools.cache
def features(name: str, length: int) -> torch.Tensor:
    """Features that the target gives for every token.  # [length, hidden_size]"""
    case = CASES[name]
    states = case.states(length)
    if case not in EAGLE3_CASES:
        return states
    return projection(name).project(states)


def without_probes() -> Any:
    """Every linear layer in the same form, which is not probed: that would take longer than all else."""
    return patch.object(linear, "choose_form", lambda *_: (linear.PLAIN_FORMS[1], True))


def run(
    engine: HeadEngine, kv: KVSequence, token_ids: Sequence[int], num_logits: int | None = None, **tree: Any
) -> torch.Tensor:
    """Runs further tokens of a sequence and returns the logits of the last of them, of all by default."""
    kv.extend(len(token_ids))
    return engine.forward([
        SequenceChunk(kv, token_ids, len(token_ids) if num_logits is None else num_logits, **tree)
    ])  # fmt: skip


def start(engine: HeadEngine, token_ids: Sequence[int], given: torch.Tensor) -> tuple[KVSequence, torch.Tensor]:
    """A sequence whose first `len(given)` entries have the target's features, and the logits of all its rows."""
    kv = engine.new_sequence()
    kv.extend(len(token_ids))
    give(engine, kv, 0, given)
    return kv, engine.forward([SequenceChunk(kv, token_ids, len(token_ids))])


def give(engine: HeadEngine, kv: KVSequence, first: int, given: torch.Tensor) -> None:
    """The target's features of entries from `first` on arrive."""
    engine.set_features(kv.slots(first, first + len(given)), given)


def feature_of(engine: HeadEngine, kv: KVSequence, entry: int) -> torch.Tensor:
    return engine.features[int(kv.slots(entry, entry + 1)[0])].clone()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinite where only one of them rules a token out."""
    ruled_out = torch.isinf(expected)
    if found.shape != expected.shape or not torch.equal(torch.isinf(found), ruled_out):
        return float("inf")
    return float(np.abs((found - expected)[~ruled_out].numpy()).max())
