"""One sequence being generated on this worker, and the only place where its committed tokens grow (I1). Pure."""

from __future__ import annotations

import math
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from outrider.acceptance import BlockAcceptance
from outrider.confidence import Calibration
from outrider.engine.kv_cache import KVSequence
from outrider.engine.prefix_cache import TextBlocks
from outrider.engine.text_before import TextBefore
from outrider.engine.verdict import Verdict
from outrider.grammar import GrammarState, GrammarViolation
from outrider.hint_tree import Hint, HintTree
from outrider.sampling_params import DecodingMode, SamplingParams, SpeculationSettings
from outrider.token_logprobs import TokenLogprobs
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.hint_path import (
    CERTAIN_MATCH,
    HintPath,
    HintSources,
    choose_path,
    is_forced,
    is_local,
    is_remote,
)
from target_worker.listening import SessionListening
from target_worker.lookup import LocalHints
from target_worker.messages import Action, CommitPublished, PromptScored, StartSession, StreamId
from target_worker.speculation import HintTiming

NO_PATH = HintPath([], 0)
UINT32_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What one verdict added to a session."""

    token_ids: list[int]
    origins: list[common_pb2.TokenOrigin]
    num_draft_tokens: int  # hints of a draft worker that were fed
    num_accepted: int  # of these, among the tokens
    num_tried: int  # hints of a draft worker that were verified, one that was not fed included
    num_held: int  # of these, the leading ones that held
    logprobs: list[TokenLogprobs] | None
    reason: target_pb2.FinishReason | None  # set when the session has ended
    stop_token_id: int | None


@dataclass(slots=True)
class Subscriber:
    """A draft worker's stream that follows a session."""

    told_len: int  # committed tokens that it has been told of
    is_told_to_pause: bool


