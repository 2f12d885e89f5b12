"""vLLM's requests as draft workers are told of them. Pure: it reads attributes of a request, and imports no vLLM."""

from __future__ import annotations

from typing import Any, Final

from outrider.engines.announcements import MAX_HINTED_TOKENS, SWITCH, greedy_sampling, limit_in, salt
from protos.outrider.v1 import common_pb2, draft_pb2

_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def is_hintable(request: Any) -> bool:
    """Whether a request generates text from token ids alone, that nobody extends meanwhile."""
    return (
        request.sampling_params is not None
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and not request.resumable
        and 0 < request.num_tokens <= MAX_HINTED_TOKENS
    )


def hint_limit(request: Any) -> int | None:
    """Most hints per step that the request asks for in its `vllm_xargs`; None: it does not say."""
    return limit_in((request.sampling_params.extra_args or {}).get(SWITCH))


def is_sampled(request: Any) -> bool:
    return bool(request.sampling_params.temperature > 0.0)


def announcement(request: Any, session_id: str, hint_token: str) -> draft_pb2.AttachRequest:
    """How to draft for a request."""
    params, adapter = request.sampling_params, request.lora_request
    sampling = greedy_sampling(
        max_tokens=request.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids or (),
        allowed_token_ids=params.allowed_token_ids or (),
        penalties={name: getattr(params, name) for name in _PENALTIES},
    )
    return draft_pb2.AttachRequest(
        session_id=session_id,
        hint_token=hint_token,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=sampling,
        speculation=common_pb2.SpeculationParams(enabled=True),
        cache_salt=salt(request.cache_salt, None if adapter is None else adapter.lora_name),
    )
