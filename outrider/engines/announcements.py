"""Requests of another engine as draft workers are told of them. Pure.

Drafting is always greedy: the engine takes a hint as certain and accepts it with the target's probability of its token,
which is the highest for the likeliest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Any, Final

from outrider.engine.kv.prefix_cache import CACHE_SALT_CHARS_MAX
from outrider.sampling_params import BOUNDS, MAX_ALLOWED_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from protos.outrider.v1 import common_pb2

SWITCH: Final = "outrider_hints"
"""Key of a request's own settings: 0 takes no hints for it, another number at most so many per step."""
MAX_HINTED_TOKENS: Final = 1 << 19
"""Longest prompt that is announced; one message to a draft worker has at most 4 MiB."""


def limit_in(value: Any) -> int | None:
    """Most hints per step that a request asks for; None: it does not say. Nonsense counts as nothing said."""
    return max(int(value), 0) if isinstance(value, (int, float)) and value == value and abs(value) < 1e6 else None


def greedy_sampling(
    *,
    max_tokens: int,
    min_tokens: int,
    ignore_eos: bool,
    stop_token_ids: Collection[int],
    allowed_token_ids: Collection[int],
    penalties: Mapping[str, float],
) -> common_pb2.SamplingParams:
    """The parameters that a greedy draft needs. One that is beyond our bounds is left out: it costs acceptance.

    penalties: by the name of the field.
    """
    sampling = common_pb2.SamplingParams(
        temperature=0.0,
        top_p=1.0,
        max_tokens=min(max(max_tokens, 1), BOUNDS["max_tokens"].highest),
        ignore_eos=ignore_eos,
        repetition_penalty=1.0,
        typical_p=1.0,
    )
    sampling.min_tokens = min(min_tokens, sampling.max_tokens)
    sampling.stop_token_ids.extend(sorted(stop_token_ids)[:MAX_STOP_TOKEN_IDS])
    if len(allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS:
        sampling.allowed_token_ids.extend(sorted(set(allowed_token_ids)))
    for name, value in penalties.items():
        bounds = BOUNDS[name]
        if (bounds.lowest < value if bounds.is_open else bounds.lowest <= value) and value <= bounds.highest:
            setattr(sampling, name, value)
    return sampling


def salt(own: str | None, adapter: str | None) -> str:
    """Separates a request's prefix from others at a draft worker: by its own salt, and its adapter."""
    joined = f"{adapter} {own or ''}" if adapter is not None else own or ""
    if len(joined) <= CACHE_SALT_CHARS_MAX:
        return joined
    return blake2b(joined.encode(), digest_size=16).hexdigest()
