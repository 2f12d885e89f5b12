"""A session's grammar as its output grows. Pure."""

from __future__ import annotations

from contextlib import suppress

from outrider.errors import InvalidRequest
from outrider.grammar import GrammarState, GrammarViolation
from protos.outrider.v1 import target_pb2


def read_committed(grammar: GrammarState, token_ids: list[int]) -> None:
    """Feeds tokens that were committed elsewhere. Raises InvalidRequest if the grammar does not permit them, or
    takes too long for them."""
    try:
        grammar.advance(token_ids)
    except GrammarViolation as violation:
        if (refusal := cost_refusal(grammar, None)) is not None:
            raise refusal from violation
        raise InvalidRequest("token_ids", f"the committed tokens leave the grammar: {violation}") from violation


def advance(grammar: GrammarState, token_ids: list[int]) -> target_pb2.FinishReason | None:
    """Feeds tokens that were committed here; returns the finish reason if the grammar ends with them."""
    is_read = False
    for _ in range(2):  # hints may have used up a limit of the parser; the second attempt has its own
        try:
            if not is_read:
                grammar.advance(token_ids)
                is_read = True
            return target_pb2.FINISH_REASON_STOP if grammar.is_complete else None
        except GrammarViolation:
            continue
    return target_pb2.FINISH_REASON_NO_TOKEN  # the tokens were permitted, but none can follow


def is_complete(grammar: GrammarState) -> bool:
    """Whether nothing can follow the output. Raises InvalidRequest if the grammar is out of time."""
    reason = advance(grammar, [])
    if (refusal := cost_refusal(grammar, reason)) is not None:
        raise refusal
    return reason is not None


def is_forced_next(grammar: GrammarState) -> bool:
    """Whether only one token can follow."""
    try:
        return bool(grammar.forced_after([], 1))
    except GrammarViolation:
        return False


def up_to_completion(grammar: GrammarState, token_ids: list[int], end_token_ids: frozenset[int]) -> list[int]:
    """Removes an end of sequence after a complete output: step by step the session would have ended before it."""
    if len(token_ids) == 1 or token_ids[-1] not in end_token_ids:
        return token_ids
    for _ in range(2):  # as `advance`
        with suppress(GrammarViolation):
            return token_ids[:-1] if grammar.is_complete_after(token_ids[:-1]) else token_ids
    return token_ids


def cost_refusal(grammar: GrammarState, reason: target_pb2.FinishReason | None) -> InvalidRequest | None:
    """The error to end a session with whose grammar delays the batch longer than one sequence may. `reason`: why it
    ends anyway; where that is for want of a token, its grammar was out of time."""
    if grammar.refusal is None or reason not in (None, target_pb2.FINISH_REASON_NO_TOKEN):
        return None
    return InvalidRequest("grammar", grammar.refusal)
