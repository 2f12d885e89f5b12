"""Runs the draft scheduler's steps on the model and turns logits into children."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from draft_worker.limits import NUM_ALTERNATIVES
from draft_worker.messages import Action, Chain, Event, Expansion, Step, StepItem
from draft_worker.scheduler import DraftScheduler
from outrider.engine.heads.head_engine import HeadEngine
from outrider.engine.kv.idle_check import IdleCheck
from outrider.engine.model import Engine, SequenceChunk
from outrider.engine.sampling.logit_processing import NEVER, is_idle, process
from outrider.engine.sampling.sampling import (
    draft_distributions,
    likely_choices,
    most_likely,
    probabilities,
    sample_draft,
)
from outrider.grammar import GrammarViolation
from outrider.hints.confidence import confidence_level
from outrider.hints.hint_tree import DraftDistribution
from outrider.observability.telemetry import DraftMetrics
from outrider.sampling_params import DecodingMode

NUM_CHILDREN = 1 + NUM_ALTERNATIVES
"""Most children of a node: the primary one and its alternatives."""
NUM_DRAFT_PROBS = 6
"""Entries of a hint's distribution in rejection mode, unless the request sets it."""
DRAFT_PROBS_BITS = 8
"""Bits per weight of a hint's distribution in rejection mode, unless the request sets it."""
UNDERSTATED = 2.0
"""How much likelier an alternative is than the draft model says, given that its first token is wrong. Measured on the
demo pair, whose second token is then mostly the right one."""
NOTHING = Expansion([], [])


