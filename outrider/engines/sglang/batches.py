"""The hints that SGLang's decode batches verify, and their form. Knows SGLang's requests by their attributes alone.

SGLang feeds the same number of tokens for each request of a decode batch: the last committed token and
`speculative_num_draft_tokens - 1` drafts, with a mask that says which of them are ancestors of which. Hints are one
chain. What is left over continues that chain with padding, so that no two drafts stand at one position: SGLang's
sampler, which tries drafts of one position one after the other, would accept the same token there too often.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from outrider.engines.engine_hints import EngineHints
from outrider.engines.hinted_requests import Fed
from outrider.engines.sglang.requests import (
    announcement,
    hint_limit,
    is_hintable,
    is_sampled,
    stop_token_ids,
    tokens,
)

PADDING: Final = 0
"""As SGLang's n-gram worker pads. It is a token like any other: accepted only where the target generates it."""


def chains(last_token_ids: Sequence[int], hints: Sequence[Sequence[int]], width: int) -> npt.NDArray[np.int64]:
    """Draft tokens of a batch, [num_requests * width]: each request's last token, its hints, padding."""
    rows = np.full((len(last_token_ids), width), PADDING, dtype=np.int64)
    rows[:, 0] = last_token_ids
    for row, own in zip(rows, hints, strict=True):
        row[1 : 1 + len(own)] = own
    return rows.reshape(-1)


def chain_masks(num_requests: int, width: int) -> npt.NDArray[np.int64]:
    """Masks of chains, [num_requests * width * width]: 1 where the column's token is the row's, or before it."""
    return np.tile(np.tri(width, dtype=np.int64).reshape(-1), num_requests)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is open here."""

    request: Any
    token_ids: list[int]  # prompt and output, as far as it was known at the last decode batch
    limit: int  # most hints per step
    is_decoding: bool = False  # whether it has been in a decode batch
    num_hints: int = 0  # that the running step verifies


class BatchHints:
    """Hints for the batches of one engine: `prefill` and `choose` when a batch begins, `close` when a request ends."""

    def __init__(self, hints: EngineHints, width: int, now: Callable[[], float] = time.monotonic) -> None:
        """width: tokens fed per request; now: a clock, seconds."""
        self._hints = hints
        self._width = width
        self._now = now
        self._open: dict[str, _Open] = {}
        self._session_ids = (f"sglang-{secrets.token_hex(8)}-{number}" for number in itertools.count(1))
        self._step_began_at = now()

    def __len__(self) -> int:
        return len(self._open)

    def prefill(self, requests: Iterable[Any]) -> None:
        """Opens the requests of a prefill, so that the draft's overlaps it."""
        if not self._hints.is_on:
            return
        self._close_ended()
        for request in requests:
            if request.rid not in self._open:
                self._start(request, ())

    def choose(self, requests: Sequence[Any], latest: Sequence[Sequence[int]]) -> list[list[int]]:
        """The hints that a decode batch verifies, per request.

        latest: tokens of each request's last step that are not among its `output_ids` yet.
        """
        if not self._hints.is_on:
            return [[] for _ in requests]
        self._close_ended()
        for departed in self._open.keys() - {request.rid for request in requests}:
            # It was retracted, and is opened anew when it comes back. One whose prefill is not over was not here yet.
            if self._open[departed].is_decoding:
                self.close(departed)
        self._finish_step(requests, latest)
        self._hints.collect()
        limits = {request.rid: self._open[request.rid].limit for request in requests}
        chosen = self._hints.choose(limits, len(requests), len(requests) * (self._width - 1))
        for request in requests:
            self._open[request.rid].num_hints = len(chosen.get(request.rid, ()))
        self._step_began_at = self._now()
        return [chosen.get(request.rid, []) for request in requests]

    def _finish_step(self, requests: Sequence[Any], latest: Sequence[Sequence[int]]) -> None:
        """Takes the tokens of the step before."""
        fed = []
        for request, own in zip(requests, latest, strict=True):
            known = self._open.get(request.rid)
            if known is None or not _extend(known, request, own):
                self.close(request.rid)
                known = self._start(request, own)
            else:
                fed.append(Fed(request.rid, known.num_hints))
            known.is_decoding = True
        step_ms = (self._now() - self._step_began_at) * 1e3
        self._hints.finish_step(fed, len(fed) * self._width, step_ms, only_decodes=True)

    def _start(self, request: Any, latest: Sequence[int]) -> _Open:
        limit = hint_limit(request) if is_hintable(request) else 0
        limit = self._width - 1 if limit is None else min(limit, self._width - 1)
        known = self._open[request.rid] = _Open(request, tokens(request, latest), limit)
        self._hints.open(
            request.rid,
            known.token_ids,
            announcement(request, next(self._session_ids), secrets.token_hex(16)) if limit else None,
            stop_token_ids(request),
            is_sampled=is_sampled(request),
        )
        return known

    def _close_ended(self) -> None:
        """Closes requests of which SGLang says nothing when they end: at their first token, or before it."""
        for request_id in [key for key, each in self._open.items() if each.request.finished()]:
            self.close(request_id)

    def turn_off(self) -> None:
        """Ends hints for good."""
        self._hints.turn_off()

    def close(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        if self._open.pop(request_id, None) is not None:
            self._hints.close(request_id, in_step=False)


def _extend(known: _Open, request: Any, latest: Sequence[int]) -> bool:
    """Appends a request's new tokens; returns False when it is not the one that was known: its tokens are others."""
    if known.request is not request:
        return False
    output_ids = request.output_ids
    num_known = len(known.token_ids) - len(request.origin_input_ids_unpadded)  # output alone
    if not 0 <= num_known <= len(output_ids) + len(latest):
        return False
    if num_known:
        at = num_known - 1
        last = output_ids[at] if at < len(output_ids) else latest[at - len(output_ids)]
        if last != known.token_ids[-1]:
            return False
    known.token_ids += output_ids[num_known:]
    known.token_ids += latest[max(num_known - len(output_ids), 0) :]
    return True
