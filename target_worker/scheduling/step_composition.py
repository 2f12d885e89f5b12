"""Composes a step of the sessions that take part. Pure, except that it takes KV blocks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from outrider.engine.chunk_cost import Chunk, ChunkCost
from outrider.engine.prompt_queue import PromptQueue
from outrider.hints.acceptance import NUM_POSITIONS
from outrider.hints.objective_rows import UNLIMITED, StepBudget, allot_within, time_left_ms
from outrider.hints.speculation import allot
from outrider.hints.step_cost import StepCost, StepLine
from outrider.objective import by_due
from target_worker.hints.hint_path import HintPath
from target_worker.hints.neighbour_rows import spare_neighbours
from target_worker.limits import SchedulerLimits
from target_worker.messages import Step, StepItem
from target_worker.objectives import Progress, best_token_ms, step_budget
from target_worker.scheduling.batch_slots import StepRoom, turn_of
from target_worker.scheduling.session import Session

CHUNK_SHARE = 0.9
"""Share of the time that prompt chunks may take beside running sessions; the rest absorbs errors of the estimate. With
all of it gaps rose by 1.02 chunks' time at the 99th percentile (`python -m benchmarks long_prompts`)."""

PROMPT_TURN_STEPS = 8
"""Most steps without a prompt chunk, where objectives leave none the time."""
HELP_SHARE = 0.95
"""Time per token that a session's hints must bring it, relative to plain steps, so that it is not paused while it needs
them for its objective."""


def compose(room: StepRoom, limits: SchedulerLimits, line: StepLine, prompts: PromptQueue, now: float) -> Step:
    """Composes a step: decoding sessions first, then prefill chunks, within `max_num_batched_tokens`.

    While sessions decode, all chunks of a step together take a little less than one chunk that starts a prompt and
    uses up the token budget. That bounds the delay of a running session's next token. Nor do they take more than the
    objectives of these sessions leave; where that is less than the least chunk, there is one such chunk after
    PROMPT_TURN_STEPS steps without any, so that prompts get on. Which prompts get them is decided by `PromptQueue`, and
    among one tenant's also by when their first tokens are due.
    """
    decoding = room.decoding
    budget = limits.max_num_batched_tokens - len(decoding)
    # While prompts wait, hints take at most half of the remaining tokens.
    hint_budget = budget // 2 if room.prefilling else budget
    paths = [session.hint_path(limits, line, len(decoding)) for session in decoding]
    gains = [path.gains() for path in paths]
    # Most sessions have no objective, and steps of small models are short.
    budgets = [
        _budget(session, (own, _gains_by_record(session, limits)), line, len(decoding), now)
        if math.isfinite(session.aim.objective.tpot_ms)
        else UNLIMITED
        for session, own in zip(decoding, gains, strict=True)
    ]
    for session, each in zip(decoding, budgets, strict=True):
        if each is UNLIMITED:
            session.needs_hints = False
            continue
        is_tight = 0.0 < each.token_ms < line.step_ms(len(decoding))  # a plain step takes longer than it pays for
        session.needs_hints = is_tight and _do_hints_help(session, limits, line, len(decoding))
    counted_on = _counted_on(decoding, paths, gains, line, max(hint_budget, 0), budgets)
    num_fed = room.limit_hints([path.num_fed(count) for path, count in zip(paths, counted_on, strict=True)])
    items = []
    for session, path, fed in zip(decoding, paths, num_fed, strict=True):
        items.append(deciding_item(session, path, fed))
    budget -= sum(counted_on)  # not what is fed: that may follow from drawn hints (I4)
    if not room.prefilling:
        return Step(items)
    chunk_cost = prompts.cost
    usual_ms = CHUNK_SHARE * chunk_cost.ms(Chunk(0, max(budget, 0)))
    budget_ms = min(usual_ms, time_left_ms(gains, counted_on, line, budgets))
    must_get_on = budget_ms == usual_ms or chunk_cost.num_steps_without >= PROMPT_TURN_STEPS
    for session in prompts.turns(by_due(room.prefilling, [turn_of(session) for session in room.prefilling], now)):
        num_affordable = session.kv.room(session.kv.allocator.num_free)  # others have taken theirs meanwhile
        if num_affordable == 0:
            continue
        chunk = Chunk(session.kv.length, min(session.num_pending, num_affordable, budget))
        if decoding:
            chunk = chunk_cost.shorten(chunk, budget_ms, is_first=must_get_on and len(items) == len(decoding))
        if chunk.num_tokens <= 0:
            break
        items.append(prefill_item(session, chunk.num_tokens, limits))
        prompts.charge(session.owner, chunk)
        budget -= chunk.num_tokens
        budget_ms -= chunk_cost.ms(chunk)
    return Step(items)


def _counted_on(
    sessions: Sequence[Session],
    paths: Sequence[HintPath],
    gains: Sequence[list[float]],
    line: StepLine,
    budget: int,
    budgets: Sequence[StepBudget],
) -> list[int]:
    """Hints per session that the step counts on. What a prediction or an objective costs other sessions is bounded."""
    counts = allot_within(gains, line, budget, budgets)
    has_objectives = any(each is not UNLIMITED for each in budgets)
    if not has_objectives and all(path.num_before_prediction is None for path in paths):
        return counts  # the usual step
    # A session keeps the rows that it would have without its objective, and those before its prediction's.
    usual = allot(gains, line, budget) if has_objectives else counts
    floors: list[int | None] = []
    for index, (session, path) in enumerate(zip(sessions, paths, strict=True)):
        floor = usual[index] if budgets[index] is not UNLIMITED else None
        if path.num_before_prediction is not None:
            floor = min(usual[index], path.num_before_prediction)
        elif floor is None and session.is_background:
            floor = counts[index]  # nobody is held back for it
        floors.append(floor)
    return spare_neighbours(counts, gains, line, floors)


