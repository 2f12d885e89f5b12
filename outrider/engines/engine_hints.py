"""The hints of one engine: its open requests and the link to its hint server, as the engine's scheduler uses them.

Every method but `wait` returns at once, and none raises: after an unexpected error the engine goes on without hints for
good, and the log says why.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from outrider.concurrency.loop_share import LoopShare
from outrider.engines.frames import NUMBER_MAX, FrameKind
from outrider.engines.hint_link import HintLink
from outrider.engines.hinted_requests import Fed, HintedRequests
from protos.outrider.v1 import draft_pb2

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_NO_HINTS: Final[dict[str, list[int]]] = {}
TELL_S: Final = 0.1
"""How often the hint server is told of commits while no draft worker waits for them: taking a message costs it up to a
millisecond of a core, which the engine's own threads may want."""

TAKE_SHARE: Final = 0.25
"""Share of the engine's time that taking hints may have, whoever sends them. What is left waits for the next step."""
FRAME_REQUESTS: Final = 16
"""For each so many requests of a step one frame is taken in any case: with eight hints for each, it is full. One more
ends a delay. Thus the hints of honest draft workers are there however short the steps are."""
TAKE_S: Final = 0.002
"""Processor time that it may have at once."""
ANNOUNCE_S: Final = 0.001
"""Time after which a step announces no other request to the hint server. After the loss of one all of them are due."""


def guarded(
    default: R,
) -> Callable[[Callable[Concatenate[EngineHints, P], R]], Callable[Concatenate[EngineHints, P], R]]:
    """Makes a method return `default` when it fails, and whenever hints are off."""

    def decorate(method: Callable[Concatenate[EngineHints, P], R]) -> Callable[Concatenate[EngineHints, P], R]:
        @functools.wraps(method)
        def guard(self: EngineHints, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not self.is_on:
                return default
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("hints failed; this engine goes on without them until it is restarted")
                self.turn_off()
                return default

        return guard

    return decorate


class EngineHints:
    """Hints for the engine's scheduler. Around a step: `collect`, `wait`, `choose`, then `finish_step`."""

    def __init__(
        self,
        requests: HintedRequests,
        link: HintLink,
        now: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """now: a clock, seconds; processor: a clock of the time that this thread computes, seconds."""
        self._requests = requests
        self._link = link
        self._now = now
        self._processor = processor
        self._sleep = sleep
        self._share = LoopShare(TAKE_SHARE, TAKE_S)
        self._num_due = 0  # frames that are taken before the next step in any case
        self._is_connected = False
        self._closed: list[str] = []  # ended while the engine took a step's result
        self._waited_s = 0.0  # that the hint server was not told of
        self._told_at = 0.0  # of commits
        self.is_on = True

    def turn_off(self) -> None:
        """Ends hints and the hint server."""
        self.is_on = False
        self._link.close()

    @guarded(None)
    def start(self) -> None:
        """Starts the hint server, so that it is there when the first request comes."""
        self._connect()
        self._link.flush(self._now())

    @guarded(None)
    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        announcement: draft_pb2.AttachRequest | None,
        stop_token_ids: frozenset[int],
        *,
        is_sampled: bool,
    ) -> None:
        """Adds a request, as `HintedRequests.open`, and tells the hint server at once: the draft's prefill overlaps the
        engine's."""
        if not len(self._requests):
            self._requests.idle()
        self._requests.open(request_id, token_ids, announcement, stop_token_ids, is_sampled=is_sampled)
        self._tell()

    @guarded(None)
    def close(self, request_id: str, *, in_step: bool) -> None:
        """Removes a request that has ended. in_step: while the engine takes a step's result, which comes first."""
        if in_step:
            self._closed.append(request_id)
        else:
            self._requests.close(request_id)
            self._tell()

    @guarded(None)
    def collect(self) -> None:
        """Takes what draft workers have sent, within the share of the engine's time."""
        self._connect()
        now, began = self._now(), self._processor()
        if not self._pause_s(now):
            for frame, at in self._link.receive(now):
                self._requests.take(frame, at)
                ended = self._processor()
                self._share.spend(ended - began, now)
                self._num_due = max(self._num_due - 1, 0)
                if self._pause_s(now):
                    break
                began = ended
        self._tell()

    def _pause_s(self, now: float) -> float:
        """How long no frame may be taken, unless a step ends before, seconds."""
        return 0.0 if self._num_due else self._share.wait_s(now)

    @guarded(None)
    def wait(self, limits: Mapping[str, int], num_running: int) -> None:
        """Waits for hints while that pays, as `HintedRequests.wait_until`, and collects them."""
        now = began = self._now()
        while (until := self._requests.wait_until(limits, num_running, now)) is not None:
            pause_s = self._pause_s(now)
            if pause_s:  # a flood has used up the share, and honest hints wait behind it
                self._sleep(min(pause_s, until - now))
            else:
                self._link.wait(until - now)
            self.collect()
            now = self._now()
        self._waited_s += now - began

    @guarded(_NO_HINTS)
    def choose(self, limits: Mapping[str, int], num_running: int, budget: int) -> dict[str, list[int]]:
        """As `HintedRequests.choose`."""
        return self._requests.choose(limits, num_running, budget)

    @guarded(None)
    def finish_step(self, fed: Sequence[Fed], num_tokens: int, step_ms: float, *, only_decodes: bool) -> None:
        """Takes a step's result: the engine has appended its tokens."""
        now = self._now()
        self._num_due = len(fed) // FRAME_REQUESTS + 1
        only_decodes = only_decodes and all(each.request_id in self._requests for each in fed)
        self._requests.finish_step(fed, num_tokens, step_ms, now, only_decodes=only_decodes)
        for request_id in self._closed:
            self._requests.close(request_id)
        self._closed.clear()
        self._tell()

    def _connect(self) -> None:
        """Opens the link where it is due, and notices when it was lost."""
        self._link.open(self._now())
        if self._is_connected and not self._link.is_open:
            self._requests.disconnect()
        self._is_connected = self._link.is_open

    def _tell(self) -> None:
        """Sends the hint server what it does not know yet."""
        if not self._link.is_open:
            return
        began = now = self._now()
        if not self._link.is_busy:
            for number, announcement in self._requests.announcements():
                self._link.send(FrameKind.OPEN, announcement.SerializeToString(), number)
                now = self._now()
                if self._link.is_busy or now - began >= ANNOUNCE_S:
                    break  # the others follow with the next step
        if self._requests.is_telling_urgent or now - self._told_at >= TELL_S:
            self._told_at = now
            commits = self._requests.take_commits()
            if commits is not None:
                waited_us = round(self._waited_s * 1e6) & NUMBER_MAX
                self._link.send(FrameKind.COMMITS, commits.SerializeToString(), waited_us)
                self._waited_s = 0.0
        self._link.flush(now)


def hello(settings: Mapping[str, Any], model_name: str, vocab_size: int, tokenizer_dir: str | None) -> dict[str, Any]:
    """The first message to a hint server."""
    return {
        "settings": dict(settings),
        "model_name": model_name,
        "vocab_size": vocab_size,
        "tokenizer_dir": tokenizer_dir,
    }
