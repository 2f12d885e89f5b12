"""Finds which sources of hints the folders offer, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from command_line.start.preflight import check_model, check_tokenizers
from outrider.engine.heads.kind import HeadKind, folder_kind, is_head
from outrider.errors import ConfigurationError


class Kind(StrEnum):
    """How hints are drafted."""

    MODEL = "draft model"
    MASKS = "draft model with mask tokens"
    EARLY_EXIT = "first layers of the target"
    EAGLE3 = "EAGLE-3 head"
    MTP = "MTP layer"
    MEDUSA = "Medusa heads"
    LOOKUP = "lookup"


HEAD_KINDS = {HeadKind.EAGLE3: Kind.EAGLE3, HeadKind.MEDUSA: Kind.MEDUSA, HeadKind.MTP: Kind.MTP}
HEADS = frozenset({Kind.EAGLE3, Kind.MTP, Kind.MEDUSA})


@dataclass(frozen=True, slots=True)
class Offer:
    """A source that a folder offers."""

    kind: Kind
    folder: Path
    num_layers: int | None = None  # that run, with early exit

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.kind is Kind.EARLY_EXIT:
            return f"{self.num_layers} layer{'' if self.num_layers == 1 else 's'} of the target"
        return self.kind.value if self.kind in (Kind.LOOKUP, Kind.MTP) else self.folder.resolve().name


def offers(target: Path, drafts: Sequence[Path], early_exit: Sequence[int], *, is_everything: bool) -> list[Offer]:
    """The sources of these folders, each once. is_everything: also what the target's folder offers unasked.

    Raises ConfigurationError, or ModelLoadError for a head of another target.
    """
    found = [recognized(target, folder) for folder in drafts]
    layers = sorted(set(early_exit))
    if is_everything:
        found += _mtp_layer(target)
        layers = layers or _usual_exit(target)
    found += [_early_exit(target, count) for count in layers]
    return list(dict.fromkeys(found))


def is_plain_model(folder: Path) -> bool:
    """Whether a folder has neither a draft head nor a model with a mask token, so far as that can be read."""
    return _head_kind(folder) is None and not _reads_masks(folder)


def recognized(target: Path, folder: Path) -> Offer:
    """Recognizes the source that a folder given as a draft has for a target.

    Raises ConfigurationError, or ModelLoadError for a head of another target.
    """
    if folder.is_dir() and (kind := _head_kind(folder)) is not None:
        from outrider.engine.heads.loading import feature_shape

        feature_shape(folder, target)  # refuses a head of another target
        return Offer(kind, folder)
    check_model(folder, "--draft")
    check_tokenizers(target, folder)
    return Offer(Kind.MASKS if _reads_masks(folder) else Kind.MODEL, folder)


def _head_kind(folder: Path) -> Kind | None:
    """The kind of a head, None for a model. Raises ConfigurationError for a head that cannot be read."""
    # A checkpoint with an MTP layer is a model; the layer drafts for that model alone.
    return HEAD_KINDS[folder_kind(folder)] if is_head(folder) else None


def _reads_masks(folder: Path) -> bool:
    """Raises ModelLoadError for a mask token outside the model's vocabulary."""
    from transformers import AutoConfig

    from outrider.engine.model import mask_token

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return False  # loading names it
    return mask_token(config) is not None


def _mtp_layer(target: Path) -> list[Offer]:
    from outrider.engine.heads.checkpoint import HeadKind, open_head
    from outrider.engine.heads.loading import feature_shape
    from outrider.engine.kv.kv_plan import ModelLoadError

    try:
        if open_head(target).kind is not HeadKind.MTP:
            return []
        feature_shape(target, target)
    except ModelLoadError:  # no layer, or one that was left out of the files
        return []
    return [Offer(Kind.MTP, target)]


def _usual_exit(target: Path) -> list[int]:
    """A quarter of the target's layers."""
    from outrider.engine.heads.checkpoint import target_shape

    num_layers = target_shape(target).num_layers
    return [max(1, round(num_layers / 4))] if num_layers > 1 else []


def _early_exit(target: Path, num_layers: int) -> Offer:
    """Raises ConfigurationError if the target cannot exit there."""
    from transformers import AutoConfig

    from outrider.engine.loading.early_exit import exit_early

    try:
        config = AutoConfig.from_pretrained(target, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"cannot read {target / 'config.json'}: {error}") from error
    exit_early(config, num_layers)
    return Offer(Kind.EARLY_EXIT, target, num_layers)