def learn_cost(cost: StepCost, step: Step, num_context: int, step_ms: float) -> float:
    """Learns from a decoding step; returns the price of feeding one of its hints, in tokens of plain decoding."""
    num_sessions = len(step.items)
    cost.observe(step.num_tokens, step_ms, num_context, step.num_reread)
    line = cost.line(num_context)
    return line.token_ms * num_sessions / line.step_ms(num_sessions)


def wait_left_ms(active: Sequence[Session], line: StepLine, limits: SchedulerLimits, now: float) -> float:
    """Time by which a step of sessions that decode may wait for hints, as far as their objectives go; milliseconds.

    Each is expected to feed as many hints of its own, once they have come, as leave it most time.
    """
    left_ms = math.inf
    for session in active:
        gains = _gains_by_record(session, limits) if session.can_expect_hints() else []
        budget = _budget(session, [gains], line, len(active), now)
        most_ms = max(
            budget.ms(1.0 + sum(gains[:num_hints])) - line.step_ms(len(active) + num_hints)
            for num_hints in range(len(gains) + 1)
        )
        left_ms = min(left_ms, most_ms)
    return max(left_ms, 0.0)


def _budget(
    session: Session, gains: Sequence[Sequence[float]], line: StepLine, num_sessions: int, now: float
) -> StepBudget:
    """Returns what a session affords of the step that begins now. `gains`: of hints that are there, or may come."""
    came_with_tokens = session.num_given_tokens > session.num_prompt_tokens
    since_s = session.arrived_at if came_with_tokens else session.first_token_at
    if since_s is None or math.isinf(session.aim.objective.tpot_ms):
        return UNLIMITED
    progress = Progress(since_s, session.num_output_tokens - 1, session.max_len - session.committed_len)
    best_ms = min(best_token_ms(own, line, num_sessions) for own in gains)
    return step_budget(session.aim, progress, now, best_ms)


def _do_hints_help(session: Session, limits: SchedulerLimits, line: StepLine, num_sessions: int) -> bool:
    """Whether a session's record says that its draft worker's hints make it clearly faster, even if it is paused."""
    best_ms = best_token_ms(_gains_by_record(session, limits), line, num_sessions)
    return best_ms < HELP_SHARE * line.step_ms(num_sessions)


def _gains_by_record(session: Session, limits: SchedulerLimits) -> list[float]:
    """Gains of the hints that may come for a session with an objective, or would if it were not paused."""
    if not (session.aim.objective and session.wants_hints and session.is_drafted):
        return []
    asked = session.speculation.num_speculative_tokens or limits.num_speculative_tokens
    num_left = session.max_len - session.committed_len - 1
    num_hints = min(asked, limits.num_speculative_tokens, NUM_POSITIONS, num_left)
    return list(itertools.accumulate(session.acceptance.chances(num_hints), operator.mul)) if num_hints > 0 else []


def learn_chunks(chunk_cost: ChunkCost, cost: StepCost, step: Step, step_ms: float) -> None:
    """Learns from the time of a step what its prompt chunks cost beside the sessions that decoded."""
    chunks = [chunk for item in step.items if (chunk := item.chunk) is not None]
    chunk_cost.num_steps_without += 1
    if not chunks:
        return
    if cost.coefficients is not None:
        decoding = [item for item in step.items if item.chunk is None]
        line = cost.line(sum(item.kv.length for item in decoding))
        step_ms -= line.step_ms(sum(len(item.token_ids) for item in decoding))
    chunk_cost.observe(chunks, max(step_ms, 0.0))


def prefill_item(session: Session, max_tokens: int, limits: SchedulerLimits) -> StepItem:
    """Feeds pending committed tokens: all, deciding the next token, or the first `max_tokens`, deciding nothing."""
    if session.num_pending <= max_tokens:
        return deciding_item(session, session.hint_path(limits), num_fed=0)
    for source in session.local:
        source.read(session.token_ids)
    start = session.kv.length
    token_ids = session.token_ids[start : start + max_tokens]
    session.kv.extend(max_tokens)
    prompt_targets = session.prompt_targets(start, max_tokens)
    return StepItem(
        session.session_id,
        session.kv,
        token_ids,
        num_logits=max_tokens if prompt_targets else 0,
        num_decided=0,
        hints=[],
        context=session.logit_context([], 0),
        sampling=session.sampling,
        seed=session.seed,
        prompt_targets=prompt_targets,
    )


def deciding_item(session: Session, path: HintPath, num_fed: int) -> StepItem:
    """Feeds everything pending, then `num_fed` hints, and decides a token at each."""
    start = session.kv.length
    hints, branches = path.for_step(num_fed)
    token_ids = session.token_ids[start:] + [hint.token_id for hint in hints[: num_fed - len(branches)]]
    token_ids += [branch.hint.token_id for branch in branches]
    session.kv.extend(len(token_ids))
    prompt_targets = session.prompt_targets(start, len(token_ids))
    return StepItem(
        session.session_id,
        session.kv,
        token_ids,
        num_logits=len(token_ids) if prompt_targets else num_fed + 1,
        num_decided=num_fed + 1,
        hints=hints,
        context=session.logit_context(hints, num_fed + 1, branches),
        sampling=session.sampling,
        seed=session.seed,
        acceptance_rule=session.speculation.acceptance_rule,
        prompt_targets=prompt_targets,
        branches=branches,
    )
