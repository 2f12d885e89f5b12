"""Kinds of draft heads, recognized by their configuration and the names of their tensors. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.loading.checkpoint_files import tensors_of
from outrider.errors import ConfigurationError
from outrider.model_files import read_json

_READABLE: Final = "EAGLE-3 (of SafeAILab and of speculators), Medusa, and MTP of DeepSeek-V3, GLM-4.5 and Qwen3-Next"


class HeadKind(StrEnum):
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MTP = "mtp"


def kind_of(folder: Path, config: Mapping[str, Any], names: Collection[str]) -> HeadKind:
    """The kind of head in a folder with tensors of these names. Raises ModelLoadError if it is none that can be
    read."""
    described = config.get("speculators_model_type")
    if described == "eagle3":
        return HeadKind.EAGLE3
    if described is not None:
        raise ModelLoadError(f"{folder} is a head of the kind {described} (speculators); can be read: {_READABLE}")
    if _has_mtp_layers(config, names):
        return HeadKind.MTP
    if any(name.endswith(".hidden_norm.weight") for name in names):
        return HeadKind.EAGLE3
    if any(_is_medusa(name) for name in names):
        return HeadKind.MEDUSA
    named = ", ".join(map(str, config.get("architectures") or [config.get("model_type", "nothing")]))
    if "fc.weight" in names:
        raise ModelLoadError(f"{folder} ({named}) is a head of EAGLE 1 or 2; can be read: {_READABLE}")
    raise ModelLoadError(f"{folder} ({named}) is no draft head of a known kind; can be read: {_READABLE}")


def is_head(folder: Path) -> bool:
    """Whether a folder has a draft head and no model of its own, which one with MTP layers has; false, too, where it
    can be read as neither."""
    try:
        config, names = read_json(folder / "config.json"), tensor_names(folder)
    except ConfigurationError:
        return False
    return bool(_described(config)) or "fc.weight" in names or any(map(_is_medusa, names))


def has_mtp_layers(folder: Path) -> bool:
    """Whether a model's folder has layers for multi-token prediction; false, too, where it cannot be read."""
    try:
        return _has_mtp_layers(read_json(folder / "config.json"), tensor_names(folder))
    except ConfigurationError:
        return False


def kind_of_draft(target: Path, draft: Path) -> HeadKind | None:
    """The kind of the draft head in a folder; None where it has a model, or nothing. The target's own
    folder stands for its MTP layers, if it has some. Raises ConfigurationError."""
    if is_head(draft):
        return folder_kind(draft)
    is_own = draft.is_dir() and draft.resolve() == target.resolve()
    return HeadKind.MTP if is_own and has_mtp_layers(draft) else None


def folder_kind(folder: Path) -> HeadKind:
    """The kind of head in a folder. Raises ConfigurationError if there is none that can be read."""
    config = read_json(folder / "config.json")
    names = tensor_names(folder)
    described = _described(config)
    if described is not None and not names:  # pickled weights, which are not read
        return described
    return kind_of(folder, config, names)


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in a folder's safetensors files. Raises ConfigurationError."""
    return frozenset(tensor.name for path in sorted(folder.glob("*.safetensors")) for tensor in tensors_of(path))


def _has_mtp_layers(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return bool(config.get("num_nextn_predict_layers")) or any(name.startswith("mtp.") for name in names)


def _described(config: Mapping[str, Any]) -> HeadKind | None:
    """The kind of head that a configuration tells of; None for a model's."""
    if config.get("medusa_num_heads") is not None or config.get("model_type") == "medusa":
        return HeadKind.MEDUSA
    is_eagle = any("Eagle" in str(each) for each in config.get("architectures") or ())
    return HeadKind.EAGLE3 if is_eagle or "speculators_model_type" in config else None


def _is_medusa(name: str) -> bool:
    parts = name.removeprefix("medusa_heads.").removeprefix("medusa_head.").split(".")
    return (parts[0].isdigit() and parts[1].isdigit()) or parts[0] == "blocks"
