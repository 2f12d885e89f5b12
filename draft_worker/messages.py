"""What the draft scheduler is told (events) and what it wants done (actions). Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.confidence import Calibration
from outrider.engine.kv_cache import KVSequence
from outrider.engine.text_before import TextBefore
from outrider.errors import OutriderError
from outrider.grammar import GrammarState
from outrider.hint_tree import DraftDistribution, Hint
from outrider.sampling_params import SamplingParams, SpeculationSettings

# Events.


@dataclass(frozen=True, slots=True)
class AttachSession:
    session_id: str
    attachment: int
    target_address: str
    token_ids: list[int]
    sampling: SamplingParams
    seed: int  # the client's in coupled mode, the draft worker's own otherwise
    num_prompt_tokens: int = 0  # of token_ids; 0: all
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    grammar: GrammarState | None = None  # at its beginning; the session's own from here on
    cache_salt: str = ""  # of the sessions that it shares KV blocks with
    owner: str = ""  # on whose behalf its grammar is compiled


@dataclass(frozen=True, slots=True)
class DetachSession:
    session_id: str
    attachment: int


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """A stream to this target was opened, or opened again: everything it should know must be said anew."""

    target_address: str


@dataclass(frozen=True, slots=True)
class CommitHeard:
    session_id: str
    from_len: int
    token_ids: list[int]
    is_listening: bool
    is_finished: bool
    num_tried: int = 0  # hints that were verified for these tokens
    num_held: int = 0  # of these, the leading ones that held


Event = AttachSession | DetachSession | LinkOpened | CommitHeard


# Actions.


@dataclass(frozen=True, slots=True)
class AttachmentAccepted:
    session_id: str


@dataclass(frozen=True, slots=True)
class AttachmentRefused:
    session_id: str
    attachment: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class AttachmentEnded:
    """The target said that the session has ended."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Subscribe:
    target_address: str
    session_id: str
    attachment: int
    known_len: int


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    target_address: str
    session_id: str


@dataclass(frozen=True, slots=True)
class SendHints:
    target_address: str
    session_id: str
    attachment: int
    base_len: int
    hints: list[Hint]
    is_urgent: bool = True  # whether the target's next step could verify some of them


Action = AttachmentAccepted | AttachmentRefused | AttachmentEnded | Subscribe | Unsubscribe | SendHints


# One step.


@dataclass(frozen=True, slots=True)
class KVMove:
    """KV entries that survived a move of the cursor, to be brought together before the next forward pass."""

    source_slots: npt.NDArray[np.int64]
    destination_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes that a step may feed on top of what it was given, one pass after the other: each is the primary child of
    the one before, the first that of the item's first node."""

    max_nodes: int
    reach: float  # of the item's first node: how likely it is to be reached
    min_reach: float  # of the nodes to be fed
    stop_token_ids: frozenset[int]  # nodes that are not to be fed
    tree_start: int  # as in engine.attention.QueryBlock
    path: Sequence[int]  # KV entries that the item's first node sees there


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step.

    `node_ids` are expanded: one row of logits each. Prefill has one (the cursor) or, for a chunk that is not the
    last, none; it feeds committed tokens and leaves the tree fields unset.
    """

    session_id: str
    kv: KVSequence
    token_ids: Sequence[int]
    node_ids: list[int]
    sampling: SamplingParams
    speculation: SpeculationSettings
    seed: int
    text: TextBefore  # per node: what stands before its children
    first_draw: int  # the number of the first draw that this step may make, one per node
    acceptance_rate: float  # of this session's primary children, as far as experience goes
    calibration: Calibration | None  # of the draft model's own confidence; None under rejection sampling
    tree_start: int = 0
    paths: Sequence[Sequence[int]] | None = None  # KV entries that each node sees, as in QueryBlock
    chain: Chain | None = None


@dataclass(frozen=True, slots=True)
class Step:
    moves: list[KVMove]
    items: list[StepItem]


@dataclass(frozen=True, slots=True)
class Expansion:
    """The children of one node: the primary child first, then alternatives, likeliest first."""

    token_ids: list[int]
    chances: list[float]  # that the target says this token here, as far as the draft can tell; 0 to 1
    # Of the primary child: in rejection mode what it was drawn from, in the others how sure the draft model is of it
    # (`outrider.confidence`).
    distribution: DraftDistribution | None = None
    confidence: int = 0
