"""Conversion of text to token ids and back, and the identity of a vocabulary; never imports torch.

`transformers.AutoTokenizer` imports torch (checked with 5.23), which would cost every coordinator replica some 300 MB.
The class below it does not. It reads a folder's files (`outrider.text.chat_template`), so that tokens that stand beside
`tokenizer.json` are known as well, and this wraps the object of the `tokenizers` library that it makes of them.

Invariant: two model folders have the same `fingerprint` exactly when the same token id means the same piece of text in
both, so that a hint from one can be compared with a token of the other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import tokenizers

from outrider.errors import ConfigurationError
from outrider.model_files import read_json
from outrider.text.added_tokens import tokens_beside
from outrider.text.chat_template import ChatTemplates, read_folder

LONG_TEXT_CHARS: Final = 8192
"""Length in characters above which a text must not be tokenized on an event loop."""
LONG_TEXT_TOKENS: Final = 4096
"""Number of tokens from which they must not be decoded on an event loop."""
SHORT_STEPS_MAX: Final = 5000
"""Most steps of a chat template on an event loop, where nothing else happens meanwhile."""
TOKENS_KEPT: Final = 1 << 15
"""Tokens whose bytes are cached, in up to 6 MiB: a lookup takes 5 µs, and an answer with log probabilities needs dozens
per step."""

# Offsets are bookkeeping for the caller and dropout belongs to training; neither changes which text an id means.
_ADDED_TOKEN_KEYS: Final = ("id", "content", "special", "lstrip", "rstrip", "single_word", "normalized")
_COSMETIC_KEYS: Final = frozenset({"trim_offsets", "dropout"})


def fingerprint(model_dir: Path) -> str:
    """Identifies the meaning of a tokenizer's ids, as 16 hexadecimal characters.

    Covers model type and options, vocabulary, merges, normalizer, pre-tokenizer and added tokens, also those that stand
    in other files of the folder. Leaves out padding, truncation, offsets, the post-processor and decoder, the order of
    entries and the layout of the file. Ignores the rows of the model's embedding, so padding them changes nothing.

    Raises ConfigurationError when `tokenizer.json` is missing or invalid.
    """
    description = read_json(model_dir / "tokenizer.json")
    model = description.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ConfigurationError(f"{model_dir / 'tokenizer.json'} has no model with a vocabulary")
    added_tokens = [*(description.get("added_tokens") or []), *tokens_beside(model_dir, description)]
    added = [{key: token.get(key) for key in _ADDED_TOKEN_KEYS} for token in added_tokens]
    canonical = {
        "vocab": _canonical_vocab(model["vocab"], added),
        "merges": [canonical_merge(merge) for merge in model.get("merges") or []],
        "model": {
            key: value
            for key, value in _without_cosmetics(model).items()
            if key not in ("vocab", "merges") and value is not None and value is not False
        },
        "normalizer": _without_cosmetics(description.get("normalizer")),
        "pre_tokenizer": _without_cosmetics(description.get("pre_tokenizer")),
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
    }
    encoded = json.dumps(canonical, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(encoded.encode()).hexdigest()[:16]


def _canonical_vocab(vocab: Any, added: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Every id with its token. Some files list added tokens in both places, some only in one: the union."""
    # A Unigram vocabulary is a list of [token, score] whose index is the id.
    entries = vocab.items() if isinstance(vocab, dict) else ((row[0], i) for i, row in enumerate(vocab))
    by_id = {int(token_id): str(token) for token, token_id in entries}
    by_id.update({int(token["id"]): str(token["content"]) for token in added})
    return sorted(by_id.items())


def canonical_merge(merge: Any) -> list[str]:
    """A merge in one form: older files write it as "a b", newer ones as ["a", "b"]."""
    return merge.split(" ", 1) if isinstance(merge, str) else [str(part) for part in merge]


def _without_cosmetics(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_cosmetics(inner) for key, inner in value.items() if key not in _COSMETIC_KEYS}
    if isinstance(value, list):
        return [_without_cosmetics(inner) for inner in value]
    return value


