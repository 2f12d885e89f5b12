"""One session's hint tree on the draft worker, and the KV entries that belong to it. Pure.

The tree hangs below the committed tokens. *Fed* nodes have gone through the model, so their KV entry and their children
exist; the other nodes are the frontier. A draft model that reads mask tokens also guesses beyond the frontier: such a
chain of nodes is fed in a later step, whose rows correct it. KV entries `[0, num_prefix)` belong to committed tokens,
those after it to fed nodes in the order they were fed (`entry_nodes`). Entries of committed tokens never move again, so
that their full blocks can be shared with other sessions. Entries of nodes are never shared.

An alternative becomes a node, and is sent, when it is fed next, or at once if it is likely: the target may verify it
beside the primary path. Until then its parent keeps it.

A draft head rides ahead on its own states. When the target's features of what was committed arrive, the entries that
were run without them are run again beside the next nodes; entries below `num_corrected` are final.

Invariants: while `num_prefix == len(token_ids)` the cursor is fed; otherwise the tokens without KV are pending and no
node is fed. Every node that is kept was sent, so the target's cursor can go wherever this one can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from draft_worker.heads.arrived_features import ArrivedFeatures
from draft_worker.limits import DraftLimits
from draft_worker.messages import Expansion, KVMove
from draft_worker.tree import draft_node
from draft_worker.tree.candidates import Candidates
from draft_worker.tree.draft_node import MIN_CHANCE, DraftNode, primary_path
from draft_worker.tree.reach_floor import ReachFloor
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.kv.prefix_cache import SequenceBlocks
from outrider.engine.sampling.logit_context import TokenCounts
from outrider.grammar import GrammarState, GrammarViolation
from outrider.hints.acceptance import AcceptanceHistory
from outrider.hints.confidence import Calibration, confidence_level
from outrider.hints.hint_tree import ROOT_ID, Hint
from outrider.sampling_params import DecodingMode, SamplingParams, SpeculationSettings

SENT_REACH = 0.05
"""Probability of being reached from which an alternative is sent before it is fed, for a target that verifies
branches. A row of the target's step must bring about as much."""


