"""Settings of a draft worker: bounds (I7), and what its model is beside an engine's. Pure, and loads without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.engine.options import EngineOptions
from outrider.settings import MODEL, SPECULATION, check, same_as, setting

MAX_TREE_NODES = 256  # KV entries that the engine provides for a tree, and half of what one message may hold
NUM_ALTERNATIVES = 4
"""Beside the primary child, unless told otherwise: beside a slow target there is time for unlikely branches."""
MAX_ALTERNATIVES = 32
MAX_MASK_TOKENS = 32


_SHARE: Final[Mapping[str, Any]] = {"group": SPECULATION, "at_least": 0, "at_most": 1, "is_advanced": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """Settings of a draft model: its name, the token ids in which it names its hints, and how much of it runs."""

    served_model_name: str | None = setting(
        None, "name of the draft model, by which a coordinator's --models file and canaries choose it",
        MODEL, "name", shows="the model folder's name",
    )  # fmt: skip
    target_tokenizer: Path | None = setting(
        None, "the target's model folder, or one with its tokenizer's files: hints use its token ids",
        MODEL, "folder", shows="the draft has the same",
    )  # fmt: skip
    allow_heterogeneous_vocab: bool = setting(
        False, "draft with a model that tokenizes differently from the target: only tokens that both have are "
        "proposed, so fewer hints are accepted; the output stays exact",
        MODEL,
    )  # fmt: skip
    early_exit_layer: int | None = setting(
        None, "run only so many of the model's layers, then its final norm and output layer; the rest is not loaded. "
        "With --model naming the target's folder, the target's first layers draft for it (early exit)",
        MODEL, "layers", at_least=1, shows="all",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of one draft worker (I7). Raises ConfigurationError, naming the flag."""

    max_num_seqs: int = same_as(EngineOptions, "max_num_seqs")
    max_num_batched_tokens: int = 512  # fed in one step, prefill included
    max_model_len: int = 1024  # tokens; a longer session gets no more hints
    max_nodes: int = setting(
        240, "live nodes of one hint tree", SPECULATION, "nodes", at_least=1, at_most=MAX_TREE_NODES
    )
    max_lookahead: int = setting(
        20, "how far a hint tree reaches ahead of the committed tokens", SPECULATION, "tokens", at_least=1
    )
    max_alternatives: int = setting(
        NUM_ALTERNATIVES, "other likely tokens that a node keeps in addition to the draft's own; 0: none",
        SPECULATION, "tokens", at_least=0, at_most=MAX_ALTERNATIVES,
    )  # fmt: skip
    max_nodes_per_step: int = setting(
        8, "nodes of all trees together that are fed in one forward pass; more rows slow the primary paths down",
        SPECULATION, "nodes", at_least=1, is_advanced=True,
    )  # fmt: skip
    max_chain_nodes: int = setting(
        3, "nodes of one path fed in a row before hints are sent and commits are received; 0: hints are sent one "
        "by one",
        SPECULATION, "nodes", at_least=0, at_most=MAX_TREE_NODES, is_advanced=True,
    )  # fmt: skip
    num_mask_tokens: int = setting(
        1, "mask tokens behind a path in one forward pass of a draft model that was trained for them (PARD): each "
        "guesses one more token; several sequences in a pass share the rows of --max-nodes-per-step; 0: none",
        SPECULATION, "tokens", at_least=0, at_most=MAX_MASK_TOKENS,
    )  # fmt: skip
    # Nodes that are less likely to be reached are not grown. Unlikely ones raise the prediction hit rate a little, but
    # the messages they make and the memory they read slow the target's steps down.
    min_reach: float = setting(
        0.03, "least probability of reaching a fed node; half of it beside targets with long steps", **_SHARE
    )  # fmt: skip
    min_sampled_reach: float = setting(
        0.15,
        "under rejection sampling, where each node needs a distribution on the wire: least probability of "
        "reaching a hint for its successor to be drafted and sent; lower is faster if bandwidth is plentiful",
        **_SHARE,
    )
    end_of_sequence_ids: frozenset[int] = field(default_factory=frozenset)
    enable_prefix_caching: bool = same_as(EngineOptions, "enable_prefix_caching")

    def __post_init__(self) -> None:
        check(self)