class Tokenizer:
    """A model folder's tokenizer. Immutable after construction; safe to use from several threads."""

    def __init__(self, model_dir: Path, chat_template: str | None = None) -> None:
        """Loads `tokenizer.json`; `chat_template` overrides the model's own (Jinja text).

        Raises ConfigurationError when a file is missing or damaged, or the given template is no Jinja.
        """
        self.model_dir = model_dir
        self.fingerprint = fingerprint(model_dir)
        folder = read_folder(model_dir)
        self._tokenizer: tokenizers.Tokenizer = folder.backend_tokenizer
        self._own_eos_id: int | None = folder.eos_token_id
        self._known_bytes = lru_cache(TOKENS_KEPT)(self._find_bytes)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._chat = ChatTemplates(folder, chat_template)

    @property
    def has_chat_template(self) -> bool:
        """False: messages are joined by newlines, as for a base model."""
        return self._chat.is_own

    @property
    def chat_template(self) -> str:
        """The templates of `render_chat`, in Jinja: one, or the texts of several."""
        return self._chat.text

    def study_templates(self) -> None:
        """Compiles the chat templates and finds out what they expect, before the first request: takes milliseconds."""
        self._chat.study()

    @property
    def takes_only_short_call_ids(self) -> bool:
        """Whether the chat template refuses ids of tool calls that are not nine letters and digits."""
        return self._chat.takes_only_short_call_ids

    @property
    def vocab_size(self) -> int:
        """Number of ids with a meaning, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id with a meaning; there may be gaps."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids: the model's (`model_eos_token_ids`) and the tokenizer's. Empty when none is named."""
        own = frozenset() if self._own_eos_id is None else frozenset([self._own_eos_id])
        return own | model_eos_token_ids(self.model_dir)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with special tokens where the model's post-processor puts them.

        For a long text it releases the interpreter's lock, so that it can run on a thread beside an event loop.
        """
        if len(text) > LONG_TEXT_CHARS:  # tokenizers releases the lock for batches only
            (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a meaning decode to nothing, incomplete characters to U+FFFD.

        For many ids it releases the interpreter's lock, as `encode` does.
        """
        if len(token_ids) > LONG_TEXT_TOKENS:
            (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
            return str(text)
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def vocabulary_entry(self, token_id: int) -> str:
        """The vocabulary's entry for a token, as the model's files spell it; empty for an id without a meaning."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which need not be whole characters; empty for an id without a meaning.
        A special token's are those of its name.

        Exact for byte-level vocabularies and for those that spell bytes as <0x0A>. In others a token's bytes may depend
        on its position (a space at the start of the text); these are those of a text of this token alone.
        """
        return self._known_bytes(token_id)

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added_tokens:
            # The vocabulary's entry is normalized: Llama 2's starts with a space sign.
            return str(self._added_tokens[token_id].content).encode()
        if "ByteLevel" in self._decoder_types:
            return b"".join(
                bytes([_BYTES_BY_CHARACTER[character]]) if character in _BYTES_BY_CHARACTER else character.encode()
                for character in piece
            )
        if "ByteFallback" in self._decoder_types:
            is_byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(is_byte[1], 16)]) if is_byte else piece.replace("\u2581", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    @cached_property
    def added_token_ids(self) -> Mapping[str, int]:
        """Tokens outside the model's own vocabulary, by their text."""
        return {str(token.content): token_id for token_id, token in self._added_tokens.items()}

    def is_added(self, token_id: int) -> bool:
        """Whether a token is outside the model's own vocabulary."""
        return token_id in self._added_tokens

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` drops the token."""
        token = self._added_tokens.get(token_id)
        return token is not None and bool(token.special)

    @cached_property
    def _added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _decoder_types(self) -> frozenset[str]:
        decoder = self._tokenizer.decoder
        # Its pickled state is its entry in the file, which takes long to read where the vocabulary is large.
        description = {} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(part.get("type", "") for part in description.get("decoders") or [description])

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Renders a conversation in the model's chat format, ready for its answer (`ChatTemplates.render`).

        Encode it with `add_special_tokens=False`: the template writes them itself. `variables` are passed to the
        template. Raises InvalidRequest if the template refuses the conversation.
        """
        return self._chat.render(messages, variables)

    def render_short_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """As `render_chat`, on an event loop. Raises TemplateLimit if that would take more than some milliseconds,
        which depends on the template as well."""
        return self._chat.render(messages, variables, SHORT_STEPS_MAX)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template uses a variable of this name, so that it can change the prompt."""
        return name in self.chat_template


def model_eos_token_ids(model_dir: Path) -> frozenset[int]:
    """End-of-sequence ids that a model's configuration names: `generation_config.json`, else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(model_dir / name, optional=True).get("eos_token_id")
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def tokenizer_eos_token_ids(model_dir: Path) -> frozenset[int]:
    """The end-of-sequence id that a folder's tokenizer names; empty if it names none or there is no tokenizer."""
    eos_id = read_folder(model_dir).eos_token_id if (model_dir / "tokenizer.json").is_file() else None
    return frozenset() if eos_id is None else frozenset([eos_id])


def _bytes_by_character() -> dict[str, int]:
    """The spelling of bytes in byte-level vocabularies (GPT-2): printable ones as themselves, the others from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES_BY_CHARACTER: Final = _bytes_by_character()
_BYTE_PIECE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