@dataclass(slots=True, eq=False)
class DraftSession:
    """One session's committed tokens, its hint tree and the tree's KV."""

    session_id: str
    attachment: int
    target_address: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationSettings
    grammar: GrammarState | None  # has consumed all committed output
    seed: int
    blocks: SequenceBlocks
    limits: DraftLimits
    calibration: Calibration | None = None  # shared by its decoding mode; None under rejection
    attached_at: float = 0.0  # shell's clock, seconds
    is_background: bool = False
    owner: str = ""  # the tenant, or a digest of it
    priority: ClassVar[int] = 0  # those in the background are fed when no other can grow
    may_be_passed: ClassVar[bool] = True  # by shorter prompts of its owner
    counts: dict[int, TokenCounts] = field(default_factory=dict)  # of `token_ids` (`LogitContext.counts`)
    features: ArrivedFeatures | None = None  # of a draft head
    base_len: int = 0
    cursor_node: DraftNode = field(default_factory=draft_node.root)
    num_prefix: int = 0
    num_corrected: int = 0  # of a draft head: leading entries that were run on the target's features
    nodes: dict[int, DraftNode] = field(default_factory=dict)  # below the cursor
    candidates: Candidates = field(default_factory=Candidates)
    entry_nodes: list[int] = field(default_factory=list)
    next_node_id: int = 1
    num_draws: int = 0  # random numbers used; none is used twice
    acceptance: AcceptanceHistory = field(default_factory=AcceptanceHistory)  # of primary children
    num_owed: int = 0  # primary children of the nodes that are being fed
    accepts_hints: bool = True
    has_begun: bool = False  # computing its prefix, or sharing the blocks of others
    num_roots: int = 1
    num_sent_nodes: int = 0
    is_sampled: bool = field(init=False)
    floor: ReachFloor = field(init=False)
    min_reach: float = field(init=False)  # for a node to be fed, by it
    stop_token_ids: frozenset[int] = field(init=False)  # after which nothing is drafted

    def __post_init__(self) -> None:
        self.base_len = len(self.token_ids)
        self.is_sampled = self.sampling.decoding_mode is DecodingMode.REJECTION
        self.min_reach = self.limits.min_sampled_reach if self.is_sampled else self.limits.min_reach
        self.floor = ReachFloor(self.min_reach)
        own = frozenset[int]() if self.sampling.ignore_eos else self.limits.end_of_sequence_ids
        self.stop_token_ids = self.sampling.stop_token_ids | own
        self._read(self.token_ids[self.num_prompt_tokens :])

    def _read(self, output_token_ids: list[int]) -> None:
        """Advances the grammar over committed output. If it disagrees with the target's, the session goes on without
        one."""
        if self.grammar is not None:
            try:
                self.grammar.advance(output_token_ids)
            except GrammarViolation:
                self.grammar = None
        if self.grammar is not None and self.grammar.refusal:  # hints would be late, and other sessions would wait
            self.grammar = None

    @property
    def kv(self) -> KVSequence:
        return self.blocks.kv

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def cursor(self) -> int:
        return self.cursor_node.hint.node_id

    @property
    def num_pending(self) -> int:
        """Number of committed tokens without KV; the last of them is the cursor's."""
        return len(self.token_ids) - self.num_prefix

    def commit(self, token_ids: list[int]) -> KVMove | None:
        """Moves the cursor along newly committed tokens, keeps the nodes below it and drops the rest.

        Returns the KV entries to move so that the kept ones are contiguous again.
        """
        own_path = primary_path(self.cursor_node, self.nodes)
        draft_node.calibrate(self.calibration, token_ids, self.acceptance.rate, own_path)
        path: list[DraftNode] = []
        is_lost = self.num_pending > 0
        for token_id in token_ids:
            child = None if is_lost else draft_node.child_with_token(self.cursor_node, self.nodes, token_id)
            if child is None:
                is_lost = True
                continue
            self.cursor_node = child
            path.append(child)
        self.token_ids.extend(token_ids)
        self._read(token_ids)
        fed = [node.entry for node in path if node.entry is not None]
        is_fed = not is_lost and len(fed) == len(path)
        survivors = draft_node.fed_below(self.cursor_node, self.nodes) if is_fed else []
        is_run_again = self.features is not None and not is_fed  # by the pass that feeds the pending tokens
        move = self._compact([] if is_run_again else fed, survivors)
        if is_run_again:
            self.num_prefix = self.num_corrected
            self.kv.truncate(self.num_prefix)
        if is_lost:
            self._plant()
        return move

    def _plant(self) -> None:
        """Starts a new tree at the end of the committed tokens."""
        self.base_len = len(self.token_ids)
        self.cursor_node = draft_node.root()
        self.nodes, self.entry_nodes = {}, []
        self.candidates.clear()
        self.next_node_id = 1
        self.num_roots += 1

    def replant(self) -> None:
        """Makes the cursor the root and keeps everything below it, for a target that may have missed nodes."""
        for child in self.cursor_node.children:
            self.nodes[child].hint = self.nodes[child].hint._replace(parent_id=ROOT_ID)
        depth = self.cursor_node.depth
        for node in self.nodes.values():
            node.depth -= depth
        self.base_len += depth
        self.cursor_node = replace(self.cursor_node, hint=draft_node.root().hint, depth=0)
        self._collect_candidates()

    def _compact(self, fed_path: list[int], survivors: list[int]) -> KVMove | None:
        """Adds the fed path to the prefix and closes the gaps behind it."""
        # Those of nodes stand behind the prefix, and are counted from its end.
        sources = np.array(fed_path + [self.nodes[node_id].entry or 0 for node_id in survivors], dtype=np.int64)
        sources -= self.num_prefix
        slots = self.kv.slots(self.num_prefix, self.kv.length)
        moved = sources != np.arange(len(sources))
        move = KVMove(slots[sources[moved]], slots[: len(sources)][moved]) if moved.any() else None
        self.num_prefix += len(fed_path)
        self.nodes = draft_node.kept_below(self.cursor_node, self.nodes)
        self._collect_candidates()
        self.entry_nodes = survivors
        for index, node_id in enumerate(survivors):
            self.nodes[node_id].entry = self.num_prefix + index
        self.kv.truncate(self.num_prefix + len(survivors))
        return move

    def _collect_candidates(self) -> None:
        self.candidates.clear()
        for node in (self.cursor_node, *self.nodes.values()):
            parent = self._node(node.hint.parent_id) if node is not self.cursor_node else node
            if parent is self.cursor_node or parent.entry is not None:
                self._offer(node)

    def _offer(self, node: DraftNode) -> None:
        """Makes an unfed node, or a fed node's likeliest alternative, a candidate if it is worth feeding. A node below
        an unfed one follows when that one is taken."""
        if node.entry is None and node is not self.cursor_node:
            if node.hint.token_id not in self.stop_token_ids:
                self._offer_one(node, node.depth, node.reach, is_alternative=False)
        elif node.alternatives:
            _, chance = node.alternatives[0]
            self._offer_one(node, node.depth + 1, node.reach * chance, is_alternative=True)

    def _offer_one(self, node: DraftNode, depth: int, reach: float, *, is_alternative: bool) -> None:
        if reach >= self.min_reach and depth < self.depth_limit():
            priority = reach
            if not is_alternative and self.is_sampled and node in primary_path(self.cursor_node, self.nodes):
                # The alternatives' weights depend on the token that was drawn. If they could come first, so
                # would whether it gets a successor in time, and block verification would be biased (I4).
                priority += 1.0
            self.candidates.add(priority, node.hint.node_id, reach, is_alternative=is_alternative)

    def depth_limit(self) -> int:
        """The depth from which nodes are not fed."""
        max_len = min(self.limits.max_model_len - 1, self.num_prompt_tokens + self.sampling.max_tokens)
        return min(self.cursor_node.depth + self.limits.max_lookahead, max_len - self.base_len)

    def wants_to_grow(self) -> bool:
        """Whether more nodes may be drafted."""
        if self.features is not None and self.num_pending and self.features.num_known < len(self.token_ids) - 1:
            return False
        return self.accepts_hints

    def begin(self) -> int:
        """Takes over the blocks that other sessions have computed for the committed tokens; returns the number of
        entries."""
        self.num_prefix = self.num_corrected = self.blocks.adopt(self.token_ids)
        return self.num_prefix

    def publish(self) -> None:
        """Shares the blocks of committed tokens with other sessions; no `KVMove` of this session may be outstanding."""
        self.blocks.publish(self.token_ids, self.num_prefix if self.features is None else self.num_corrected)

    def next_priority(self) -> float:
        """Priority of the candidate to feed next: the probability that it is reached; 0.0 when nothing can grow.

        In rejection mode the end of the primary path comes before all others: its priority is higher by one.
        """
        is_full = len(self.nodes) + self.num_owed + 2 > self.limits.max_nodes
        return 0.0 if self.num_pending or is_full else self.candidates.highest_priority

    def take_next(self) -> int:
        """Takes the candidate of highest priority as the node to feed next. It needs room for itself and a primary
        child."""
        candidate = self.candidates.take()
        self.num_owed += 1
        if candidate.is_alternative:
            return self._take_up(candidate.node_id, candidate.reach)
        for child in self.nodes[candidate.node_id].children:
            self._offer(self.nodes[child])
        return candidate.node_id

    def _take_up(self, parent_id: int, reach: float) -> int:
        """Turns a node's likeliest alternative into a node, and offers the next alternative as a candidate."""
        parent = self._node(parent_id)
        node = self._make_node(parent, reach)
        self._offer(parent)
        return node.hint.node_id

    def _make_node(self, parent: DraftNode, reach: float) -> DraftNode:
        """Turns the likeliest alternative of `parent` into a node."""
        token_id, chance = parent.alternatives.pop(0)
        confidence = 0 if self.is_sampled else confidence_level(chance)  # none under rejection (I4)
        hint = Hint(self.next_node_id, parent.hint.node_id, token_id, confidence=confidence)
        return self._add_node(parent, reach, hint)

    def _add_node(self, parent: DraftNode, reach: float, hint: Hint) -> DraftNode:
        self.next_node_id += 1
        node = DraftNode(hint, parent.depth + 1, reach)
        self.nodes[hint.node_id] = node
        parent.children.append(hint.node_id)
        return node

    def _add_primary(self, parent: DraftNode, expansion: Expansion) -> DraftNode:
        token_id, reach = expansion.token_ids[0], parent.reach * expansion.chances[0]
        fields = parent.hint.node_id, token_id, expansion.distribution, expansion.confidence
        return self._add_node(parent, reach, Hint(self.next_node_id, *fields))

    def expand(self, node_ids: Sequence[int], expansions: Sequence[Expansion], num_masks: int = 0) -> list[Hint]:
        """Attaches the expansions of an item's nodes, then of the chain below the first, then of the masks below the
        last; returns the hints to send."""
        is_guessed = num_masks > 0 or any(self._node(node_id).children for node_id in node_ids)
        num_chained = len(expansions) - len(node_ids) - num_masks
        self.num_owed += num_chained + num_masks
        hints: list[Hint] = []
        for index, (node_id, expansion) in enumerate(zip(node_ids, expansions, strict=False)):
            hints += self.add_children(node_id, expansion, is_followed=index == 0 and num_chained > 0)
        tip = self._node(node_ids[0]) if num_chained else self.cursor_node
        for index, expansion in enumerate(expansions[len(node_ids) : len(node_ids) + num_chained]):
            node_id = tip.children[0]
            tip = self.nodes[node_id]
            tip.entry = self.kv.length - num_chained + index
            self.entry_nodes.append(node_id)
            hints += self.add_children(node_id, expansion, is_followed=index + 1 < num_chained)
        tip = self._node(node_ids[-1]) if num_masks else tip
        self.num_owed -= num_masks
        for expansion in expansions[len(expansions) - num_masks :]:
            # What follows a guessed token is fed later, when its own children exist: until then, one guess below it.
            if not tip.children or not expansion.token_ids:
                break
            tip = self.nodes[tip.children[0]]
            if tip.hint.token_id in self.stop_token_ids:
                break
            hints += self._guess_below(tip, expansion)
        if is_guessed:
            self._collect_candidates()  # guesses that were corrected have changed what is likely
        return hints

    def _guess_below(self, node: DraftNode, expansion: Expansion) -> list[Hint]:
        """Makes the token that an expansion names the primary child of a node, which may have children that were
        guessed before; returns what is to be sent of it."""
        if not node.children:
            child = self._add_primary(node, expansion)
            child.is_sent = True
            self.num_sent_nodes += 1
            return [child.hint]
        if self.is_sampled:  # the first draw stays: a choice between draws would be one of tokens (I4)
            return []
        guessed = [self.nodes[child] for child in node.children]
        chances = dict(zip(expansion.token_ids, expansion.chances, strict=True))
        for child in guessed:
            draft_node.scale_reach(
                child, self.nodes, node.reach * max(chances.get(child.hint.token_id, 0.0), MIN_CHANCE)
            )
        found = next((each for each in guessed if each.hint.token_id == expansion.token_ids[0]), None)
        if found is None:
            found = self._add_primary(node, expansion)
        if found.hint.confidence != expansion.confidence:
            found.hint = found.hint._replace(confidence=expansion.confidence)
        if found is guessed[0]:
            return []
        node.children.remove(found.hint.node_id)
        node.children.insert(0, found.hint.node_id)
        found.is_sent = True
        self.num_sent_nodes += 1
        return [found.hint._replace(is_promoted=True)]

    def _node(self, node_id: int) -> DraftNode:
        return self.cursor_node if node_id == self.cursor else self.nodes[node_id]

    def add_children(self, node_id: int, expansion: Expansion, *, is_followed: bool = False) -> list[Hint]:
        """Attaches a node's primary child and stores its alternatives; returns the hints to send.

        is_followed: the primary child has been fed already.
        """
        node = self._node(node_id)
        added: list[DraftNode] = []
        if node is not self.cursor_node:
            self.num_owed -= 1
            added = [] if node.is_sent else [node]
        hints = [sent.hint for sent in added]
        node.is_sent = True
        self.num_sent_nodes += len(added)
        chances = expansion.chances
        if expansion.token_ids:
            is_guessed = bool(node.children)
            hints += self._guess_below(node, expansion)
            if not is_guessed and not is_followed:
                self._offer(self.nodes[node.children[0]])
            elif is_guessed and self.is_sampled:  # the primary child was another draw
                chances = [1.0 - chances[0], *chances[1:]]
        excluded = self.stop_token_ids.union(self.nodes[child].hint.token_id for child in node.children)
        options = zip(expansion.token_ids, chances, strict=True)
        node.alternatives = [(token_id, chance) for token_id, chance in options if token_id not in excluded]
        hints += self._send_likely(node)
        self._offer(node)
        return hints

    def _send_likely(self, parent: DraftNode) -> list[Hint]:
        """Makes nodes of alternatives that a target may verify without a continuation; returns their hints."""
        hints = []
        while (
            not self.is_sampled
            and parent.alternatives
            and parent.reach * parent.alternatives[0][1] >= SENT_REACH
            and len(self.nodes) + self.num_owed + 2 <= self.limits.max_nodes
        ):
            node = self._make_node(parent, parent.reach * parent.alternatives[0][1])
            node.is_sent = True
            self._offer(node)
            hints.append(node.hint)
        self.num_sent_nodes += len(hints)
        return hints

    def could_be_verified_next(self, hints: Sequence[Hint]) -> bool:
        """Whether the next step could verify some of these hints on its path. Hints beside the path may wait."""
        return draft_node.is_any_near(hints, self.cursor_node, self.nodes)

    def live_hints(self) -> list[Hint]:
        """All nodes below the cursor, parents first."""
        return draft_node.hints_anew(self.cursor_node, self.nodes)
