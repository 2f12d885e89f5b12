"""vLLM's requests as draft workers are told of them. Pure: it reads attributes of a request, and imports no vLLM."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

from outrider.engine.kv.prefix_cache import CACHE_SALT_CHARS_MAX
from outrider.sampling_params import BOUNDS, MAX_ALLOWED_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from protos.outrider.v1 import common_pb2, draft_pb2

SWITCH: Final = "outrider_hints"
"""Key of a request's `vllm_xargs`: 0 takes no hints for it, another number at most so many per step."""
MAX_HINTED_TOKENS: Final = 1 << 19
"""Longest prompt that is announced; one message to a draft worker has at most 4 MiB."""
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
    """Most hints per step that the request asks for; None: it does not say. Nonsense counts as nothing said."""
    value = (request.sampling_params.extra_args or {}).get(SWITCH)
    return max(int(value), 0) if isinstance(value, (int, float)) and value == value and abs(value) < 1e6 else None


def is_sampled(request: Any) -> bool:
    return bool(request.sampling_params.temperature > 0.0)


def announcement(request: Any, session_id: str, hint_token: str) -> draft_pb2.AttachRequest:
    """How to draft for a request: always greedily, since the engine takes a hint as certain and accepts it with the
    target's probability of its token, which is the highest for the likeliest."""
    return draft_pb2.AttachRequest(
        session_id=session_id,
        hint_token=hint_token,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=_sampling(request),
        speculation=common_pb2.SpeculationParams(enabled=True),
        cache_salt=_salt(request),
    )


def _sampling(request: Any) -> common_pb2.SamplingParams:
    """The parameters that a greedy draft needs. One that is beyond our bounds is left out: it costs acceptance."""
    params = request.sampling_params
    most = BOUNDS["max_tokens"].highest
    sampling = common_pb2.SamplingParams(
        temperature=0.0,
        top_p=1.0,
        max_tokens=min(max(request.max_tokens, 1), most),
        ignore_eos=params.ignore_eos,
        repetition_penalty=1.0,
        typical_p=1.0,
    )
    sampling.min_tokens = min(params.min_tokens, sampling.max_tokens)
    sampling.stop_token_ids.extend(sorted(params.stop_token_ids or ())[:MAX_STOP_TOKEN_IDS])
    allowed = params.allowed_token_ids or ()
    if len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
        sampling.allowed_token_ids.extend(sorted(set(allowed)))
    for name in _PENALTIES:
        value, bounds = getattr(params, name), BOUNDS[name]
        if (bounds.lowest < value if bounds.is_open else bounds.lowest <= value) and value <= bounds.highest:
            setattr(sampling, name, value)
    return sampling


def _salt(request: Any) -> str:
    """Separates the request's prefix from others at a draft worker: by its own salt, and its adapter."""
    salt = request.cache_salt or ""
    if request.lora_request is not None:
        salt = f"{request.lora_request.lora_name} {salt}"
    if len(salt) <= CACHE_SALT_CHARS_MAX:
        return salt
    return blake2b(salt.encode(), digest_size=16).hexdigest()
