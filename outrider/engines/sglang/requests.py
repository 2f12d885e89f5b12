"""SGLang's requests as draft workers are told of them. Pure: reads attributes of a request, and imports no SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from outrider.engines.announcements import MAX_HINTED_TOKENS, SWITCH, greedy_sampling, limit_in, salt
from protos.outrider.v1 import common_pb2, draft_pb2

_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def is_hintable(request: Any) -> bool:
    """Whether a request generates more than one token, from token ids alone."""
    return (
        request.multimodal_inputs is None
        and request.input_embeds is None
        and request.session is None
        and not (request.sampling_params.beam_width or 0) > 1
        and request.sampling_params.max_new_tokens > 1
        and 0 < len(request.origin_input_ids_unpadded) + len(request.output_ids) <= MAX_HINTED_TOKENS
    )


def hint_limit(request: Any) -> int | None:
    """Most hints per step that the request asks for in its `custom_params`; None: it does not say."""
    return limit_in((request.sampling_params.custom_params or {}).get(SWITCH))


def is_sampled(request: Any) -> bool:
    # SGLang turns temperature 0 into top_k 1.
    return bool(request.sampling_params.temperature > 0.0 and request.sampling_params.top_k != 1)


def stop_token_ids(request: Any) -> frozenset[int]:
    """Tokens that end the request, as SGLang looks at them."""
    params, tokenizer = request.sampling_params, request.tokenizer
    if params.ignore_eos:
        return frozenset()
    found = {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return frozenset(each for each in found if isinstance(each, int))


def tokens(request: Any, latest: Sequence[int]) -> list[int]:
    """All tokens of a request; `latest` are those of its last step where SGLang has not taken them yet."""
    return [*request.origin_input_ids_unpadded, *request.output_ids, *latest]


def announcement(request: Any, session_id: str, hint_token: str) -> draft_pb2.AttachRequest:
    """How to draft for a request."""
    params = request.sampling_params
    sampling = greedy_sampling(
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids or (),
        allowed_token_ids=(),
        penalties={name: getattr(params, name) for name in _PENALTIES},
    )
    return draft_pb2.AttachRequest(
        session_id=session_id,
        hint_token=hint_token,
        num_prompt_tokens=len(request.origin_input_ids_unpadded),
        sampling=sampling,
        speculation=common_pb2.SpeculationParams(enabled=True),
        cache_salt=salt(request.cache_salt, request.extra_key),
    )
