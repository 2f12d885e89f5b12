"""Builds one session's part in a step. Pure, except that it takes KV entries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from draft_worker.heads.arrived_features import ArrivedFeatures
from draft_worker.messages import Chain, StepItem
from draft_worker.session import DraftSession
from draft_worker.tree.draft_node import DraftNode, branch
from outrider.engine.sampling.logit_context import LogitContext


@dataclass(frozen=True, slots=True)
class Beyond:
    """How a step drafts beyond the rows of its items: by a chain of passes, or by mask tokens in the same pass."""

    min_reach: float  # for a chain's nodes
    num_masks: int | None = None  # at most, for one session; None: the draft model knows no mask token


def prefill_item(session: DraftSession, budget: int, beyond: Beyond) -> StepItem:
    """Returns an item that feeds up to `budget` pending tokens; the last pending token expands the cursor."""
    count = min(session.num_pending, budget)
    token_ids = session.token_ids[session.num_prefix : session.num_prefix + count]
    is_last = count == session.num_pending
    session.kv.extend(count)
    if not is_last:
        item = _item(session, token_ids, [], [])
    else:
        head = session.cursor_node
        chain = _chain(session, head, session.kv.length, [], beyond)
        item = _item(session, token_ids, [session.cursor], [[]], None, chain, _num_masks(session, head, beyond))
    return item if session.features is None else replace(item, features=_features(session, session.features, count))


def _features(
    session: DraftSession, arrived: ArrivedFeatures, count: int
) -> tuple[npt.NDArray[np.int64], bytes] | None:
    """Those that the next `count` entries take, each of the entry before it."""
    start, end = max(session.num_prefix - 1, 0), session.num_prefix + count - 1
    if start == end:
        return None
    arrived.drop_before(start)
    return session.kv.slots(start, end), arrived.rows(start, end)


def grow_item(session: DraftSession, node_ids: list[int], beyond: Beyond) -> StepItem:
    """Returns an item that feeds frontier nodes, parents first, each attending to the committed tokens, its ancestors
    and itself. Masks follow the first node without a child, which is fed last."""
    num_masks = 0
    tip = next((node_id for node_id in node_ids if not session.nodes[node_id].children), None)
    if beyond.num_masks and tip is not None:
        node_ids = [*(node_id for node_id in node_ids if node_id != tip), tip]
        num_masks = _num_masks(session, session.nodes[tip], beyond)
    first_entry = session.kv.length
    session.kv.extend(len(node_ids))
    for index, node_id in enumerate(node_ids):
        session.nodes[node_id].entry = first_entry + index
    session.entry_nodes = session.entry_nodes + node_ids
    branches = [branch(session.cursor_node, session.nodes, node_id) for node_id in node_ids]
    paths = [[node.entry or 0 for node in each] for each in branches]
    item = _item(
        session,
        [session.nodes[node_id].hint.token_id for node_id in node_ids],
        node_ids,
        [[node.hint.token_id for node in each] for each in branches],
        paths,
        _chain(session, session.nodes[node_ids[0]], session.num_prefix, paths[0], beyond),
        num_masks,
    )
    return item if session.features is None else _corrected(item, session, session.features)


def _corrected(item: StepItem, session: DraftSession, arrived: ArrivedFeatures) -> StepItem:
    """The item with the committed entries whose features have arrived since they were run: each row takes that of the
    entry before it."""
    start, end = session.num_corrected, min(arrived.num_known + 1, session.num_prefix)
    if start >= end:
        return item
    first, last = max(start - 1, 0), min(arrived.num_known, session.num_prefix)
    arrived.drop_before(first)
    features = (session.kv.slots(first, last), arrived.rows(first, last)) if first < last else None
    return replace(item, features=features, corrected=session.token_ids[start:end], corrected_end=end)


def _item(
    session: DraftSession,
    token_ids: list[int],
    node_ids: list[int],
    continuations: list[list[int]],
    paths: list[list[int]] | None = None,
    chain: Chain | None = None,
    num_masks: int = 0,
) -> StepItem:
    """Returns an item that feeds tokens and expands nodes; `continuations` are the tokens from the cursor to each
    node."""
    first_draw = session.num_draws
    session.num_draws += len(node_ids) + num_masks
    end_token_ids = session.sampling.stop_token_ids | session.limits.end_of_sequence_ids
    return StepItem(
        session.session_id,
        session.kv,
        token_ids,
        node_ids,
        session.sampling,
        session.speculation,
        session.seed,
        LogitContext(
            *(session.token_ids, session.num_prompt_tokens, continuations, end_token_ids, session.grammar),
            session.counts,
        ),
        first_draw,
        session.acceptance.rate,
        session.calibration,
        session.num_prefix,
        paths,
        chain,
        num_masks,
    )


def _room_below(session: DraftSession, head: DraftNode) -> int:
    """How many nodes in a row may come below the primary child of `head`."""
    depth_left = session.depth_limit() - head.depth - 1
    return min(depth_left, session.limits.max_nodes - len(session.nodes) - session.num_owed - 1)


def _num_masks(session: DraftSession, head: DraftNode, beyond: Beyond) -> int:
    return max(min(beyond.num_masks or 0, _room_below(session, head)), 0)


def _chain(session: DraftSession, head: DraftNode, tree_start: int, path: list[int], beyond: Beyond) -> Chain | None:
    """The chain that a step may feed below `head`, which it feeds, too. None under rejection sampling, where every
    draw has its number and `DraftSession` fixes the order."""
    max_nodes = min(session.limits.max_chain_nodes, _room_below(session, head))
    if max_nodes < 1 or session.is_sampled or beyond.num_masks is not None:
        return None
    min_reach = max(beyond.min_reach, session.min_reach)
    return Chain(max_nodes, head.reach, min_reach, session.stop_token_ids, tree_start, path)
