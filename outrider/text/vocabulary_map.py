"""Maps the target's vocabulary to the different one of a draft model.

Hints are token ids of the target, and every hint is verified, so that a draft with any vocabulary keeps the output
exact; it has to name its guesses by the target's ids. A token with the same bytes in both is shared. The draft guesses
only shared tokens, with its distribution renormalized over them (token-level intersection, Timor et al. 2502.05202,
algorithm 4). A target's token that the draft lacks still takes one position in the draft's input, where it is replaced
by the last token with which the draft would spell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigurationError
from outrider.model_files import read_json
from outrider.text.tokenizer import Tokenizer, canonical_merge


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """The draft's own token for each of the target's."""

    own_ids: Sequence[int]  # [number of the target's tokens]
    is_shared: Sequence[bool]  # whether it has the same bytes

    @property
    def num_shared(self) -> int:
        return sum(self.is_shared)


def has_same_base(target_dir: Path, own_dir: Path) -> bool:
    """Whether two tokenizers differ at most in their added tokens, so that they tokenize identically."""
    return _base(target_dir) == _base(own_dir)


def _base(model_dir: Path) -> Mapping[str, Any]:
    try:
        description = read_json(model_dir / "tokenizer.json")
        added = {token["content"] for token in description.get("added_tokens") or []}
        model = description["model"]
        vocab = model["vocab"]
        entries = vocab.items() if isinstance(vocab, dict) else ((row[0], i) for i, row in enumerate(vocab))
        return {
            "vocab": {token: token_id for token, token_id in entries if token not in added},
            "merges": [canonical_merge(merge) for merge in model.get("merges") or []],
            "type": model.get("type"),
            "normalizer": description.get("normalizer"),
            "pre_tokenizer": description.get("pre_tokenizer"),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"cannot read {model_dir / 'tokenizer.json'}: {error}") from error


def map_vocabulary(target: Tokenizer, own: Tokenizer, num_own_ids: int) -> VocabularyMap:
    """Builds the map. num_own_ids: rows of the draft model; tokens beyond them count as missing.

    Where the end-of-sequence tokens have different names, they are mapped to each other.
    """
    by_bytes = {
        own.token_bytes(token_id): token_id
        for token_id in reversed(range(min(own.num_ids, num_own_ids)))
        if not own.is_added(token_id)
    }
    by_name = {name: token_id for name, token_id in own.added_token_ids.items() if token_id < num_own_ids}
    names = {token_id: name for name, token_id in target.added_token_ids.items()}
    own_ends = sorted(token_id for token_id in own.eos_token_ids if token_id < num_own_ids)
    own_ids, is_shared = [], []
    for token_id in range(target.num_ids):
        spelled = target.token_bytes(token_id)
        if token_id in names:
            found = by_name.get(names[token_id])
            if found is None and token_id in target.eos_token_ids and own_ends:
                found = own_ends[0]
        else:
            found = by_bytes.get(spelled) if spelled else None
        is_shared.append(found is not None)
        own_ids.append(_stand_in(own, spelled, num_own_ids) if found is None else found)
    return VocabularyMap(own_ids, is_shared)


def _stand_in(own: Tokenizer, spelled: bytes, num_own_ids: int) -> int:
    token_ids = own.encode(spelled.decode(errors="replace"), add_special_tokens=False)
    known = [token_id for token_id in token_ids if token_id < num_own_ids]
    return known[-1] if known else 0