@dataclass(slots=True, eq=False)
class Session:
    """`token_ids[:num_prompt_tokens]` is the prompt; all of `token_ids` is committed.

    KV entries `[0, kv.length)` belong to `token_ids[:kv.length]`; between steps `kv.length < len(token_ids)`.
    """

    session_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_given_tokens: int  # prompt and what was committed elsewhere
    max_len: int  # token_ids never gets longer, tokens
    sampling: SamplingParams
    speculation: SpeculationSettings
    seed: int
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int]  # what min_tokens rules out
    grammar: GrammarState | None  # having read all output
    arrived_at: float  # shell's clock, seconds
    blocks: TextBlocks
    rank: tuple[int, int] = (0, 0)  # priority, then the how-manieth to arrive; lower goes first
    deadline_at: float = math.inf  # shell's clock, seconds
    calibration: Calibration | None = None  # of all that decode this way; none under rejection sampling (I4)
    tree: HintTree = field(default_factory=HintTree)
    acceptance: BlockAcceptance = field(default_factory=BlockAcceptance)
    timing: HintTiming = field(default_factory=HintTiming)
    local: LocalHints | None = None
    path: HintPath = NO_PATH  # that the last step was composed from
    listening: SessionListening = field(default_factory=SessionListening)
    subscribers: dict[StreamId, Subscriber] = field(default_factory=dict)
    stats: common_pb2.SpeculationStats = field(default_factory=common_pb2.SpeculationStats)
    first_step_at: float | None = None
    first_token_at: float | None = None
    num_cached_tokens: int = 0  # of the prompt, whose KV was there already
    num_scored: int = 1  # prompt tokens whose log probabilities have been told; the first one has none
    num_preemptions: int = 0
    has_outcome: bool = False  # of a step with hints, which has not been counted

    @classmethod
    def from_event(
        cls,
        event: StartSession,
        *,
        max_model_len: int,
        end_of_sequence_ids: frozenset[int],
        kv: KVSequence,
        number: int,
        local: LocalHints | None,
        calibration: Calibration | None,
        now: float,
    ) -> Session:
        sampling = event.sampling
        if event.grammar is not None:
            event.grammar.advance(event.token_ids[event.num_prompt_tokens :])
        return cls(
            session_id=event.session_id,
            token_ids=list(event.token_ids),
            num_prompt_tokens=event.num_prompt_tokens,
            num_given_tokens=len(event.token_ids),
            max_len=min(event.num_prompt_tokens + sampling.max_tokens, max_model_len),
            sampling=sampling,
            speculation=event.speculation,
            seed=event.seed,
            stop_token_ids=sampling.stop_token_ids
            | (frozenset() if sampling.ignore_eos else end_of_sequence_ids),
            end_token_ids=sampling.stop_token_ids | end_of_sequence_ids,
            grammar=event.grammar,
            arrived_at=now,
            blocks=TextBlocks(kv, event.cache_salt),
            rank=(event.priority, number),
            deadline_at=event.deadline_at,
            calibration=calibration,
            local=local,
        )

    @property
    def kv(self) -> KVSequence:
        return self.blocks.kv

    @property
    def decoding_mode(self) -> DecodingMode:
        return self.sampling.decoding_mode

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Committed tokens that have no KV yet: 1 while decoding, more before and during prefill."""
        return len(self.token_ids) - self.kv.length

    @property
    def may_listen(self) -> bool:
        """Whether hints of a draft worker are wanted by those who asked for the session."""
        return self.speculation.enabled and not self.speculation.is_plain

    @property
    def is_listening(self) -> bool:
        return self.may_listen and not self.listening.is_resting

    def hint_path(self, num_speculative_tokens: int) -> HintPath:
        """What to verify next, one hint longer than may be fed: the last position is verified without being fed."""
        if not self._has_hint_source():
            self.path = NO_PATH
            return self.path
        tree = self.tree if self.is_listening else None
        limit = self.hint_limit(num_speculative_tokens)
        chances = self.acceptance.chances(limit + 1) if tree is not None else ()
        sources = HintSources(tree, chances, self.local, self.grammar, self.calibration)
        self.path = choose_path(sources, self.token_ids, self.stop_token_ids, limit)
        return self.path

    def hint_gains(self) -> list[float]:
        """Of that path, see `HintPath.gains`; a session that speculates always has every hint of it verified."""
        return [1.0] * self.path.num_feedable if self.speculation.is_always else self.path.gains()

    def text_before(self, hints: list[Hint], num_rows: int) -> TextBefore:
        """What stands before each of `num_rows` positions, `hints[i]` being said at the i-th."""
        said = [hint.token_id for hint in hints]
        return TextBefore(
            self.token_ids,
            self.num_prompt_tokens,
            [said[:row] for row in range(num_rows)],
            self.end_token_ids,
            self.grammar,
        )

    def is_text_complete(self) -> bool:
        """Whether the grammar permits nothing after the output that there is."""
        return self.grammar is not None and _advance(self.grammar, []) is not None

    def has_certain_hints(self) -> bool:
        """Whether it is known without a draft worker what comes next, so that none has to be waited for."""
        if self.speculation.is_plain:
            return False
        if self.local is not None and self.local.propose(self.token_ids, [], 1).match_len >= CERTAIN_MATCH:
            return True
        if self.grammar is None:
            return False
        try:
            return bool(self.grammar.forced_after([], 1))
        except GrammarViolation:
            return False

    def prompt_targets(self, start: int, num_tokens: int) -> list[int]:
        """Prompt tokens whose log probabilities the rows of tokens [start, start + num_tokens) give, where some of
        them have not been told yet."""
        end = min(start + num_tokens + 1, self.num_prompt_tokens)
        if self.sampling.num_prompt_logprobs is None or end <= self.num_scored:
            return []
        return self.token_ids[start + 1 : end]

    @property
    def has_prompt_to_score(self) -> bool:
        """Whether log probabilities of the prompt are wanted that have not been told."""
        return self.sampling.num_prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    def score(self, first: int, logprobs: list[TokenLogprobs]) -> list[Action]:
        """Log probabilities of the prompt tokens from `first` on; those that were told before a preemption are not
        told again."""
        num_told = max(self.num_scored - first, 0)
        self.num_scored = first + len(logprobs)
        return [PromptScored(self.session_id, first + num_told, logprobs[num_told:])]

    def preempt(self) -> None:
        """Gives its KV back. The text, and all that is known of it, stays; its KV is computed anew some day."""
        self.blocks.release()
        self.path = NO_PATH
        self.num_preemptions += 1

    def can_expect_hints(self) -> bool:
        """Whether a draft worker follows the session and is heard."""
        return self.is_listening and bool(self.subscribers)

    def hint_limit(self, num_speculative_tokens: int) -> int:
        """Most hints worth feeding now: the request's and the worker's limit, and the room that is left."""
        if not self._has_hint_source():
            return 0
        asked = self.speculation.num_speculative_tokens or num_speculative_tokens
        return min(asked, num_speculative_tokens, self.max_len - self.committed_len - 1)

    def _has_hint_source(self) -> bool:
        if self.speculation.is_plain:
            return False
        return self.is_listening or self.grammar is not None or self.local is not None

    def forget_the_draft(self, now: float, usual: HintTiming) -> None:
        """A draft worker comes, or comes back: what was learned from an earlier one does not hold for it."""
        self.acceptance = BlockAcceptance()
        self.timing = usual.fresh(now)

    def subscribe(self, stream_id: StreamId, known_len: int) -> list[Action]:
        """A draft worker that knows the first `known_len` tokens follows the session from now on."""
        told_len = min(known_len, self.committed_len)
        self.subscribers[stream_id] = Subscriber(told_len, is_told_to_pause=False)
        return [self._news(stream_id, is_finished=False, num_tried=0, num_held=0)]

    def publish(self, *, is_finished: bool = False, num_tried: int = 0, num_held: int = 0) -> list[Action]:
        """What its subscribers have to hear now. One that was told to pause hears nothing until that changes."""
        is_listening = self.is_listening
        return [
            self._news(stream_id, is_finished=is_finished, num_tried=num_tried, num_held=num_held)
            for stream_id, subscriber in self.subscribers.items()
            if is_listening or is_finished or not subscriber.is_told_to_pause
        ]

    def _news(
        self, stream_id: StreamId, *, is_finished: bool, num_tried: int, num_held: int
    ) -> CommitPublished:
        subscriber = self.subscribers[stream_id]
        from_len = subscriber.told_len
        subscriber.told_len, subscriber.is_told_to_pause = self.committed_len, not self.is_listening
        return CommitPublished(
            stream_id,
            self.session_id,
            from_len,
            self.token_ids[from_len:],
            self.is_listening,
            is_finished=is_finished,
            num_tried=num_tried,
            num_held=num_held,
        )

    def commit(self, verdict: Verdict, hints: list[Hint], num_fed_hints: int) -> CommitOutcome:
        """Appends what a step decided, up to a stop token, the grammar's end or the length limit, and rolls KV back.

        Of `hints`, which were verified, the first `num_fed_hints` had been fed to the model.
        """
        if not verdict.token_ids:
            return self._end_without_token()
        num_tried, num_held = self._learn(verdict, hints)
        token_ids: list[int] = []
        reason, stop_token_id = None, None
        for token_id in self._up_to_completion(verdict.token_ids):
            if token_id in self.stop_token_ids:
                reason, stop_token_id = target_pb2.FINISH_REASON_STOP, token_id
                break
            token_ids.append(token_id)
            if self.committed_len + len(token_ids) == self.max_len:
                reason = target_pb2.FINISH_REASON_LENGTH
                break
        held = hints[: min(verdict.num_accepted, len(token_ids))]
        num_draft_tokens = sum(map(is_remote, hints[:num_fed_hints]))
        num_accepted = sum(map(is_remote, held))
        self.stats.num_forced_tokens += sum(map(is_forced, held))
        self.stats.num_lookup_tokens += sum(map(is_local, held))
        self._count(num_accepted, num_draft_tokens)
        if self.grammar is not None and stop_token_id is None:
            reason = _advance(self.grammar, token_ids) or reason
        self.token_ids.extend(token_ids)
        self.tree.commit(token_ids)
        self.has_outcome = num_tried > 0 and reason is None
        self.kv.truncate(min(self.kv.length, self.committed_len - 1))
        origins = _origins(verdict, num_fed_hints)[: len(token_ids)]
        logprobs = None if verdict.logprobs is None else verdict.logprobs[: len(token_ids)]
        return CommitOutcome(
            token_ids,
            origins,
            num_draft_tokens,
            num_accepted,
            num_tried,
            num_held,
            logprobs,
            reason,
            stop_token_id,
        )

    def _up_to_completion(self, token_ids: list[int]) -> list[int]:
        """Without an end of sequence after a complete text: step by step the session would have ended before it."""
        if self.grammar is None or len(token_ids) == 1 or token_ids[-1] not in self.end_token_ids:
            return token_ids
        is_late = _advance(self.grammar.fork(), token_ids[:-1]) == target_pb2.FINISH_REASON_STOP
        return token_ids[:-1] if is_late else token_ids

    def _end_without_token(self) -> CommitOutcome:
        self.kv.truncate(min(self.kv.length, self.committed_len - 1))
        return CommitOutcome([], [], 0, 0, 0, 0, None, target_pb2.FINISH_REASON_NO_TOKEN, None)

    def _learn(self, verdict: Verdict, hints: list[Hint]) -> tuple[int, int]:
        """What the draft worker's hints are worth: (tried, held). Those from elsewhere say nothing about it."""
        num_tried = sum(map(is_remote, hints))
        num_held = sum(map(is_remote, hints[: verdict.num_matched]))
        if self.local is not None:
            tried = self.path.tried_locally(len(hints), verdict.num_matched)
            if tried is not None:
                self.local.observe(self.path.proposal, num_held=tried[1], num_verified=tried[0])
        if num_tried:
            self._calibrate(hints, verdict.num_matched)
            self.acceptance.observe(num_held, num_tried)
        return num_tried, num_held

    def _calibrate(self, hints: list[Hint], num_matched: int) -> None:
        if self.calibration is None:
            return
        records = self.acceptance.chances(len(hints))
        for place, hint in enumerate(hints[: num_matched + 1]):
            if is_remote(hint):
                self.calibration.observe(hint.confidence, records[place], has_held=place < num_matched)

    def _count(self, num_accepted: int, num_draft_tokens: int) -> None:
        stats = self.stats
        stats.num_steps += 1
        if num_draft_tokens == 0:
            return
        stats.num_spec_steps += 1
        stats.num_draft_tokens += num_draft_tokens
        stats.num_accepted_draft_tokens += num_accepted
        _increment(stats.acceptance_histogram, num_accepted)
        _increment(stats.draft_length_histogram, num_draft_tokens)

    def count_outcome(self) -> None:
        """Whether the tree goes on where the last step left off, now that the next one could begin."""
        if not self.has_outcome:
            return
        self.has_outcome = False
        self.stats.num_outcomes += 1
        self.stats.num_predicted_outcomes += self.tree.cursor is not None
        self.stats.num_ready_outcomes += self.tree.primary_child(self.tree.cursor) is not None

    def final_stats(self) -> common_pb2.SpeculationStats:
        add_up_to_limit(self.stats, "num_stale_hints", self.tree.num_stale)
        add_up_to_limit(self.stats, "num_late_hints", self.tree.num_late)
        return self.stats


