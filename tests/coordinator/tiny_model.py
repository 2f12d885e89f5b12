"""A model folder without a model: a small byte-level tokenizer, trained in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["def f(x):\n    return x + 1\n", "import os, sys\n", "naïve 中文 text 😀 and more text\n"] * 3


def write_model_dir(directory: Path, **config: Any) -> Path:
    """A model folder with a byte-level tokenizer of some 300 entries."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", **config}))
    return directory


def write_other_model_dir(directory: Path, number: int) -> Path:
    """A model folder whose tokenizer differs from those of other numbers."""
    return exchange_letters(write_model_dir(directory), number)


def exchange_letters(directory: Path, number: int) -> Path:
    """Gives a model folder another tokenizer: two letters change places, others for each number."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    by_id = {token_id: token for token, token_id in vocab.items()}
    first, second = 10 + 2 * number, 11 + 2 * number
    vocab[by_id[first]], vocab[by_id[second]] = second, first
    path.write_text(json.dumps(content))
    return directory
