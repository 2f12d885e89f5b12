"""One session's hint tree on the draft worker, and the KV that goes with it. Pure.

The tree hangs below the committed tokens. Its nodes are of two kinds: *fed* nodes have gone through the model, so
their KV entry and their children exist; the others are the frontier. KV entries `[0, num_prefix)` belong to
committed tokens, those after it to fed nodes, in the order they were fed; `entry_nodes` names them. What is committed
is final: its entries never move again, so that full blocks of it can be offered to other sessions. Nodes never are.

An alternative becomes a node, and is sent, only when its turn to be fed has come: without a continuation it would be
of no use to the target. Until then its parent remembers it.

Invariants: while `num_prefix == len(token_ids)` the cursor is fed; otherwise the tokens without KV are pending
and the tree is empty. Every node that is kept was sent, so the target's cursor can go wherever ours can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draft_worker.candidates import Candidates
from draft_worker.limits import DraftLimits
from draft_worker.messages import Chain, Expansion, KVMove, StepItem
from outrider.acceptance import AcceptanceHistory
from outrider.confidence import Calibration
from outrider.engine.kv_cache import KVSequence
from outrider.engine.prefix_cache import TextBlocks
from outrider.engine.text_before import TextBefore
from outrider.grammar import GrammarState, GrammarViolation
from outrider.hint_tree import ROOT_ID, DraftDistribution, Hint
from outrider.sampling_params import DecodingMode, SamplingParams, SpeculationSettings

NUM_NEAR_NODES = 9
"""Below the cursor, that a target verifies in one step unless it is told otherwise: eight are fed, one stands last."""


@dataclass(slots=True)
class DraftNode:
    hint: Hint
    depth: int  # below the root; it guesses position base_len + depth - 1
    reach: float  # estimated chance that the committed tokens come this way
    children: list[int] = field(default_factory=list)
    # (token, chance), likeliest first; not nodes yet.
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    entry: int | None = None  # index of its KV entry, once fed
    is_sent: bool = False


def _root() -> DraftNode:
    return DraftNode(Hint(ROOT_ID, ROOT_ID, -1), depth=0, reach=1.0)


@dataclass(slots=True, eq=False)
class DraftSession:
    session_id: str
    attachment: int
    target_address: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationSettings
    grammar: GrammarState | None  # having read all committed output
    seed: int
    blocks: TextBlocks
    limits: DraftLimits
    calibration: Calibration | None = None  # of all that decode this way; none under rejection sampling
    attached_at: float = 0.0  # shell's clock, seconds
    base_len: int = 0
    cursor_node: DraftNode = field(default_factory=_root)
    num_prefix: int = 0
    nodes: dict[int, DraftNode] = field(default_factory=dict)  # below the cursor
    candidates: Candidates = field(default_factory=Candidates)
    entry_nodes: list[int] = field(default_factory=list)
    next_node_id: int = 1
    num_draws: int = 0  # random numbers used; none is used twice
    acceptance: AcceptanceHistory = field(default_factory=AcceptanceHistory)  # of primary children
    num_owed: int = 0  # primary children of the nodes that are being fed
    is_listened_to: bool = True
    has_begun: bool = False  # to be computed, or to share what others have
    num_roots: int = 1
    num_sent_nodes: int = 0

    def __post_init__(self) -> None:
        self.base_len = len(self.token_ids)
        self._read(self.token_ids[self.num_prompt_tokens :])

    def _read(self, output_token_ids: list[int]) -> None:
        """Brings the grammar up to date. Should it not agree with the target's, the session goes on without."""
        if self.grammar is not None:
            try:
                self.grammar.advance(output_token_ids)
            except GrammarViolation:
                self.grammar = None
            else:
                if (
                    self.grammar.is_too_slow
                ):  # the other sessions would wait for guesses that come too late anyway
                    self.grammar = None

    @property
    def kv(self) -> KVSequence:
        return self.blocks.kv

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens after which there is nothing to guess."""
        own = frozenset[int]() if self.sampling.ignore_eos else self.limits.end_of_sequence_ids
        return self.sampling.stop_token_ids | own

    @property
    def cursor(self) -> int:
        return self.cursor_node.hint.node_id

    @property
    def cursor_children(self) -> list[int]:
        return self.cursor_node.children

    @property
    def num_pending(self) -> int:
        """Committed tokens without KV; the last of them is the cursor's."""
        return len(self.token_ids) - self.num_prefix

    def commit(self, token_ids: list[int]) -> KVMove | None:
        """Moves the cursor along newly committed tokens, keeps what lies below it and drops the rest.

        Returns the KV entries to be moved so that what is kept lies together again.
        """
        self._calibrate(token_ids)
        path: list[DraftNode] = []
        is_lost = self.num_pending > 0
        for token_id in token_ids:
            child = None if is_lost else self._child_saying(token_id)
            if child is None:
                is_lost = True
                continue
            self.cursor_node = self.nodes[child]
            path.append(self.cursor_node)
        self.token_ids.extend(token_ids)
        self._read(token_ids)
        fed = [node.entry for node in path if node.entry is not None]
        if is_lost or len(fed) < len(path):
            survivors: list[int] = []
        else:
            survivors = self._fed_below_cursor()
        move = self._compact(fed, survivors)
        if is_lost:
            self._plant()
        return move

    def _calibrate(self, token_ids: list[int]) -> None:
        """Holds the primary path against what was committed, whether the target verified it or not."""
        node = self.cursor_node
        for token_id in token_ids:
            if self.calibration is None or not node.children:
                return
            node = self.nodes[node.children[0]]
            has_held = node.hint.token_id == token_id
            self.calibration.observe(node.hint.confidence, self.acceptance.rate, has_held=has_held)
            if not has_held:
                return

    def _child_saying(self, token_id: int) -> int | None:
        for child in self.cursor_children:
            if self.nodes[child].hint.token_id == token_id:
                return child
        return None

    def _plant(self) -> None:
        """Starts a new tree at the end of the committed tokens."""
        self.base_len = len(self.token_ids)
        self.cursor_node = _root()
        self.nodes, self.entry_nodes = {}, []
        self.candidates.clear()
        self.next_node_id = 1
        self.num_roots += 1

    def replant(self) -> None:
        """Makes the cursor the root and keeps everything below it: for a target that may have missed nodes."""
        for child in self.cursor_children:
            self.nodes[child].hint = replace(self.nodes[child].hint, parent_id=ROOT_ID)
        depth = self.cursor_node.depth
        for node in self.nodes.values():
            node.depth -= depth
        self.base_len += depth
        self.cursor_node = replace(self.cursor_node, hint=_root().hint, depth=0)
        self._collect_candidates()

    def _fed_below_cursor(self) -> list[int]:
        """Node ids in the order of their KV entries."""
        found, pending = [], list(self.cursor_children)
        while pending:
            node_id = pending.pop()
            node = self.nodes[node_id]
            if node.entry is not None:
                found.append(node_id)
                pending.extend(node.children)
        return sorted(found, key=lambda node_id: self.nodes[node_id].entry or 0)

    def _compact(self, fed_path: list[int], survivors: list[int]) -> KVMove | None:
        """Makes the fed path part of the prefix and closes the gaps behind it."""
        sources = fed_path + [self.nodes[node_id].entry or 0 for node_id in survivors]
        slots = self.kv.slots(0, self.kv.length)
        destinations = np.arange(self.num_prefix, self.num_prefix + len(sources))
        moved = np.asarray(sources, dtype=np.int64) != destinations
        move = None
        if moved.any():
            move = KVMove(slots[np.asarray(sources, dtype=np.int64)[moved]], slots[destinations[moved]])
        self.num_prefix += len(fed_path)
        self._keep_below_cursor()
        self.entry_nodes = survivors
        for index, node_id in enumerate(survivors):
            self.nodes[node_id].entry = self.num_prefix + index
        self.kv.truncate(self.num_prefix + len(survivors))
        return move

    def _keep_below_cursor(self) -> None:
        kept: dict[int, DraftNode] = {}
        pending = list(self.cursor_children)
        cursor_reach = max(self.cursor_node.reach, 1e-9)
        while pending:
            node_id = pending.pop()
            node = self.nodes[node_id]
            node.reach /= cursor_reach
            kept[node_id] = node
            pending.extend(node.children)
        self.cursor_node.reach = 1.0
        self.nodes = kept
        self._collect_candidates()

    def _collect_candidates(self) -> None:
        self.candidates.clear()
        for node in (self.cursor_node, *self.nodes.values()):
            self._offer(node)

    def _offer(self, node: DraftNode) -> None:
        """Makes a node that is not fed, or a fed one's likeliest alternative, a candidate, if it is worth feeding."""
        if node.entry is None and node is not self.cursor_node:
            if node.hint.token_id not in self.stop_token_ids:
                self._offer_one(node, node.depth, node.reach, is_alternative=False)
        elif node.alternatives:
            _, chance = node.alternatives[0]
            self._offer_one(node, node.depth + 1, node.reach * chance, is_alternative=True)

    def _offer_one(self, node: DraftNode, depth: int, reach: float, *, is_alternative: bool) -> None:
        if depth < self._deepest() and reach >= self._min_reach:
            priority = reach
            if not is_alternative and self._is_sampled and self._is_primary_tip(node):
                # What the alternatives weigh depends on the token that was drawn. If they could come first, whether
                # it gets a successor in time would depend on it too, and block verification would be biased (I4).
                priority += 1.0
            self.candidates.add(priority, node.hint.node_id, reach, is_alternative=is_alternative)

    def _is_primary_tip(self, node: DraftNode) -> bool:
        """Whether a node is the last of the primary path below the cursor."""
        tip = self.cursor_node
        while tip.children:
            tip = self.nodes[tip.children[0]]
        return tip is node

    def _deepest(self) -> int:
        """Nodes of this depth are not fed."""
        max_len = min(self.limits.max_model_len - 1, self.num_prompt_tokens + self.sampling.max_tokens)
        return min(self.cursor_node.depth + self.limits.max_lookahead, max_len - self.base_len)

    # Growing.

    def wants_to_grow(self) -> bool:
        return self.is_listened_to and len(self.token_ids) < self.limits.max_model_len - 1

    def begin(self) -> int:
        """Takes over what other sessions have published of the committed text; returns how many entries that are."""
        self.num_prefix = self.blocks.adopt(self.token_ids)
        return self.num_prefix

    def publish(self) -> None:
        """Offers committed text to other sessions; no `KVMove` of this session may be outstanding."""
        self.blocks.publish(self.token_ids, self.num_prefix)

    def prefill_item(self, budget: int, min_chain_reach: float) -> StepItem:
        """Feeds up to `budget` pending tokens; the last one expands the cursor."""
        count = min(self.num_pending, budget)
        token_ids = self.token_ids[self.num_prefix : self.num_prefix + count]
        is_last = count == self.num_pending
        self.kv.extend(count)
        if not is_last:
            return self._item(token_ids, [], [])
        chain = self._chain(self.cursor_node, self.kv.length, [], min_chain_reach)
        return self._item(token_ids, [self.cursor], [[]], chain=chain)

    def next_priority(self) -> float:
        """Of the candidate to feed next: how likely it is to be reached; 0.0 when nothing can grow.

        In rejection mode the end of the primary path comes before all else, with one more than that.
        """
        is_full = len(self.nodes) + self.num_owed + 2 > self.limits.max_nodes
        return 0.0 if self.num_pending or is_full else self.candidates.highest_priority

    def take_next(self) -> int:
        """The candidate of highest priority, as a node to be fed next. It needs room for itself and a primary child."""
        candidate = self.candidates.take()
        self.num_owed += 1
        if candidate.is_alternative:
            return self._take_up(candidate.node_id, candidate.reach)
        return candidate.node_id

    def _take_up(self, parent_id: int, reach: float) -> int:
        """Makes a node's likeliest alternative, a node, and the next one a candidate."""
        parent = self._node(parent_id)
        token_id, _ = parent.alternatives.pop(0)
        self._offer(parent)
        return self._add_node(parent, token_id, reach).hint.node_id

    def _add_node(
        self,
        parent: DraftNode,
        token_id: int,
        reach: float,
        distribution: DraftDistribution | None = None,
        confidence: int = 0,
    ) -> DraftNode:
        hint = Hint(self.next_node_id, parent.hint.node_id, token_id, distribution, confidence)
        self.next_node_id += 1
        node = DraftNode(hint, parent.depth + 1, reach)
        self.nodes[hint.node_id] = node
        parent.children.append(hint.node_id)
        return node

    @property
    def _min_reach(self) -> float:
        """How likely a node must be to be reached for it to be fed."""
        return self.limits.min_sampled_reach if self._is_sampled else self.limits.min_reach

    @property
    def _is_sampled(self) -> bool:
        return self.sampling.decoding_mode is DecodingMode.REJECTION

    def _chain(self, head: DraftNode, tree_start: int, path: list[int], min_reach: float) -> Chain | None:
        """What a step may feed below `head`, which it feeds as well. None under rejection sampling: every draw has its
        number, and its turn as `_offer_one` says."""
        depth_left = self._deepest() - head.depth - 1
        room = self.limits.max_nodes - len(self.nodes) - self.num_owed - 1
        max_nodes = min(self.limits.max_chain_nodes, depth_left, room)
        if max_nodes < 1 or self._is_sampled:
            return None
        min_reach = max(min_reach, self._min_reach)
        return Chain(max_nodes, head.reach, min_reach, self.stop_token_ids, tree_start, path)

    def grow_item(self, node_ids: list[int], min_chain_reach: float) -> StepItem:
        """Feeds frontier nodes, each seeing the committed tokens, its ancestors and itself."""
        first_entry = self.kv.length
        self.kv.extend(len(node_ids))
        for index, node_id in enumerate(node_ids):
            self.nodes[node_id].entry = first_entry + index
        self.entry_nodes = self.entry_nodes + node_ids
        branches = [self._branch(node_id) for node_id in node_ids]
        paths = [[node.entry or 0 for node in branch] for branch in branches]
        return self._item(
            [self.nodes[node_id].hint.token_id for node_id in node_ids],
            node_ids,
            [[node.hint.token_id for node in branch] for branch in branches],
            paths,
            self._chain(self.nodes[node_ids[0]], self.num_prefix, paths[0], min_chain_reach),
        )

    def _item(
        self,
        token_ids: list[int],
        node_ids: list[int],
        continuations: list[list[int]],
        paths: list[list[int]] | None = None,
        chain: Chain | None = None,
    ) -> StepItem:
        """Feeds tokens and expands nodes; `continuations` are the texts from the cursor to each of them."""
        first_draw = self.num_draws
        self.num_draws += len(node_ids)
        end_token_ids = self.sampling.stop_token_ids | self.limits.end_of_sequence_ids
        return StepItem(
            self.session_id,
            self.kv,
            token_ids,
            node_ids,
            self.sampling,
            self.speculation,
            self.seed,
            TextBefore(self.token_ids, self.num_prompt_tokens, continuations, end_token_ids, self.grammar),
            first_draw,
            self.acceptance.rate,
            self.calibration,
            self.num_prefix,
            paths,
            chain,
        )

    def _branch(self, node_id: int) -> list[DraftNode]:
        """The nodes from the cursor's child down to this one."""
        branch: list[DraftNode] = []
        while node_id != self.cursor:
            branch.append(self.nodes[node_id])
            node_id = branch[-1].hint.parent_id
        return branch[::-1]

    def finish_prefill(self, num_fed: int) -> None:
        self.num_prefix += num_fed

    def expand(self, node_ids: Sequence[int], expansions: Sequence[Expansion]) -> list[Hint]:
        """Takes in what a step made of its item: of each node, and of the chain below the first. Returns what is to be
        sent."""
        num_chained = len(expansions) - len(node_ids)
        hints: list[Hint] = []
        for index, (node_id, expansion) in enumerate(zip(node_ids, expansions, strict=False)):
            hints += self.add_children(node_id, expansion, is_followed=index == 0 and num_chained > 0)
        tip = self._node(node_ids[0]) if num_chained else self.cursor_node
        for index, expansion in enumerate(expansions[len(node_ids) :]):
            node_id = tip.children[0]
            tip = self.nodes[node_id]
            tip.entry = self.kv.length - num_chained + index
            self.entry_nodes.append(node_id)
            self.num_owed += 1
            hints += self.add_children(node_id, expansion, is_followed=index + 1 < num_chained)
        return hints

    def _node(self, node_id: int) -> DraftNode:
        return self.cursor_node if node_id == self.cursor else self.nodes[node_id]

    def add_children(self, node_id: int, expansion: Expansion, *, is_followed: bool = False) -> list[Hint]:
        """Attaches a node's primary child and remembers its alternatives; returns what is to be sent.

        is_followed: the primary child has been fed already.
        """
        node = self._node(node_id)
        added: list[DraftNode] = []
        if node is not self.cursor_node:
            self.num_owed -= 1
            added = [] if node.is_sent else [node]
        if expansion.token_ids:
            reach = node.reach * expansion.chances[0]
            child = self._add_node(
                node, expansion.token_ids[0], reach, expansion.distribution, expansion.confidence
            )
            if not is_followed:
                self._offer(child)
            added.append(child)
        stop_token_ids = self.stop_token_ids
        node.alternatives = [
            (token_id, chance)
            for token_id, chance in zip(expansion.token_ids[1:], expansion.chances[1:], strict=True)
            if token_id not in stop_token_ids
        ]
        self._offer(node)
        for sent in added:
            sent.is_sent = True
        self.num_sent_nodes += len(added)
        return [sent.hint for sent in added]

    def could_be_verified_next(self, hints: Sequence[Hint]) -> bool:
        """Whether some of these nodes are on the primary path, and so near that the target's next step could verify
        them."""
        sent = {hint.node_id for hint in hints}
        node = self.cursor_node
        for _ in range(NUM_NEAR_NODES):
            if not node.children:
                return False
            if node.children[0] in sent:
                return True
            node = self.nodes[node.children[0]]
        return False

    def live_hints(self) -> list[Hint]:
        """All nodes below the cursor, parents first."""
        return [self.nodes[node_id].hint for node_id in sorted(self.nodes)]
