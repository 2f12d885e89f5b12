"""Finds the files of an engine's tokenizer, whose fingerprint draft workers compare with their own."""

from __future__ import annotations

import os


def tokenizer_dir(name: str) -> str | None:
    """The folder of a tokenizer that was loaded by this name: a folder itself, or of a hub's cache."""
    if os.path.isdir(name):
        return name
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "tokenizer.json")
    return os.path.dirname(found) if isinstance(found, str) else None
