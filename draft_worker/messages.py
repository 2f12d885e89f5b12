"""Events that the draft scheduler takes, and actions and steps that it returns. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.sampling.logit_context import LogitContext
from outrider.errors import OutriderError
from outrider.grammar import GrammarState
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import DraftDistribution, Hint
from outrider.sampling_params import SamplingParams, SpeculationSettings


@dataclass(frozen=True, slots=True)
class AttachSession:
    """A coordinator asks for hints for a session at a target. `token_ids` are its committed tokens."""

    session_id: str
    attachment: int
    target_address: str
    token_ids: list[int]
    sampling: SamplingParams
    seed: int  # the client's in coupled mode, otherwise the draft worker's own
    num_prompt_tokens: int = 0  # of token_ids; 0: all
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    grammar: GrammarState | None = None  # in its initial state; the session owns it from here on
    cache_salt: str = ""  # of the sessions it shares KV blocks with
    owner: str = ""  # the tenant, or a digest of it: grammars are compiled and prompts computed by turns of owners
    is_background: bool = False  # no client waits for it: it makes room for others


@dataclass(frozen=True, slots=True)
class DetachSession:
    """A coordinator wants no more hints for a session."""

    session_id: str
    attachment: int


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A stream to this target was opened or reopened: subscriptions and hints must be sent anew."""

    target_address: str


@dataclass(frozen=True, slots=True)
class CommitReceived:
    """A target's message: the committed tokens from position `from_len` on."""

    session_id: str
    from_len: int
    token_ids: list[int]
    accepts_hints: bool
    is_finished: bool
    num_verified: int = 0  # hints that were verified for these tokens
    num_matched: int = 0  # the leading ones of them that were accepted
    features: bytes = b""  # for a draft head: of the positions from `features_from` on, as on the wire
    features_from: int = 0


Event = AttachSession | DetachSession | LinkOpened | CommitReceived


@dataclass(frozen=True, slots=True)
class AttachmentAccepted:
    """The session has a slot."""

    session_id: str


@dataclass(frozen=True, slots=True)
class AttachmentRefused:
    """The session has no slot, or cannot be drafted for."""

    session_id: str
    attachment: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class AttachmentEnded:
    """The target has reported the end of the session (`is_finished`), or this worker cannot follow it any further."""

    session_id: str
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Asks a target for the session's commits from position `known_len` on."""

    target_address: str
    session_id: str
    attachment: int
    known_len: int
    head: str = ""  # fingerprint of the draft head, which takes features
    known_features: int = 0  # leading positions whose features it has
    is_memory: bool = False


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Tells a target that the session's commits are no longer wanted."""

    target_address: str
    session_id: str


@dataclass(frozen=True, slots=True)
class SendHints:
    """Sends a target nodes of the session's hint tree, whose root follows `base_len` committed tokens."""

    target_address: str
    session_id: str
    attachment: int
    base_len: int
    hints: list[Hint]
    is_urgent: bool = True  # whether the target's next step could verify some of them
    match_len: int = 0  # of a memory: tokens before the root that the hints followed before


Action = AttachmentAccepted | AttachmentRefused | AttachmentEnded | Subscribe | Unsubscribe | SendHints


@dataclass(frozen=True, slots=True)
class KVMove:
    """KV entries that survived a move of the cursor, to be made contiguous before the next forward pass."""

    source_slots: npt.NDArray[np.int64]
    destination_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes that a step may feed beyond its item, one forward pass each. The first is the primary child of the item's
    first node, each further one the primary child of the one before."""

    max_nodes: int
    reach: float  # of the item's first node: probability that the committed tokens reach it
    min_reach: float  # lower bound for a node to be fed
    stop_token_ids: frozenset[int]  # tokens that are not fed
    tree_start: int  # as in engine.attention.QueryBlock
    path: Sequence[int]  # KV entries that the item's first node attends to


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step.

    `node_ids` are expanded: one row of logits each. Prefill has one (the cursor), or none for a chunk that is not the
    last; it feeds committed tokens and leaves the tree fields unset.
    """

    session_id: str
    kv: KVSequence
    token_ids: Sequence[int]
    node_ids: list[int]
    sampling: SamplingParams
    speculation: SpeculationSettings
    seed: int
    context: LogitContext  # per node: the tokens before its children
    first_draw: int  # number of the first random draw of this step; there is one per node
    acceptance_rate: float  # measured rate of this session's primary children
    calibration: Calibration | None  # of the draft model's confidence; None under rejection sampling
    tree_start: int = 0
    paths: Sequence[Sequence[int]] | None = None  # KV entries that each node attends to, as in QueryBlock
    chain: Chain | None = None
    num_masks: int = 0  # mask tokens fed behind the last row, each for one more token below what the one before guesses
    # For a draft head: slots of committed entries, and the target's features there, as on the wire.
    features: tuple[npt.NDArray[np.int64], bytes] | None = None
    corrected: Sequence[int] = ()  # committed tokens that it runs again on such features, in the same pass
    corrected_end: int = 0  # the entry after their last


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: KV entries to move before it, and the sessions' nodes to expand."""

    moves: list[KVMove]
    items: list[StepItem]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The children of one node: the primary child first, then alternatives, likeliest first."""

    token_ids: list[int]
    chances: list[float]  # estimated probability that the target generates this token here; 0 to 1
    # Of the primary child: the distribution it was drawn from in rejection mode, otherwise the draft model's
    # confidence in it (`outrider.hints.confidence`).
    distribution: DraftDistribution | None = None
    confidence: int = 0
