"""vLLM's `--worker-extension-cls` of a target worker: tokens committed elsewhere count as output, not as prompt.

vLLM gives its workers a new request as a prompt alone. This splits it into prompt and output again, as it is for a
request that was preempted, so that penalties, `min_tokens`, bad words and prompt log probabilities mean the same after
a replay. Importing this module, which vLLM does in each of its processes, puts it in place.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_input_batch import CachedRequestState

from outrider.engines.vllm.sessions import split_prompt


class SessionExtension:
    """Has no methods: importing its module suffices."""


_post_init = CachedRequestState.__post_init__


def _split_first(self: Any) -> None:
    split_prompt(self)
    _post_init(self)


CachedRequestState.__post_init__ = _split_first
