"""What bounds a draft worker (I7), and what it does unless told otherwise. Pure, and loads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import ConfigurationError

MAX_TREE_NODES = 256  # KV entries that the engine provides for a tree, and half of what one message may hold
NUM_ALTERNATIVES = 4
"""Beside the primary child, unless told otherwise: beside a slow target there is time for unlikely branches."""
MAX_ALTERNATIVES = 32


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of one draft worker (I7)."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512  # fed in one step, prefill included
    max_model_len: int = 1024  # tokens; a longer session gets no more hints
    max_nodes: int = 240  # live nodes of one tree
    max_lookahead: int = 20  # depth below the cursor
    max_alternatives: int = NUM_ALTERNATIVES  # of a node; 0: its primary child only
    max_nodes_per_step: int = 8  # of all sessions; more rows a step slow the primary paths down
    max_chain_nodes: int = 3  # fed one below the other by one step, before hints are sent
    # Nodes that are less likely to be reached are not grown. Unlikely ones raise the prediction hit rate a little, but
    # the messages they make and the memory they read slow the target's steps down.
    min_reach: float = 0.03
    min_sampled_reach: float = 0.15  # in rejection mode, where each node costs a distribution on the wire
    end_of_sequence_ids: frozenset[int] = field(default_factory=frozenset)
    enable_prefix_caching: bool = True  # texts that begin alike share KV blocks

    def __post_init__(self) -> None:
        """Raises ConfigurationError, naming the flag."""
        if self.max_num_seqs < 1 or self.max_lookahead < 1:
            raise ConfigurationError("--max-num-seqs and --max-lookahead must be at least 1")
        if not 1 <= self.max_nodes <= MAX_TREE_NODES:
            raise ConfigurationError(f"--max-nodes is {self.max_nodes}; permitted: 1 to {MAX_TREE_NODES}")
        if not 0 <= self.max_alternatives <= MAX_ALTERNATIVES:
            raise ConfigurationError(
                f"--max-alternatives is {self.max_alternatives}; permitted: 0 to {MAX_ALTERNATIVES}"
            )
        if self.max_nodes_per_step < 1:
            raise ConfigurationError("--max-nodes-per-step must be at least 1")
        if not 0 <= self.max_chain_nodes <= MAX_TREE_NODES:
            raise ConfigurationError(
                f"--max-chain-nodes is {self.max_chain_nodes}; permitted: 0 to {MAX_TREE_NODES}"
            )
        for flag, reach in (("min-reach", self.min_reach), ("min-sampled-reach", self.min_sampled_reach)):
            if not 0.0 <= reach <= 1.0:
                raise ConfigurationError(f"--{flag} is {reach:g}; permitted: 0 to 1")
