"""A scheduler whose draft worker answers within the step: each request has hints in every step, and no process takes
part. For tests that are about what vLLM does with hints, not about when they arrive. It runs in vLLM's environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.engines.frames import FrameKind
from outrider.engines.hinted_requests import HintedRequests
from outrider.engines.vllm import scheduler
from outrider.hints.step_cost import StepLine
from protos.outrider.v1 import draft_pb2, hints_pb2

NUM_HINTS = 7
TEXTS = os.environ.get("FORCED_HINTS_TEXTS")
"""A file with texts of the model, JSON, lists of token ids. Hints follow them; one of eleven is wrong."""
_known: list[list[int]] = json.loads(Path(TEXTS).read_text()) if TEXTS else []


def likeliest(token_id: int, vocab_size: int) -> int:
    """The token that `tests.engines.small_model` says most often after this one."""
    return (token_id + 1) % vocab_size


def hints_after(token_ids: list[int], vocab_size: int) -> list[int]:
    """Hints that follow from the committed tokens alone. About one of four is not the likeliest, one of eight is
    rare."""
    found = list(token_ids)
    for text in _known:
        if text[: len(found)] == found:
            ahead = text[len(found) : len(found) + NUM_HINTS]
            return [token_id if (len(found) + place) % 11 else 0 for place, token_id in enumerate(ahead)]
    for _ in range(NUM_HINTS):
        kind = (7 * sum(found[-3:]) + len(found)) % 8
        skipped = (0, 0, 0, 0, 0, 0, 1, vocab_size // 2)[kind]
        found.append((likeliest(found[-1], vocab_size) + skipped) % vocab_size)
    return found[-NUM_HINTS:]


class ForcedLink:
    """In the place of a `HintLink`: plays the hint server and the draft worker."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._vocab_size = settings["vocab_size"]
        self._token_ids: dict[int, list[int]] = {}
        self._frame = hints_pb2.HintFrame()
        self.is_open = self.is_busy = False
        self.num_starts = 1

    def open(self, now: float) -> bool:
        self.is_open, was_open = True, self.is_open
        return not was_open

    def send(self, kind: FrameKind, body: bytes, number: int = 0) -> None:
        if kind is FrameKind.OPEN:
            self._token_ids[number] = list(draft_pb2.AttachRequest.FromString(body).token_ids)
            self._frame.subscribe.add(channel=number, attachment=1)
            self._add_hints(number)
            return
        for commit in hints_pb2.CommitFrame.FromString(body).commits:
            known = self._token_ids.get(commit.channel)
            if known is None:
                continue
            if commit.is_finished:
                del self._token_ids[commit.channel]
                continue
            known += commit.token_ids[len(known) - commit.from_len :]
            self._add_hints(commit.channel)

    def _add_hints(self, number: int) -> None:
        token_ids = self._token_ids[number]
        hints = hints_after(token_ids, self._vocab_size)
        self._frame.nodes.add(
            channel=number, base_len=len(token_ids), first_node_id=1, parent_ids=range(len(hints)), token_ids=hints
        )

    def flush(self, now: float) -> None:
        pass

    def receive(self, now: float) -> list[tuple[hints_pb2.HintFrame, float]]:
        frame, self._frame = self._frame, hints_pb2.HintFrame()
        return [(frame, now)]

    def wait(self, longest_s: float) -> None:
        pass

    def close(self) -> None:
        self.is_open = False


class ForcedHints(scheduler.HintScheduler):
    """vLLM's `--scheduler-cls` with hints in every step, however little they pay."""


vars(scheduler)["HintLink"] = ForcedLink
HintedRequests._line = lambda self: StepLine(1.0, 0.0)  # type: ignore[method-assign]
