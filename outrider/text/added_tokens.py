"""Tokens that a model folder adds in other files than `tokenizer.json`. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from outrider.errors import ConfigurationError
from outrider.model_files import read_json
from outrider.text.chat_template import read_folder

_FILES: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_FLAGS: Final = ("special", "lstrip", "rstrip", "single_word", "normalized")


def tokens_beside(model_dir: Path, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tokens that transformers adds to those of `description`, the content of `tokenizer.json`; in its form.

    transformers is asked only if another file names a token that `tokenizer.json` does not have: reading a large
    vocabulary takes a second. Raises ConfigurationError.
    """
    vocab = description["model"]["vocab"]
    known = set(vocab) if isinstance(vocab, dict) else {row[0] for row in vocab}
    known |= {token["content"] for token in description.get("added_tokens") or []}
    if not any(name not in known for name in _named_tokens(model_dir)):
        return []
    added = read_folder(model_dir).backend_tokenizer.get_added_tokens_decoder()
    return [
        {"id": token_id, "content": token.content, **{flag: getattr(token, flag) for flag in _FLAGS}}
        for token_id, token in added.items()
        if token.content not in known
    ]


def _named_tokens(model_dir: Path) -> Iterator[str]:
    """Yields what may be the name of a token in the other files."""
    for file_name in _FILES:
        content: dict[str, Any] = {}
        with suppress(ConfigurationError):  # it is damaged, which whoever needs it reports
            content = read_json(model_dir / file_name, optional=True)
        if file_name == "added_tokens.json":
            yield from content
            continue
        for key, value in content.items():
            if key.endswith(("_token", "_tokens", "_tokens_decoder")):
                yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    """Yields the names in the value of a key: a name, a description with `content`, or a list or an object of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield from _texts(value["content"])
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
