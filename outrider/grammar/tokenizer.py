"""A model's vocabulary in llguidance's format.

Invariant: a token of the model has the same id here, and has bytes only if it stands for text. Control tokens have
none, whatever they are called, so a grammar that asks for the text `<|eos|>` gets its letters and never the token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from outrider.errors import ConfigurationError
from outrider.model_files import read_json
from outrider.text.added_tokens import tokens_beside


def load_tokenizer(tokenizer_json: Path) -> tuple[LLTokenizer, int]:
    """The vocabulary, and the number of ids in it that the model knows.

    One more id follows them, which ends a sequence for llguidance alone: `GrammarCompiler` knows the model's own ids.
    Raises ConfigurationError when llguidance cannot read the file or cannot know the bytes of its tokens.
    """
    try:
        description = read_json(tokenizer_json)
        description["added_tokens"] += tokens_beside(tokenizer_json.parent, description)
        end_id = _make_control_tokens_impossible(description)
        tokenizer = LLTokenizer(json.dumps(description), eos_token=end_id)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its Rust panics are no Exceptions
        raise ConfigurationError(f"llguidance cannot use {tokenizer_json.name}: {error}") from error
    if tokenizer.vocab_size != end_id + 1:
        raise ConfigurationError(f"llguidance cannot use {tokenizer_json.name}: its token ids have gaps")
    return tokenizer, end_id


def _make_control_tokens_impossible(description: dict[str, Any]) -> int:
    """Renames control tokens in place, fills gaps between the ids and appends the end; returns its id.

    Otherwise the text of a control token inside forced text would be tokenized to that token, which no grammar accepts,
    and the sequence would be stuck. llguidance treats every added token that is special or looks like `<this>` as
    control.
    """
    vocab = description["model"]["vocab"]
    added = description["added_tokens"]
    by_id = {token_id: text for text, token_id in vocab.items()} if isinstance(vocab, dict) else {
        token_id: row[0] for token_id, row in enumerate(vocab)
    }  # fmt: skip
    by_id |= {token["id"]: token["content"] for token in added}
    end_id = max(by_id) + 1

    for token in added:
        text = token["content"]
        if not (token["special"] or (text.startswith("<") and text.endswith(">"))):
            continue
        token |= {"content": _impossible(token["id"]), "special": True}
        if isinstance(vocab, dict):
            vocab.pop(text, None)
            vocab[token["content"]] = token["id"]
        elif token["id"] < len(vocab):
            vocab[token["id"]][0] = token["content"]
        if description["model"].get("unk_token") == text:
            description["model"]["unk_token"] = token["content"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id in sorted(set(range(end_id + 1)) - by_id.keys()):
        added.append({"id": token_id, "content": _impossible(token_id), "special": True, **flags})
        if isinstance(vocab, dict):
            vocab[_impossible(token_id)] = token_id
    added.sort(key=lambda token: int(token["id"]))
    # These do not affect the meaning of ids, and the first names control tokens.
    description |= {"post_processor": None, "padding": None, "truncation": None}
    return end_id


def _impossible(token_id: int) -> str:
    """A name that occurs in no text: U+10FFFF is a Unicode noncharacter."""
    return f"\U0010ffff{token_id}\U0010ffff"
