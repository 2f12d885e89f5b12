"""Chooses the files of a model that serving needs. Pure.

Needed are descriptions, tokenizers, chat templates, and the safetensors files that transformers would read: those that
the index names, each once. Repositories often hold the same weights several times (pickles, `original/`, Mistral's
`consolidated.safetensors`, GGUF, other types); none of these is fetched, and neither is any code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from command_line.fetch.sources import Listing, SourceFile
from outrider.engine.loading.checkpoint_files import ADAPTER_FILES, INDEX_FILE, INDEX_SUFFIX, SINGLE_FILE
from outrider.errors import ConfigurationError

CONFIG: Final = "config.json"
_DESCRIPTIONS: Final = frozenset(
    {
        *(CONFIG, "generation_config.json", "adapter_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tekken.json"),
        *("chat_template.jinja", "chat_template.json"),
    }
)
_PATTERNS: Final = re.compile(r"[\w.-]+\.tiktoken|additional_chat_templates/[\w.-]+\.jinja|tiktoken\.model")
_OTHER_FORMATS: Final = (
    (".gguf", "GGUF files, which llama.cpp reads"),
    (".bin", "pickled weights (*.bin), and reading these runs whatever their author wrote into them"),
    (".pt", "pickled weights (*.pt), and reading these runs whatever their author wrote into them"),
    (".pth", "pickled weights (*.pth), and reading these runs whatever their author wrote into them"),
    (".h5", "weights for TensorFlow"),
    (".msgpack", "weights for Flax"),
    (".onnx", "weights for ONNX"),
)
_WAY_OUT: Final = (
    "name a repository or revision with safetensors (on the Hub conversions often wait as refs/pr/NUMBER), or save the "
    "model with transformers' save_pretrained"
)


def descriptions(listing: Listing) -> list[SourceFile]:
    """Small files, and the indices that say which others are needed."""
    return [
        file
        for file in listing.files
        if file.path in _DESCRIPTIONS
        or _PATTERNS.fullmatch(file.path)
        or ("/" not in file.path and file.path.endswith(INDEX_SUFFIX))
    ]


def refuse_unservable(listing: Listing, address: str) -> None:
    """Refuses, before anything is fetched, what has no safetensors in the root. Raises ConfigurationError."""
    paths = [file.path for file in listing.files]
    if not paths:
        raise ConfigurationError(f"{address} has no files; is the address right?")
    weights = [path for path in paths if "/" not in path and path.endswith(".safetensors") and not _is_extra(path)]
    if CONFIG in paths and weights:
        return
    if CONFIG not in paths and (nested := _shortest(path for path in paths if path.endswith(f"/{CONFIG}"))):
        reason = f"has no {CONFIG} of its own, but {nested}; name the folder that holds the model"
    elif weights or any(path.endswith(".safetensors") for path in paths):
        missing = CONFIG if CONFIG not in paths else SINGLE_FILE
        kept = _shortest(path for path in paths if path.endswith(".safetensors"))
        reason = f"has {kept}, but no {missing}, so it is not in Hugging Face format; {_WAY_OUT}"
    else:
        found = next((words for ending, words in _OTHER_FORMATS if any(path.endswith(ending) for path in paths)), None)
        reason = f"has no safetensors weights{f', only {found}' if found else ''}; {_WAY_OUT}"
    raise ConfigurationError(f"{address} {reason}. Nothing was fetched")


def weights(listing: Listing, names: Sequence[str], address: str) -> list[SourceFile]:
    """The files of weights of these names, the largest first. Raises ConfigurationError for one that is not there."""
    if outside := [name for name in names if "/" in name or not name.endswith(".safetensors")]:
        raise ConfigurationError(f"{address}: its index names {outside[0]!r}, which is no safetensors file beside it")
    found = {file.path: file for file in listing.files}
    if missing := [name for name in names if name not in found]:
        raise ConfigurationError(
            f"{address} lacks {len(missing)} of the {len(names)} files of weights that it names, such as {missing[0]}; "
            "its upload was not finished, or it is damaged. No weights were fetched"
        )
    chosen = {*names, *(name for name in ADAPTER_FILES if name in found and name.endswith(".safetensors"))}
    return sorted((found[name] for name in chosen), key=lambda file: (-file.size, file.path))


def usual_weights(listing: Listing) -> str:
    """The file that says which weights there are, if config.json names no other."""
    return SINGLE_FILE if listing.named(SINGLE_FILE) else INDEX_FILE


def _is_extra(path: str) -> bool:
    """Whether it is no model by itself."""
    return path.startswith("consolidated") or path in ADAPTER_FILES


def _shortest(paths: Iterable[str]) -> str | None:
    return min(paths, key=lambda path: (path.count("/"), path), default=None)
