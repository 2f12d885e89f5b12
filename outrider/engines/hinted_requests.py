"""The requests of an engine that others have written, with the hints that its next step may verify. Pure.

The engine owns the tokens: it hands over its own lists, which only it extends. Around a step it calls `take` with what
has arrived, `wait_until` for how long more is worth waiting for, `choose` for the hints to verify, and `finish_step`
when the tokens are there. `take_commits` and `announcements` are what the hint server is told. Nothing here raises
because of what a draft worker sent.

A hint without a distribution counts as certain. An engine that samples accepts it with the target's probability of its
token and otherwise draws from the rest, which leaves the distribution as it is. The draft worker chose the token by the
committed tokens alone, not at random, so that its confidence may decide how many hints are verified (invariant I4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.engines.frames import NUMBER_MAX
from outrider.hints.acceptance import NUM_POSITIONS, BlockAcceptance
from outrider.hints.confidence import Calibration
from outrider.hints.hint_intake import IntakePolicy, IntakeShares, SessionIntake
from outrider.hints.hint_tree import Hint, HintTree
from outrider.hints.hint_wait import Expecting, HintWait
from outrider.hints.hint_wire import HintDecoder
from outrider.hints.pace import Pace
from outrider.hints.speculation import HintTiming, allot
from outrider.hints.step_cost import StepCost, StepLine
from protos.outrider.v1 import draft_pb2, hints_pb2


@dataclass(frozen=True, slots=True)
class Fed:
    """A request that took part in a step, and how many of its chosen hints the step fed."""

    request_id: str
    num_hints: int


@dataclass(slots=True, eq=False)
class HintedRequest:
    """One open request of the engine."""

    number: int  # identifies it on the way to the hint server
    token_ids: Sequence[int]  # prompt and output; the engine's own list, which grows
    # How to draft for it, without tokens, which are added when it is sent; None: it wants no hints.
    announcement: draft_pb2.AttachRequest | None
    stop_token_ids: frozenset[int]
    calibration: Calibration
    committed_len: int  # tokens that were taken into account here
    tree: HintTree = field(default_factory=HintTree)
    decoder: HintDecoder = field(default_factory=HintDecoder)
    acceptance: BlockAcceptance = field(default_factory=BlockAcceptance)
    intake: SessionIntake = field(default_factory=SessionIntake)
    timing: HintTiming = field(default_factory=HintTiming)
    attachment: int = 0  # of the draft worker that follows it; 0: none does
    path: list[Hint] = field(default_factory=list)  # that the hints of the running step were taken from

    @property
    def is_always(self) -> bool:
        """Whether it verifies all hints, even where they do not pay. It is never paused, and its steps say nothing
        about what pays."""
        return self.announcement is not None and self.announcement.speculation.always

    @property
    def accepts_hints(self) -> bool:
        """Whether a draft worker follows it and is not paused."""
        return self.attachment > 0 and not self.intake.is_paused

    @property
    def num_ready(self) -> int:
        """Hints that a step could verify now."""
        return len(self.tree.primary_path(NUM_POSITIONS))


class HintedRequests:
    """All open requests of one engine."""

    def __init__(
        self, vocab_size: int, *, may_pause: bool = True, has_fixed_width: bool = False, hint_wait_ms: float = 0.0
    ) -> None:
        """has_fixed_width: every step feeds as many tokens per request, whatever hints there are: none costs any;
        hint_wait_ms: longest that a step waits for hints."""
        self._vocab_size = vocab_size
        self._may_pause = may_pause
        self._has_fixed_width = has_fixed_width
        self._requests: dict[str, HintedRequest] = {}
        self._by_number: dict[int, HintedRequest] = {}
        self._last_number = 0
        self._cost = StepCost()
        self._pace = Pace()
        self._wait = HintWait(hint_wait_ms)
        self._policy = IntakePolicy()
        self._calibrations = {is_sampled: Calibration() for is_sampled in (False, True)}
        self._commits: list[hints_pb2.SessionCommit] = []
        self.is_telling_urgent = False  # whether somebody waits for what `take_commits` returns
        self._announced: set[int] = set()  # numbers of the requests that the hint server knows
        self.num_stale = 0  # hints dropped because the committed tokens differ, of requests that ended
        self.num_bad = 0  # messages that were invalid, or about no open request

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def speed(self) -> float | None:
        """Recent speed relative to plain decoding of the same batches; None while unknown."""
        return self._policy.speed

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        announcement: draft_pb2.AttachRequest | None,
        stop_token_ids: frozenset[int],
        *,
        is_sampled: bool,
    ) -> None:
        """Adds a request. `token_ids` must be the engine's own list; `announcement` says how to draft for it,
        None that it wants no hints: it is known here because it takes part in steps."""
        if request_id in self._requests:
            return
        while (number := self._last_number % NUMBER_MAX + 1) in self._by_number:
            self._last_number = number
        self._last_number = number
        request = HintedRequest(
            number,
            token_ids,
            announcement,
            stop_token_ids,
            self._calibrations[is_sampled],
            committed_len=len(token_ids),
        )
        self._requests[request_id] = self._by_number[number] = request

    def close(self, request_id: str) -> None:
        """Forgets a request that has ended, however it did."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        del self._by_number[request.number]
        self.num_stale += request.tree.num_stale
        if request.number in self._announced:
            self._announced.discard(request.number)
            self._note(self._commit_of(request, is_finished=True))

    def idle(self) -> None:
        """Notes that there is nothing to run, so that the time until the next step is no step's."""
        self._pace.idle()

    def disconnect(self) -> None:
        """The hint server is gone, and with it all draft workers. The next one is told of every request."""
        self._announced.clear()
        self._commits.clear()
        for request in self._requests.values():
            request.attachment, request.tree = 0, HintTree()  # attachments count from 1 again

    def announcements(self) -> Iterator[tuple[int, draft_pb2.AttachRequest]]:
        """The open requests that the hint server was not told of, with their numbers."""
        for request in self._requests.values():
            if request.announcement is not None and request.number not in self._announced:
                self._announced.add(request.number)
                message = draft_pb2.AttachRequest()
                message.CopyFrom(request.announcement)
                message.token_ids.extend(request.token_ids)
                yield request.number, message

    def take_commits(self) -> hints_pb2.CommitFrame | None:
        """Returns what was committed since the last call; None when nothing was."""
        self.is_telling_urgent = False
        if not self._commits:
            return None
        frame = hints_pb2.CommitFrame(commits=self._commits)
        self._commits.clear()
        return frame

    def take(self, frame: hints_pb2.HintFrame, at: float) -> None:
        """Takes what draft workers sent, and the hint server had at this moment, seconds."""
        for number in frame.unsubscribe:
            request = self._by_number.get(int(number)) if number.isascii() and number.isdigit() else None
            if request is not None:
                self._detach(request)
        for subscribe in frame.subscribe:
            request = self._by_number.get(subscribe.channel)
            if request is not None and subscribe.attachment > request.attachment:
                self._attach(request, subscribe.attachment, at)
        for nodes in frame.nodes:
            self._take_nodes(nodes, at)

    def _attach(self, request: HintedRequest, attachment: int, now: float) -> None:
        request.attachment, request.timing = attachment, self._wait.usual_timing.fresh(now)
        request.decoder, request.acceptance = HintDecoder(), BlockAcceptance()
        is_measured = self._may_pause and not self._has_fixed_width and not request.is_always
        request.intake = self._policy.start(max(len(self._requests), 1)) if is_measured else SessionIntake()
        self._note(self._commit_of(request))

    def _detach(self, request: HintedRequest) -> None:
        """Hints that are there stay; no more are expected."""
        request.attachment = 0

    def _take_nodes(self, nodes: hints_pb2.HintNodes, at: float) -> None:
        request = self._by_number.get(nodes.channel)
        hints = None if request is None else request.decoder.decode(nodes, self._vocab_size)
        if request is None or hints is None or request.attachment == 0:
            self.num_bad += 1
        elif request.accepts_hints:
            base_len = request.decoder.base_len
            request.tree.add(request.token_ids, request.attachment, base_len, hints)
            self._wait.on_hints(request.timing, at, request.num_ready, base_len)

    def wait_until(self, limits: Mapping[str, int], num_running: int, now: float) -> float | None:
        """The moment until which the next step should wait for hints, unless some come before; None: not at all.

        limits and num_running: as in `choose`; now: on the engine's clock, seconds.
        """
        expecting = [
            Expecting(request.timing, request.acceptance, limit)
            for request_id, limit in limits.items()
            if limit > 0 and (request := self._requests.get(request_id)) is not None and request.accepts_hints
        ]
        until = self._wait.until(now, expecting, num_running, self._line(), self._pace.rate * num_running)
        if until is not None:
            self._pace.wait()
        return until

    def choose(self, limits: Mapping[str, int], num_running: int, budget: int) -> dict[str, list[int]]:
        """Chooses the hints that the next step verifies, by request.

        limits: most hints of each request that could have some; num_running: requests of the step in all; budget: most
        hints of all together.
        """
        self._wait.end()
        candidates: list[HintedRequest] = []
        ids: list[str] = []
        gains: list[list[float]] = []
        for request_id, limit in limits.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            request.path = request.tree.primary_path(limit + 1) if limit > 0 and request.accepts_hints else []
            if own := _gains(request, limit):
                ids.append(request_id)
                candidates.append(request)
                gains.append(own)
        if not candidates:
            return {}
        plain = [list[float]()] * max(num_running - len(gains), 0)  # they cost a step's time, too
        if self._has_fixed_width:
            counts = [len(own) for own in gains]
        else:
            counts = allot(gains + plain, self._line(), max(budget, 0))
        return {
            request_id: [hint.token_id for hint in request.path[:count]]
            for request_id, request, count in zip(ids, candidates, counts, strict=False)
            if count
        }

    def _line(self) -> StepLine:
        return self._cost.line(sum(request.committed_len for request in self._requests.values()))

    def finish_step(
        self, fed: Sequence[Fed], num_tokens: int, step_ms: float, now: float, *, only_decodes: bool
    ) -> None:
        """Takes the result of a step: the engine has appended its tokens to the lists of these requests.

        num_tokens: fed in all; step_ms: time of the forward pass; now: on the engine's clock, seconds; only_decodes:
        whether every request of the step had one token to feed, and perhaps hints, and is known here.
        """
        requests = [(request, each) for each in fed if (request := self._requests.get(each.request_id)) is not None]
        num_context = sum(request.committed_len for request, _ in requests)
        num_running = len(fed)
        shares = self._shares([request for request, _ in requests])
        busy_ms = self._pace.busy_ms(step_ms, now)
        hint_price = 0.0 if self._has_fixed_width else None
        if only_decodes and num_running and not self._has_fixed_width:
            self._cost.observe(num_tokens, busy_ms, num_context)
            line = self._cost.line(num_context)
            hint_price = line.token_ms * num_running / line.step_ms(num_running)
        num_committed = sum(self._commit(request, each.num_hints, hint_price, now) for request, each in requests)
        if only_decodes and num_running:
            self._pace.commit(num_committed, num_running)
        if not (only_decodes and num_running and self._may_pause):
            return
        if self._has_fixed_width:
            may_accept_hints = True
        else:
            has_always = any(request.attachment and request.is_always for request, _ in requests)
            if self._pace.whole_ms > 0.0 and num_committed and not has_always:
                self._policy.observe(num_running, num_tokens, num_committed, num_context, self._pace.whole_ms, shares)
            may_accept_hints = self._policy.may_accept_hints(num_running)
        for request, _ in requests:
            if not request.attachment or request.is_always:
                continue
            if request.intake.update(may_accept_hints=may_accept_hints):
                if request.accepts_hints:
                    request.timing = request.timing.fresh(now)
                self._note(self._commit_of(request))

    def _shares(self, requests: Sequence[HintedRequest]) -> IntakeShares | None:
        followed = [request for request in requests if request.attachment and not request.is_always]
        if not followed:
            return None
        accepting = [request for request in followed if request.accepts_hints]
        num_receiving = sum(request.timing.has_received for request in accepting)
        return IntakeShares(len(accepting) / len(followed), num_receiving / len(followed))

    def _commit(self, request: HintedRequest, num_fed: int, hint_price: float | None, now: float) -> int:
        """Takes a request's new tokens; returns how many there are."""
        token_ids = list(request.token_ids[request.committed_len :])
        if not token_ids:
            request.path = []
            return 0
        verified = request.path[: num_fed + 1]  # the last token is compared with the next hint, which was not fed
        num_matched = 0
        for hint, token_id in zip(verified, token_ids, strict=False):
            if hint.token_id != token_id:
                break
            num_matched += 1
        # A stop may have cut the tokens off: what follows was not judged.
        verified = verified[: len(token_ids)]
        if verified and request.attachment:
            rates = request.acceptance.chances(len(verified))
            for position, hint in enumerate(verified[: num_matched + 1]):
                is_accepted = position < num_matched
                request.calibration.observe(hint.confidence, rates[position], is_accepted=is_accepted)
            request.acceptance.observe(num_matched, len(verified))
        if hint_price is not None and self._may_pause and request.accepts_hints and not request.is_always:
            self._policy.judge(request.intake, min(num_matched, num_fed) - num_fed * hint_price)
        request.tree.commit(token_ids)
        request.path = []
        commit = self._commit_of(request, num_tried=len(verified), num_held=num_matched)
        if request.number in self._announced:
            self._note(commit, is_urgent=request.accepts_hints)
        request.committed_len += len(token_ids)
        if request.accepts_hints:
            request.timing.on_commit(now, request.num_ready, request.committed_len)
        return len(token_ids)

    def _note(self, commit: hints_pb2.SessionCommit, *, is_urgent: bool = True) -> None:
        """Keeps a message for `take_commits`."""
        self._commits.append(commit)
        self.is_telling_urgent |= is_urgent

    def _commit_of(
        self, request: HintedRequest, *, is_finished: bool = False, num_tried: int = 0, num_held: int = 0
    ) -> hints_pb2.SessionCommit:
        """The message about a request's tokens that were not taken into account yet."""
        return hints_pb2.SessionCommit(
            channel=request.number,
            from_len=request.committed_len,
            token_ids=request.token_ids[request.committed_len :],
            is_paused=request.intake.is_paused,
            is_finished=is_finished,
            num_tried_hints=num_tried,
            num_held_hints=num_held,
        )


def _gains(request: HintedRequest, limit: int) -> list[float]:
    """Per hint worth feeding, the probability that it and all before it are accepted. The path is cut to these, and one
    that is not fed. A hint that ends the sequence is not worth it: nothing follows it."""
    path = request.path
    stop = next((index for index, hint in enumerate(path) if hint.token_id in request.stop_token_ids), len(path))
    del path[stop + 1 :]
    if request.is_always:
        return [1.0] * min(len(path), stop, limit)
    rates = request.acceptance.chances(len(path)) if path else ()
    gains, chance = [], 1.0
    for hint, rate in zip(path[: min(stop, limit)], rates, strict=False):
        chance *= request.calibration.chance(hint.confidence, rate)
        gains.append(chance)
    return gains
