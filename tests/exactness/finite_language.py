"""A grammar that can be written down as a list of texts, so that what may follow needs no parser.

One token is one character, so every text is spelled in one way only.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from outrider.grammar import GrammarCompiler, GrammarState
from outrider.sampling_params import GrammarKind, GrammarSpec
from tests import grammars
from tests.exactness.in_process import LARGE, SMALL, TinyModel
from tests.models import root_dir

FIRST_CHARACTER = 33  # of printable ASCII that is no blank


def character(token_id: int) -> str:
    """The character that byte-level vocabularies use for the token."""
    return chr(FIRST_CHARACTER + token_id) if token_id < 94 else chr(0xA1 + token_id - 94)


class FiniteLanguage:
    """`num_least` to `num_most` of `words` (tuples of token ids), then perhaps `last`."""

    def __init__(
        self,
        tiny: TinyModel,
        words: Sequence[tuple[int, ...]],
        num_least: int,
        num_most: int,
        last: tuple[int, ...],
    ) -> None:
        self._tiny = tiny
        self._words, self._last = words, last
        self._num_least, self._num_most = num_least, num_most
        self.texts = {
            (*itertools.chain.from_iterable(chosen), *end)
            for count in range(num_least, num_most + 1)
            for chosen in itertools.product(words, repeat=count)
            for end in ((), last)
        }
        self._following: dict[tuple[int, ...], set[int]] = {}
        for text in self.texts:
            for length, token_id in enumerate(text):
                self._following.setdefault(text[:length], set()).add(token_id)

    def mask(self, output: Sequence[int]) -> torch.Tensor:
        """The permitted next tokens, including end-of-sequence ids where an output may end.  # bool [vocab_size]"""
        permitted = torch.zeros(self._tiny.vocab_size, dtype=torch.bool)
        permitted[sorted(self._following.get(tuple(output), ()))] = True
        if tuple(output) in self.texts:
            permitted[list(self._tiny.end_of_sequence_ids)] = True
        return permitted

    @functools.cached_property
    def grammar(self) -> GrammarState:
        """The same as a regular expression, compiled by the product; to be forked."""
        words = "|".join("".join(map(_escaped, word)) for word in self._words)
        last = "".join(map(_escaped, self._last))
        pattern = f"({words}){{{self._num_least},{self._num_most}}}({last})?"
        compiler = GrammarCompiler(
            _tokenizer_json(self._tiny),
            vocab_size=self._tiny.vocab_size,
            eos_token_ids=frozenset(self._tiny.end_of_sequence_ids),
        )
        return grammars.compiled(compiler, GrammarSpec(GrammarKind.REGEX, pattern))


def _escaped(token_id: int) -> str:
    return f"\\x{ord(character(token_id)):02x}"


@functools.cache
def _tokenizer_json(tiny: TinyModel) -> Path:
    vocab = {character(token_id): token_id for token_id in range(tiny.vocab_size)}
    for token_id in tiny.end_of_sequence_ids:
        del vocab[character(token_id)]
        vocab[f"<|end{token_id}|>"] = token_id
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|end{token_id}|>" for token_id in tiny.end_of_sequence_ids])
    assert json.loads(tokenizer.to_str())["added_tokens"][0]["id"] == tiny.end_of_sequence_ids[0]
    path = root_dir() / f"exactness-tokenizer-{tiny.vocab_size}.json"
    tokenizer.save(str(path))
    return path


SMALL_LANGUAGE = FiniteLanguage(SMALL, words=((0, 1), (1, 0), (2, 3), (2, 4), (5,)), num_least=1, num_most=3, last=(7,))
"""With choices, tokens without a choice, texts that may end or go on, and texts that can only end."""
LARGE_LANGUAGE = FiniteLanguage(
    LARGE,
    words=(tuple(range(10, 22)), (30, 3, 5, 40, 50, 8), *((token_id, 60) for token_id in range(60, 76))),
    num_least=2,
    num_most=3,
    last=(0, 1, 2, 3),
)
"""With long stretches without a choice."""