@torch.inference_mode()
def run_step(
    engine: Engine | HeadEngine,
    step: Step,
    num_children: int = NUM_CHILDREN,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> list[list[Expansion]]:
    """Runs one forward pass for the step, and one for each further node of the longest chain.

    Returns per item the expansion of each of its nodes, then of its chain's, with at most `num_children` each, then of
    its masks. Chains end when `is_interrupted`.
    """
    for move in step.moves:
        engine.move_entries(move.source_slots, move.destination_slots)
    for item in step.items:
        if item.features is not None:
            assert isinstance(engine, HeadEngine)
            engine.take_features(*item.features)
    again = [
        SequenceChunk(HeadEngine.first_entries(item.kv, item.corrected_end), item.corrected, 0)
        for item in step.items
        if item.corrected
    ]
    logits = engine.forward([*(_chunk(item, engine.mask_token_id) for item in step.items), *again])
    for item in step.items:
        item.kv.truncate(item.kv.length - item.num_masks)
    expansions = _expand_items(step.items, logits, num_children)
    growing = [
        _Growth(item, item.chain, own)
        for item, own in zip(step.items, expansions, strict=True)
        if item.chain is not None
    ]
    while (growing := [growth for growth in growing if growth.goes_on]) and not is_interrupted():
        items = [growth.next_item() for growth in growing]
        chunks = [SequenceChunk(item.kv, item.token_ids, 1, item.tree_start, item.paths) for item in items]
        added = _expand_items(items, engine.forward(chunks), num_children)
        for growth, (expansion,) in zip(growing, added, strict=True):
            growth.add(expansion)
    return expansions


def _chunk(item: StepItem, mask_token_id: int) -> SequenceChunk:
    """Returns an item's rows and the masks behind the last of them, whose KV entries must be dropped after the pass."""
    num_rows = len(item.node_ids) + item.num_masks
    if not item.num_masks:
        return SequenceChunk(item.kv, item.token_ids, num_rows, item.tree_start, item.paths)
    first = item.kv.length
    item.kv.extend(item.num_masks)
    token_ids = [*item.token_ids, *[mask_token_id] * item.num_masks]
    paths = item.paths
    if paths is not None:
        paths = [*paths, *([*paths[-1], *range(first, end + 1)] for end in range(first, item.kv.length))]
    return SequenceChunk(item.kv, token_ids, num_rows, item.tree_start, paths)


class _Growth:
    """A chain while it is being fed. Its expansions follow the item's own."""

    def __init__(self, item: StepItem, chain: Chain, expansions: list[Expansion]) -> None:
        self._chain, self._expansions = chain, expansions
        self._path = list(chain.path)
        self._continuation = list(item.context.continuations[0])
        self._token_ids: list[int] = []
        # Its lists change from one pass to the next; made once, for passes of small models are short.
        self._item = replace(
            item,
            token_ids=self._token_ids,
            node_ids=item.node_ids[:1],
            context=replace(item.context, continuations=[self._continuation]),
            tree_start=chain.tree_start,
            paths=[self._path],
        )
        self._num_fed = 0
        self._reach = chain.reach
        self._go_below(expansions[0])

    def _go_below(self, expansion: Expansion) -> None:
        self._child = expansion.token_ids[0] if expansion.token_ids else None
        self._reach *= expansion.chances[0] if expansion.token_ids else 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the last node's primary child is to be fed."""
        return (
            self._child is not None
            and self._child not in self._chain.stop_token_ids
            and self._num_fed < self._chain.max_nodes
            and self._reach >= self._chain.min_reach
        )

    def add(self, expansion: Expansion) -> None:
        """Takes the expansion of the node that was fed last."""
        self._expansions.append(expansion)
        self._go_below(expansion)

    def next_item(self) -> StepItem:
        """Returns an item that feeds the last node's primary child; valid until the next one."""
        kv, token_id = self._item.kv, self._child
        assert token_id is not None
        kv.extend(1)
        self._num_fed += 1
        self._token_ids[:] = [token_id]
        self._path.append(kv.length - 1)
        self._continuation.append(token_id)
        return self._item


def _expand_items(items: Sequence[StepItem], logits: torch.Tensor, num_children: int) -> list[list[Expansion]]:
    """Returns per item the expansion of each of its nodes and masks.  # logits: float32 [number of all, vocab_size]"""
    # Most sessions need the same operations, so their nodes are expanded in one call.
    is_simple = [_is_simple(item) for item in items]
    together = _expand_together(items, is_simple, logits, num_children)
    expansions: list[list[Expansion]] = []
    end = 0
    for item, simple in zip(items, is_simple, strict=True):
        start, end = end, end + len(item.node_ids) + item.num_masks
        if simple:
            expansions.append(together[start:end])
        else:
            expansions.append(_expand_in_turn(item, logits[start:end], num_children) if item.node_ids else [])
    return expansions


def _expand_in_turn(item: StepItem, logits: torch.Tensor, num_children: int) -> list[Expansion]:
    """Expands an item's nodes together, then one mask after the other: each follows the token guessed before it."""
    num_nodes = len(item.node_ids)
    expansions = _expand_safely(item, logits[:num_nodes], num_children)
    continuation = list(item.context.continuations[-1])
    for index in range(item.num_masks):
        if not expansions[-1].token_ids:  # nothing can come here, and nothing behind it
            return expansions + [NOTHING] * (item.num_masks - index)
        continuation.append(expansions[-1].token_ids[0])
        row = num_nodes + index
        mask = replace(
            item,
            node_ids=item.node_ids[-1:],
            context=replace(item.context, continuations=[list(continuation)]),
            first_draw=item.first_draw + row,
        )
        expansions += _expand_safely(mask, logits[row : row + 1], num_children)
    return expansions


def _is_simple(item: StepItem) -> bool:
    return item.sampling.decoding_mode is DecodingMode.GREEDY and is_idle(item.sampling, item.context)


def _expand_together(
    items: Sequence[StepItem], is_simple: Sequence[bool], logits: torch.Tensor, num_children: int
) -> list[Expansion]:
    """Expands every row as if its item were simple; [] where none is."""
    if not any(simple and item.node_ids for item, simple in zip(items, is_simple, strict=True)):
        return []
    row_items = [item for item in items for _ in range(len(item.node_ids) + item.num_masks)]
    return _primary_first(*most_likely(logits, num_children), row_items)


def _expand_safely(item: StepItem, logits: torch.Tensor, num_children: int) -> list[Expansion]:
    try:
        return expand(item, logits, num_children)
    except GrammarViolation:  # a limit of the grammar's parser: no hints here
        return [NOTHING] * len(item.node_ids)


def expand(item: StepItem, logits: torch.Tensor, num_children: int = NUM_CHILDREN) -> list[Expansion]:
    """Returns the children for each row's node.  # logits: float32 [num_nodes, vocab_size]"""
    params = item.sampling
    row_items = [item] * len(item.node_ids)
    processed = process(logits, params, item.context)
    is_dead: Sequence[bool] = ()
    if processed is not logits:  # the model's own logits leave every token
        dead = processed.amax(dim=-1) == NEVER
        processed = processed.masked_fill(dead.unsqueeze(-1), 0.0)
        is_dead = dead.tolist()
    if params.decoding_mode is DecodingMode.REJECTION:
        expansions = _sample(item, probabilities(processed, params), num_children)
    else:
        choices = likely_choices(processed, params, item.seed, item.context.positions, num_children)
        expansions = _primary_first(*choices, row_items)
    if not is_dead:
        return expansions
    return [_forced(item, row) or (NOTHING if is_dead[row] else expansion) for row, expansion in enumerate(expansions)]


def _forced(item: StepItem, row: int) -> Expansion | None:
    """The token that the grammar forces after a node, if any. The target takes it as a hint of its own."""
    if item.context.grammar is None:
        return None
    forced = item.context.grammar.forced_after(item.context.continuations[row], 1)
    return Expansion(forced, [1.0]) if forced else None


def _primary_first(
    token_ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], row_items: Sequence[StepItem]
) -> list[Expansion]:
    """Per row, the likeliest token as the primary child and the next likely ones as alternatives.

    token_ids and chances: [num_nodes][num_children], falling; items: the item of each node.
    """
    expansions = []
    for (first, *other_ids), (chance, *other_chances), item in zip(token_ids, chances, row_items, strict=True):
        confidence, primary_chance = confidence_level(chance), item.acceptance_rate
        if item.calibration is not None:
            primary_chance = item.calibration.chance(confidence, item.acceptance_rate)
        # The alternatives together get no more than the probability that is left.
        left = 1.0 - primary_chance
        share = min(left / max(sum(other_chances), 1e-6), UNDERSTATED * left / max(1.0 - chance, 1e-6))
        others = [(token_id, own * share) for token_id, own in zip(other_ids, other_chances, strict=True) if own > 0.0]
        expansions.append(
            Expansion(
                [first, *(token_id for token_id, _ in others)],
                [primary_chance, *(own for _, own in others)],
                confidence=confidence,
            )
        )
    return expansions


