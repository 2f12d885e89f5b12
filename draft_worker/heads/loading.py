"""A draft head as the model of a draft worker: it drafts from states of the target, which come with the commits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from draft_worker.heads.arrived_features import ArrivedFeatures
from outrider.engine.heads.checkpoint import open_head
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.heads.kind import HeadKind
from outrider.engine.heads.loading import load_head
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.engine.options import EngineOptions

FEATURE_ITEM_BYTES = 2
"""Features travel as bfloat16."""


def target_of(head: Path, target_dir: Path | None) -> Path:
    """The folder of a head's target. Raises ModelLoadError where none was named."""
    if target_dir is None or not (target_dir / "config.json").is_file():
        raise ModelLoadError(f"{head} has a draft head: name its target's model folder with --target-tokenizer")
    return target_dir


def load(target_dir: Path, options: EngineOptions, _device: str) -> HeadEngine:
    """Loads the head in `options.model`. Raises ModelLoadError."""
    if (kind := open_head(options.model).kind) is not HeadKind.EAGLE3:
        raise ModelLoadError(
            f"{options.model} has a head of the kind {kind}, which runs beside the "
            "target's model: start the target with --draft-head and this folder, and no draft worker for it"
        )
    return load_head(options, target_dir)


def features_of(engine: HeadEngine) -> Callable[[], ArrivedFeatures]:
    """Makes what a new session keeps of the target's features."""
    fingerprint = checkpoint_fingerprint(engine.config.model)
    return partial(ArrivedFeatures, fingerprint, FEATURE_ITEM_BYTES * engine.feature_size)
