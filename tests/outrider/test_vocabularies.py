"""Whole characters out of every kind of vocabulary that models come with, token by token."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from outrider.text.detokenizer import IncrementalDetokenizer
from outrider.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café über straße",
    "def f(x): return x + 1",
    "Hello, world! It's a test.",
] * 5
TEXTS = (
    "the fox",
    "naïve 中文 😀 𓀀 end",
    " lead",
    "trail  ",
    "a\n\n  b",
    "it's 'quoted' , well .",
    "👩‍👩‍👧 family",
    "中文字符没有空格也没有一个词",
    "e\u0301x",
    "<tool>x<tool> y",
    "<s> hi",
    "already � unreadable �",
)
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = sorted(set("".join(CORPUS).replace(" ", "▁")))
WORDS = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("o", "x"), ("▁", "f"), ("▁f", "ox"), ("l", "l"), ("▁", "▁")]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def spelled_bytes() -> tokenizers.Tokenizer:
    pieces = [*SPECIAL, *BYTES, *LETTERS]
    pieces += [left + right for left, right in WORDS]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=WORDS, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )


def llama_2() -> tokenizers.Tokenizer:
    made = spelled_bytes()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def metaspace() -> tokenizers.Tokenizer:
    """Llama 2 as newer files write it; Mistral."""
    made = llama_2()
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return made


def gemma() -> tokenizers.Tokenizer:
    made = spelled_bytes()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def unigram() -> tokenizers.Tokenizer:
    """SentencePiece's own kind."""
    pieces = [(piece, 0.0) for piece in SPECIAL] + [(piece, -10.0) for piece in BYTES]
    pieces += [(letter, -5.0) for letter in LETTERS]
    pieces += [(word, -3.0) for word in ("▁the", "▁qu", "ick", "▁over", "▁def", "▁▁")]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    return made


def word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    )
    return made


KINDS = (byte_level, llama_2, metaspace, gemma, unigram, word_piece)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return written(request.param, tmp_path_factory.mktemp("tokenizer"))


def written(kind: Callable[[], tokenizers.Tokenizer], directory: Path) -> Tokenizer:
    made = kind()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["<tool>"])
    made.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def pieces_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], context: Sequence[int] = (), *, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, context_token_ids=context, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def readable(text: str) -> str:
    return text.replace("\ufffd", "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
class TestTexts:
    def test_the_pieces_add_up_to_what_is_decoded_at_once(self, tokenizer: Tokenizer, text: str, skip: bool) -> None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(pieces_of(tokenizer, token_ids, skip=skip)) == expected

    def test_no_piece_holds_half_a_character(self, tokenizer: Tokenizer, text: str, skip: bool) -> None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
        pieces = pieces_of(tokenizer, token_ids, skip=skip)
        assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")

    def test_a_text_goes_on_after_a_prompt_cut_anywhere(self, tokenizer: Tokenizer, text: str, skip: bool) -> None:
        """Within a character too: it is then shown whole, as part of the answer."""
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
        for cut in range(1, len(token_ids)):
            rest = "".join(pieces_of(tokenizer, token_ids[cut:], token_ids[:cut], skip=skip))
            assert whole.endswith(rest), cut
            # What the prompt shows alone and what is missing of it are all of the text, and nothing twice.
            prompt = tokenizer.decode(token_ids[:cut], skip_special_tokens=skip)
            assert len(prompt.rstrip("\ufffd")) + len(rest) <= len(whole) + prompt.count("\ufffd"), cut
            assert len(whole) - len(rest) <= len(prompt), cut


def test_any_tokens_are_shown_soon_and_nothing_readable_is_lost(tokenizer: Tokenizer) -> None:
    """A model may say bytes that are no text. Decoded at once, a vocabulary that spells bytes gives up the whole run of
    them; token by token, what was readable has been shown."""
    generator = random.Random(0)
    for _ in range(200):
        token_ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(1, 25))]
        pieces = pieces_of(tokenizer, token_ids)
        left = iter("".join(pieces))
        assert all(character in left for character in readable(tokenizer.decode(token_ids))), token_ids


@pytest.mark.parametrize("kind", [llama_2, metaspace, gemma, unigram], ids=lambda kind: kind.__name__)
def test_an_unreadable_byte_costs_one_sign_and_not_its_neighbours(
    kind: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    model = written(kind, tmp_path)
    byte = functools.partial(_byte_id, model)
    smile = [byte(each) for each in "😀".encode()]
    assert "".join(pieces_of(model, [*smile, byte(0x80), *model.encode("x", add_special_tokens=False)])).split() in (
        ["😀\ufffdx"],
        ["😀\ufffd", "x"],  # the vocabulary puts a space before what is encoded alone
    )


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(number for number in range(tokenizer.vocab_size) if tokenizer.token_bytes(number) == bytes([byte]))


@pytest.mark.parametrize("kind", KINDS[:-1], ids=lambda kind: kind.__name__)
def test_the_bytes_of_tokens_are_the_text(kind: Callable[[], tokenizers.Tokenizer], tmp_path: Path) -> None:
    """WordPiece cannot say: a space belongs to no token."""
    model = written(kind, tmp_path)
    for text in TEXTS:
        token_ids = model.encode(text, add_special_tokens=False)
        spelled = b"".join(map(model.token_bytes, token_ids)).decode()
        assert spelled.lstrip(" ") == model.decode(token_ids, skip_special_tokens=False).lstrip(" ")


def test_added_tokens_are_text_and_special_ones_are_not(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.added_token_ids[name] for name in ("<s>", "<tool>", "</s>")]
    assert "".join(pieces_of(tokenizer, token_ids)).strip() == "<tool>"
    assert "".join(pieces_of(tokenizer, token_ids, skip=False)).replace(" ", "") == "<s><tool></s>"
