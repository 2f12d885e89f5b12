"""SGLang's n-gram worker, with hints of draft workers in place of n-grams.

OUTRIDER_HINTS='{"draft_workers": ["HOST:PORT"]}' sglang serve --model-path MODEL --speculative-algorithm OUTRIDER

Before each decode batch it takes whatever hints have arrived, and never waits for any. SGLang verifies them with its
own sampler. All ranks of a tensor-parallel group must verify the same tokens, and hints arrive when they like: the
first rank takes them, and broadcasts the batch's tokens to the others on the host.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from outrider.engines.engine_hints import EngineHints, hello
from outrider.engines.hint_link import HintLink
from outrider.engines.hinted_requests import HintedRequests
from outrider.engines.sglang.batches import BatchHints, chain_masks, chains
from outrider.engines.sglang.checks import ANY_VERSION, hint_settings, settings_in
from outrider.engines.tokenizer_dir import tokenizer_dir

logger = logging.getLogger(__name__)


class HintWorker(NGRAMWorker):
    """SGLang's n-gram worker with hints. Raises ConfigurationError at start, and nothing of its own afterwards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = settings_in(os.environ)
        settings = hint_settings(given)
        super().__init__(*args, **kwargs)
        self._group = get_parallel().tp_group
        self._batches: BatchHints | None = None  # of the first rank alone
        if self._group.rank_in_group == 0:
            hints = _engine_hints(given, self.model_runner.model_config.vocab_size, may_pause=settings.may_pause)
            self._batches = BatchHints(hints, self.draft_token_num)
            hints.start()

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._batches is not None and batch.forward_mode.is_extend():
            self._guarded(self._batches.prefill, batch.reqs)
        return super().forward_batch_generation(batch, *args, **kwargs)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Draft tokens, [num_requests * width], and masks, [num_requests * width * width]."""
        num_requests, width = len(batch.reqs), self.draft_token_num
        if self._batches is None:
            draft_tokens = np.zeros(num_requests * width, dtype=np.int64)
        else:
            latest = self._latest_tokens(batch)
            hints = self._guarded(self._batches.choose, batch.reqs, latest) or [[] for _ in latest]
            last = [own[-1] if own else each.output_ids[-1] for own, each in zip(latest, batch.reqs, strict=True)]
            draft_tokens = chains(last, hints, width)
        if self._group.world_size > 1:
            source = self._group.ranks[0]
            torch.distributed.broadcast(torch.from_numpy(draft_tokens), src=source, group=self._group.cpu_group)
        return draft_tokens, chain_masks(num_requests, width)

    def _latest_tokens(self, batch: Any) -> list[list[int]]:
        """Per request, the tokens of its last step that are not among its `output_ids`.

        With overlap SGLang takes a step's result while the next one runs, unless a grammar waits for it.
        """
        if not self.enable_overlap or batch.grammar_needs_sync():
            return [[] for _ in batch.reqs]
        token_ids, lens = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
        width = self.draft_token_num
        return [token_ids[row * width : row * width + num_tokens] for row, num_tokens in enumerate(lens)]

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Does nothing: no n-grams are looked up."""

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        super().note_request_finished(rid=rid, natural_stop=natural_stop)
        if self._batches is not None:
            self._guarded(self._batches.close, rid)

    def _guarded(self, method: Any, *args: Any) -> Any:
        """Calls a method of the hints; after an unexpected error there are none any more, and it returns None."""
        try:
            return method(*args)
        except Exception:
            logger.exception("hints failed; this engine goes on without them until it is restarted")
            if self._batches is not None:
                self._batches.turn_off()
            return None


def _engine_hints(given: dict[str, Any], vocab_size: int, *, may_pause: bool) -> EngineHints:
    serving = get_serving()
    # Engines of a data-parallel group share their settings, and each has ports of its own.
    rank = get_parallel().dp_rank or 0
    ports = {key: given[key] + rank for key in ("port", "metrics_port") if given.get(key)}
    told = hello(
        {**{key: each for key, each in given.items() if key != ANY_VERSION}, **ports},
        str(serving.served_model_name or ""),
        vocab_size,
        tokenizer_dir(serving.tokenizer_path),
    )
    return EngineHints(HintedRequests(vocab_size, may_pause=may_pause, has_fixed_width=True), HintLink(told))