def _sample(item: StepItem, probs: torch.Tensor, num_children: int) -> list[Expansion]:
    """Draws primary children from exactly the distributions that are sent with them (I5); alternatives are the
    likeliest other tokens."""
    distributions = draft_distributions(
        probs,
        item.speculation.num_draft_probs or NUM_DRAFT_PROBS,
        item.speculation.draft_probs_bits or DRAFT_PROBS_BITS,
    )
    return [
        _sampled(
            *(distribution, sample_draft(distribution, item.seed, item.first_draw + index)),
            *(item.acceptance_rate, num_children),
        )
        for index, distribution in enumerate(distributions)
    ]


def _sampled(distribution: DraftDistribution, token_id: int, primary_chance: float, num_children: int) -> Expansion:
    weights = dict(zip(distribution.token_ids, distribution.weights, strict=True))
    rest = max(distribution.total - weights.pop(token_id), 1)
    others = [*weights][: num_children - 1]
    chances = [(1.0 - primary_chance) * weights[other] / rest for other in others]
    return Expansion([token_id, *others], [primary_chance, *chances], distribution)


class DraftCore:
    """The scheduler and the engine of a draft worker as one core for the model thread."""

    def __init__(
        self,
        scheduler: DraftScheduler,
        engine: Engine | HeadEngine,
        metrics: DraftMetrics,
        has_events: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_events` tells whether events are waiting, which ends a chain early."""
        self.scheduler = scheduler
        self.engine = engine
        self._metrics = metrics
        self._has_events = has_events
        self._num_cached_tokens = 0  # already exported
        # Since when there is no step to run, and whether there are sessions.
        self._quiet: tuple[float, bool] | None = None
        self._idle_check = IdleCheck(scheduler.allocator, metrics.num_integrity_failures)

    def handle(self, event: Event, now: float) -> list[Action]:
        return self.scheduler.handle(event, now)

    def run_next(self, now: float) -> tuple[list[Action], float | None]:
        step = self.scheduler.next_step()
        self._observe_load()
        self._observe_quiet(now, is_quiet=step is None)
        if step is None:
            self.engine.idle()
            if not self.scheduler.num_sessions:  # otherwise it waits for commits and must answer them at once
                self._idle_check.look(now)
            return [], None
        started = time.perf_counter()
        expansions = run_step(self.engine, step, 1 + self.scheduler.limits.max_alternatives, self._has_events)
        step_ms = (time.perf_counter() - started) * 1e3
        self._metrics.step_ms.observe(step_ms)
        return self.scheduler.finish_step(step, expansions, step_ms), 0.0

    def _observe_quiet(self, now: float, *, is_quiet: bool) -> None:
        if self._quiet is not None:
            since, has_sessions = self._quiet
            (self._metrics.wait_s if has_sessions else self._metrics.idle_s).inc(max(now - since, 0.0))
        self._quiet = (now, self.scheduler.num_sessions > 0) if is_quiet else None

    def _observe_load(self) -> None:
        self._metrics.num_sessions.set(self.scheduler.num_sessions)
        if (num_cached_tokens := self.scheduler.num_cached_tokens) != self._num_cached_tokens:
            self._metrics.num_cached_tokens.inc(num_cached_tokens - self._num_cached_tokens)
            self._num_cached_tokens = num_cached_tokens
