"""Opens the folder of a head, and reads the shape of the target it was made for.

Formats: EAGLE-3 as SafeAILab publishes it (Li et al., 2503.01840) and as the speculators package does; Medusa as
FasterDecoding and vLLM store it (Cai et al., 2401.10774); layers for multi-token prediction in the checkpoints of
DeepSeek-V3 (2412.19437), GLM-4.5 and Qwen3-Next. What does not fit the target is refused here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.heads.kind import HeadKind as HeadKind
from outrider.engine.heads.kind import kind_of
from outrider.engine.heads.tensors import TensorFiles
from outrider.engine.kv.kv_plan import ModelLoadError
from outrider.engine.model import own_limit
from outrider.errors import ConfigurationError
from outrider.model_files import read_json


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
    return HeadFolder(folder, kind_of(folder, config, files.headers), config, files)
