"""Recognizes the kind of head in a folder, and the target it was made for.

Formats: EAGLE-3 as SafeAILab publishes it (Li et al., 2503.01840) and as the speculators package does; Medusa as
FasterDecoding and vLLM store it (Cai et al., 2401.10774); layers for multi-token prediction in the checkpoints of
DeepSeek-V3 (2412.19437), GLM-4.5 and Qwen3-Next. What does not fit the target is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from outrider.engine.heads.tensors import TensorFiles
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.loading.checkpoint_files import read_json
from outrider.engine.model import own_limit
from outrider.errors import ConfigurationError

_READABLE: Final = "EAGLE-3 (of SafeAILab and of speculators), Medusa, and MTP of DeepSeek-V3, GLM-4.5 and Qwen3-Next"


class HeadKind(StrEnum):
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The shape of a target, as far as its heads must know it."""

    model: Path
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    longest: int  # sequence that the target was made for, tokens


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A folder with a head: its kind, its config.json and its tensors."""

    folder: Path
    kind: HeadKind
    config: dict[str, Any]
    files: TensorFiles


def target_shape(model_dir: Path) -> TargetShape:
    """Reads the shape of the target from its config.json. Raises ModelLoadError."""
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot read the target {model_dir}: {error}") from error
    text = hf_config.get_text_config()
    return TargetShape(
        model_dir, text.model_type, text.hidden_size, text.num_hidden_layers, text.vocab_size, own_limit(text)
    )


def open_head(folder: Path) -> HeadFolder:
    """Recognizes the head in a folder. Raises ModelLoadError if there is none that can be read."""
    try:
        config = read_json(folder / "config.json")
    except ConfigurationError as error:
        raise ModelLoadError(f"no draft head in {folder}: {error}") from error
    files = TensorFiles.open(folder)
    return HeadFolder(folder, _kind(folder, config, files), config, files)


def _kind(folder: Path, config: dict[str, Any], files: TensorFiles) -> HeadKind:
    described = config.get("speculators_model_type")
    if described == "eagle3":
        return HeadKind.EAGLE3
    if described is not None:
        raise ModelLoadError(f"{folder} is a head of the kind {described} (speculators); can be read: {_READABLE}")
    if config.get("num_nextn_predict_layers") or any(name.startswith("mtp.") for name in files.headers):
        return HeadKind.MTP
    if any(name.endswith(".hidden_norm.weight") for name in files.headers):
        return HeadKind.EAGLE3
    if any(_is_medusa(name) for name in files.headers):
        return HeadKind.MEDUSA
    named = ", ".join(map(str, config.get("architectures") or [config.get("model_type", "nothing")]))
    if "fc.weight" in files.headers:
        raise ModelLoadError(f"{folder} ({named}) is a head of EAGLE 1 or 2; can be read: {_READABLE}")
    raise ModelLoadError(f"{folder} ({named}) is no draft head of a known kind; can be read: {_READABLE}")


def _is_medusa(name: str) -> bool:
    parts = name.removeprefix("medusa_heads.").removeprefix("medusa_head.").split(".")
    return (parts[0].isdigit() and parts[1].isdigit()) or parts[0] == "blocks"
