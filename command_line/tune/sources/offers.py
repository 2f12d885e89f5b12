"""Finds which sources of hints the folders offer, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line.draft_kinds import Kind, kind_of_folder, usual_exit
from command_line.start.preflight import check_model, check_tokenizers
from outrider.engine.heads.kind import is_head
from outrider.errors import ConfigurationError

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
        exit_layer = usual_exit(target)
        layers = layers or ([] if exit_layer is None else [exit_layer])
    found += [_early_exit(target, count) for count in layers]
    return list(dict.fromkeys(found))


def is_plain_model(folder: Path) -> bool:
    """Whether a folder has neither a draft head nor a model with a mask token, so far as that can be read."""
    try:
        return kind_of_folder(folder) is Kind.MODEL
    except ConfigurationError:
        return not is_head(folder)  # loading names what cannot be read


def recognized(target: Path, folder: Path) -> Offer:
    """Recognizes the source that a folder given as a draft has for a target.

    Raises ConfigurationError, or ModelLoadError for a head of another target.
    """
    if is_head(folder):
        from outrider.engine.heads.loading import feature_shape

        feature_shape(folder, target)  # refuses a head of another target
        return Offer(kind_of_folder(folder), folder)
    check_model(folder, "--draft")
    check_tokenizers(target, folder)
    return Offer(kind_of_folder(folder), folder)


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
