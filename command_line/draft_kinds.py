"""The kinds of sources that folders offer, told by configurations and the names of tensors. Never imports torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from outrider.engine.heads.kind import HeadKind, folder_kind, is_head
from outrider.engine.options import MASK_TOKEN_KEYS
from outrider.model_files import read_json

EARLY_EXIT_SHARE: Final = 4
"""A quarter of the target's layers draft: fewer are wrong too often, more take too long."""


class Kind(StrEnum):
    """How hints are drafted."""

    MODEL = "draft model"
    MASKS = "draft model with mask tokens"
    EARLY_EXIT = "first layers of the target"
    EAGLE3 = "EAGLE-3 head"
    MTP = "MTP layer"
    MEDUSA = "Medusa heads"
    LOOKUP = "lookup"


HEAD_KINDS: Final = {HeadKind.EAGLE3: Kind.EAGLE3, HeadKind.MEDUSA: Kind.MEDUSA, HeadKind.MTP: Kind.MTP}


def kind_of_folder(folder: Path) -> Kind:
    """The kind of a draft model or head. Raises ConfigurationError for a folder that cannot be read."""
    # A checkpoint with an MTP layer is a model; the layer drafts for that model alone.
    if is_head(folder):
        return HEAD_KINDS[folder_kind(folder)]
    config = read_json(folder / "config.json")
    has_mask_token = any(config.get(key) is not None for key in MASK_TOKEN_KEYS)
    return Kind.MASKS if has_mask_token else Kind.MODEL


def usual_exit(target: Path) -> int | None:
    """Number of the target's first layers that draft unless told otherwise; None where it has too few."""
    config = read_json(target / "config.json")
    num_layers = config.get("num_hidden_layers") or (config.get("text_config") or {}).get("num_hidden_layers") or 0
    return max(1, round(num_layers / EARLY_EXIT_SHARE)) if num_layers > 1 else None
