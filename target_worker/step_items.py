"""What one session has a step do. Pure, but that it takes the KV blocks for it."""

from __future__ import annotations

from target_worker.hint_path import HintPath
from target_worker.messages import StepItem
from target_worker.session import Session


def prefill_item(session: Session, max_tokens: int, num_speculative_tokens: int) -> StepItem:
    """Feeds committed tokens, the last of which decides; or some of them, and nothing is decided."""
    if session.num_pending <= max_tokens:
        return deciding_item(session, session.hint_path(num_speculative_tokens), num_fed=0)
    if session.local is not None:
        session.local.read(session.token_ids)
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
        text=session.text_before([], 0),
        sampling=session.sampling,
        seed=session.seed,
        prompt_targets=prompt_targets,
    )


def deciding_item(session: Session, path: HintPath, num_fed: int) -> StepItem:
    """Feeds everything pending, then `num_fed` hints, all of which are decided on."""
    start, hints = session.kv.length, path.for_step(num_fed)
    token_ids = session.token_ids[start:] + [hint.token_id for hint in hints[:num_fed]]
    session.kv.extend(len(token_ids))
    prompt_targets = session.prompt_targets(start, len(token_ids))
    return StepItem(
        session.session_id,
        session.kv,
        token_ids,
        num_logits=len(token_ids) if prompt_targets else num_fed + 1,
        num_decided=num_fed + 1,
        hints=hints,
        text=session.text_before(hints, num_fed + 1),
        sampling=session.sampling,
        seed=session.seed,
        acceptance_rule=session.speculation.acceptance_rule,
        prompt_targets=prompt_targets,
    )
