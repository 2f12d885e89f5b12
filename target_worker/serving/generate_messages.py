"""Requests of `Generate` as events of the scheduler, its actions as messages to the caller and on a span."""

from __future__ import annotations

import math
import secrets
from array import array
from typing import Final

from outrider.errors import InvalidRequest
from outrider.hint_service.session_names import session_name
from outrider.objective import Objective
from outrider.observability.tracing import Span
from outrider.sampling_params import Exactness, SamplingParams, SpeculationSettings
from outrider.worker.session_checks import check_session
from protos.outrider.v1 import target_pb2
from target_worker.messages import (
    Action,
    PromptScored,
    SessionAdmitted,
    SessionEnded,
    StartSession,
    TokensCommitted,
)
from target_worker.objectives import Aim

NUMBERS_AT_END: Final = (
    *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions"),
    *("queue_ms", "prefill_ms"),
)
"""Numbers of an ended session for its caller and its span, under the same names in the action and in the message."""


def parse_generate(request: target_pb2.GenerateRequest, deadline_at: float = math.inf) -> StartSession:
    """Raises InvalidRequest naming the field. `deadline_at` is on the scheduler's clock, seconds."""
    check_session(request)
    sampling = SamplingParams.from_proto(request.sampling)
    return StartSession(
        session_name(request.session_id, request.hint_token),
        list(request.token_ids),
        request.num_prompt_tokens or len(request.token_ids),
        sampling,
        (
            SpeculationSettings.from_proto(request.speculation)
            if request.HasField("speculation")
            else SpeculationSettings()
        ),
        sampling.seed if sampling.seed is not None else secrets.randbits(64),
        priority=request.priority,
        deadline_at=deadline_at,
        cache_salt=request.cache_salt,
        owner=request.owner,
        prediction=array("I", request.prediction),
        aim=_aim(request),
    )


def _aim(request: target_pb2.GenerateRequest) -> Aim:
    if not math.isfinite(request.decoding_ms) or request.decoding_ms < 0:
        raise InvalidRequest("decoding_ms", f"decoding_ms is {request.decoding_ms}; permitted: 0 and more")
    return Aim(Objective.from_proto(request.slo), request.decoding_ms, request.owner)


def show(span: Span, action: Action) -> None:
    if not span.is_recorded:
        return
    if isinstance(action, TokensCommitted):
        step = {
            "tokens": len(action.token_ids),
            "draft_tokens": action.num_draft_tokens,
            "accepted_draft_tokens": action.num_accepted_draft_tokens,
            "step_ms": action.step_ms,
        }
        span.event("step", step)
    elif isinstance(action, SessionEnded):
        span.set({f"outrider.{name}": getattr(action, name) for name in NUMBERS_AT_END})


def event_message(action: Action) -> target_pb2.GenerateEvent:
    match action:
        case SessionAdmitted():
            exactness = action.exactness or Exactness.of(action.decoding_mode)
            started = target_pb2.SessionStarted(decoding_mode=action.decoding_mode.value, exactness=exactness.value)
            return target_pb2.GenerateEvent(started=started)
        case PromptScored():
            prompt = target_pb2.PromptLogprobs(
                first_position=action.first_position,
                logprobs=[logprobs.to_proto() for logprobs in action.logprobs],
            )
            return target_pb2.GenerateEvent(prompt=prompt)
        case TokensCommitted():
            step = target_pb2.StepOutput(
                token_ids=action.token_ids,
                origins=action.origins,
                num_draft_tokens=action.num_draft_tokens,
                num_accepted_draft_tokens=action.num_accepted_draft_tokens,
                step_ms=action.step_ms,
                logprobs=[logprobs.to_proto() for logprobs in action.logprobs or ()],
                num_prediction_tokens=action.num_prediction_tokens,
                num_accepted_prediction_tokens=action.num_accepted_prediction_tokens,
                is_resting=action.is_resting,
                num_branches=action.num_branches,
                num_accepted_branches=action.num_accepted_branches,
                hint_source=action.sources[0].source if action.sources else None,
            )
            return target_pb2.GenerateEvent(step=step)
        case SessionEnded():
            finished = target_pb2.SessionFinished(
                reason=action.reason,
                stop_token_id=action.stop_token_id,
                stats=action.stats,
                **{name: getattr(action, name) for name in NUMBERS_AT_END},
            )
            return target_pb2.GenerateEvent(finished=finished)
    raise AssertionError(f"{type(action).__name__} is not for callers")