def add_up_to_limit(stats: common_pb2.SpeculationStats, name: str, amount: int) -> None:
    """Counts what a draft worker decides the size of: there may be more of it than the field can hold."""
    setattr(stats, name, min(getattr(stats, name) + amount, UINT32_MAX))


def _advance(grammar: GrammarState, token_ids: list[int]) -> target_pb2.FinishReason | None:
    """Reads committed tokens; returns why they are the last, when the grammar makes them so."""
    is_read = False
    for _ in range(2):  # guesses may have used up a limit of the parser; the second try has one of its own
        try:
            if not is_read:
                grammar.advance(token_ids)
                is_read = True
            return target_pb2.FINISH_REASON_STOP if grammar.is_complete else None
        except GrammarViolation:
            continue
    return target_pb2.FINISH_REASON_NO_TOKEN  # the target's own tokens were permitted, but there is no way on


def _origins(verdict: Verdict, num_fed_hints: int) -> list[common_pb2.TokenOrigin]:
    if num_fed_hints == 0:
        extra = common_pb2.TOKEN_ORIGIN_PLAIN
    elif verdict.num_accepted == num_fed_hints:
        extra = common_pb2.TOKEN_ORIGIN_BONUS
    else:
        extra = common_pb2.TOKEN_ORIGIN_RECOVERED
    return [common_pb2.TOKEN_ORIGIN_ACCEPTED] * verdict.num_accepted + [extra]


def _increment(histogram: MutableSequence[int], index: int) -> None:
    while len(histogram) <= index:
        histogram.append(0)
    histogram[index] += 1
