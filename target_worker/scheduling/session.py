"""One sequence being generated on this worker, and the only place where its committed tokens grow (I1). Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.kv.prefix_cache import SequenceBlocks
from outrider.engine.sampling.logit_context import LogitContext, TokenCounts
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.verdict import Verdict
from outrider.errors import InvalidRequest
from outrider.grammar import GrammarState
from outrider.hints.acceptance import BlockAcceptance
from outrider.hints.confidence import Calibration
from outrider.hints.hint_intake import SessionIntake
from outrider.hints.hint_tree import Branch, Hint, HintTree
from outrider.hints.speculation import HintTiming
from outrider.hints.step_cost import StepLine
from outrider.sampling_params import BACKGROUND_PRIORITY, DecodingMode, SamplingParams, SpeculationSettings
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.hints.branches import RowPrices, observe_alternatives
from target_worker.hints.choices import CERTAIN_MATCH, new_presence, observe_presence
from target_worker.hints.head_hints import HeadHints
from target_worker.hints.hint_path import HintPath, HintSources, calibrate, choose_path, is_remote
from target_worker.hints.local_source import LocalSource
from target_worker.hints.memory import MemoryHints
from target_worker.hints.subscribers import Subscriber, commits_for
from target_worker.limits import SchedulerLimits
from target_worker.messages import (
    Action,
    PromptScored,
    StartSession,
    StepItem,
    StreamId,
    SubscribeDraft,
)
from target_worker.objectives import NO_AIM, Aim
from target_worker.scheduling.output_grammar import (
    advance,
    cost_refusal,
    is_complete,
    is_forced_next,
    read_committed,
    up_to_completion,
)
from target_worker.scheduling.session_statistics import (
    CommitOutcome,
    add_up_to_limit,
    count_outcome,
    count_sources,
    count_step,
    counts_by_source,
    counts_of_draft,
    num_accepted_branches,
    origins_of,
)

NO_PATH = HintPath([], 0)


@dataclass(slots=True, eq=False)
class Session:
    """One sequence on a target worker, with everything known about it.

    `token_ids[:num_prompt_tokens]` is the prompt; all of `token_ids` is committed. KV entries `[0, kv.length)` belong
    to `token_ids[:kv.length]`; between steps `kv.length < len(token_ids)`.
    """

    session_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_given_tokens: int  # prompt and what was committed elsewhere
    max_len: int  # token_ids never grows beyond it, tokens
    sampling: SamplingParams
    speculation: SpeculationSettings
    seed: int
    stop_token_ids: frozenset[int]
    end_token_ids: frozenset[int]  # excluded by min_tokens
    grammar: GrammarState | None  # has consumed all output
    arrived_at: float  # shell's clock, seconds
    blocks: SequenceBlocks
    rank: tuple[int, int] = (0, 0)  # priority, then order of arrival; lower goes first
    deadline_at: float = math.inf  # shell's clock, seconds
    aim: Aim = NO_AIM
    calibration: Calibration | None = None  # shared by its decoding mode; None under rejection (I4)
    of_branches: Calibration | None = None  # the same for hints beside the path; None: none are verified
    tree: HintTree = field(default_factory=HintTree)
    acceptance: BlockAcceptance = field(default_factory=BlockAcceptance)
    presence: BlockAcceptance = field(default_factory=new_presence)  # of drawn hints
    timing: HintTiming = field(default_factory=HintTiming)
    local: Sequence[LocalSource] = ()
    head: HeadHints | None = None  # one of `local`
    memory: MemoryHints | None = None  # one of them, once a memory worker has sent hints
    path: HintPath = NO_PATH  # used to compose the last step
    intake: SessionIntake = field(default_factory=SessionIntake)
    needs_hints: bool = False  # to keep its objective, which plain steps would cost it
    subscribers: dict[StreamId, Subscriber] = field(default_factory=dict)
    stats: common_pb2.SpeculationStats = field(default_factory=common_pb2.SpeculationStats)
    first_step_at: float | None = None
    first_token_at: float | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV was in the cache already
    num_scored: int = 1  # prompt tokens whose log probabilities were sent; the first has none
    num_preemptions: int = 0
    counts: dict[int, TokenCounts] = field(default_factory=dict)  # of `token_ids` (`LogitContext.counts`)
    has_outcome: bool = False  # of a step with hints, not counted yet

    @classmethod
    def from_event(
        cls,
        event: StartSession,
        limits: SchedulerLimits,
        *,
        kv: KVSequence,
        number: int,
        local: Sequence[LocalSource],
        head: HeadHints | None,
        calibration: Calibration | None,
        of_branches: Calibration | None,
        now: float,
    ) -> Session:
        sampling = event.sampling
        end_token_ids = sampling.stop_token_ids | limits.end_of_sequence_ids
        if event.grammar is not None:
            # What the caller's side has not fed to it.
            num_read = event.num_prompt_tokens + event.grammar.num_committed
            read_committed(event.grammar, event.token_ids[num_read:])
        return cls(
            session_id=event.session_id,
            token_ids=list(event.token_ids),
            num_prompt_tokens=event.num_prompt_tokens,
            num_given_tokens=len(event.token_ids),
            max_len=min(event.num_prompt_tokens + sampling.max_tokens, limits.max_model_len),
            sampling=sampling,
            speculation=event.speculation,
            seed=event.seed,
            stop_token_ids=sampling.stop_token_ids if sampling.ignore_eos else end_token_ids,
            end_token_ids=end_token_ids,
            grammar=event.grammar,
            arrived_at=now,
            blocks=SequenceBlocks(kv, event.cache_salt),
            rank=(event.priority, number),
            deadline_at=event.deadline_at,
            aim=event.aim,
            calibration=calibration,
            of_branches=of_branches,
            local=local,
            head=head,
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
    def owner(self) -> str:
        """The tenant, or a digest of it."""
        return self.aim.owner

    @property
    def priority(self) -> int:
        return self.rank[0]

    @property
    def may_be_passed(self) -> bool:
        """Whether shorter prompts of its owner may go before its own: nobody waits for its next token, or for its
        first by some time."""
        return self.first_token_at is None and math.isinf(self.aim.objective.ttft_ms)

    @property
    def is_background(self) -> bool:
        """Whether it runs for no waiting client."""
        return self.priority >= BACKGROUND_PRIORITY

    @property
    def wants_hints(self) -> bool:
        """Whether the request wants hints of a draft worker."""
        return self.speculation.enabled and not self.speculation.is_plain

    @property
    def accepts_hints(self) -> bool:
        """Whether the session wants hints and is not paused."""
        return self.wants_hints and not self.intake.is_paused

    def hint_path(self, limits: SchedulerLimits, line: StepLine | None = None, num_sessions: int = 1) -> HintPath:
        """Chooses the hints to verify next, one more than may be fed. line: cost of a step; None: no branches."""
        if not self._has_hint_source():
            self.path = NO_PATH
            return self.path
        tree = self.tree if self.accepts_hints else None
        limit = self.hint_limit(limits.num_speculative_tokens)
        chances = self.acceptance.chances(limit + 1) if tree is not None else []
        if self.calibration is None:
            chances = [*map(operator.mul, chances, self.presence.chances(len(chances)))]
        sources = HintSources(tree, chances, self.local, self.grammar, self.calibration)
        if line is not None and self.of_branches is not None:
            prices = RowPrices.at(line, num_sessions, self.committed_len)
            sources = replace(sources, of_branches=self.of_branches, prices=prices)
        max_local = self.hint_limit(limits.num_local_tokens_max)
        self.path = choose_path(sources, self.token_ids, self.stop_token_ids, limit, max_local)
        if self.speculation.is_always:
            self.path = replace(self.path, is_always=True)
        return self.path

    def logit_context(self, hints: list[Hint], num_rows: int, branches: Sequence[Branch] = ()) -> LogitContext:
        """Returns the tokens before each of `num_rows` positions: `hints[i]` at the i-th, the last behind branches."""
        hinted_ids = [hint.token_id for hint in hints]
        continuations = [hinted_ids[:row] for row in range(num_rows - len(branches))]
        for branch in branches:
            own = [branches[each].hint.token_id for each in branch.trail]
            continuations.append([*hinted_ids[: branch.on_path], *own])
        return LogitContext(
            *(self.token_ids, self.num_prompt_tokens, continuations, self.end_token_ids, self.grammar), self.counts
        )

    def is_output_complete(self) -> bool:
        """Whether the grammar permits nothing after the current output. Raises InvalidRequest if it is out of time."""
        return self.grammar is not None and is_complete(self.grammar)

    def cost_refusal(self, reason: target_pb2.FinishReason | None) -> InvalidRequest | None:
        """Why the session must end: its grammar delays the batch longer than one sequence may. None if it does not."""
        return None if self.grammar is None else cost_refusal(self.grammar, reason)

    def has_certain_hints(self) -> bool:
        """Whether the next tokens are known without a draft worker, so that none is waited for."""
        if self.speculation.is_plain:
            return False
        if any(each.propose(self.token_ids, [], 1).match_len >= CERTAIN_MATCH for each in self.local):
            return True
        return self.grammar is not None and is_forced_next(self.grammar)

    def prompt_targets(self, start: int, num_tokens: int) -> list[int]:
        """Prompt tokens that the rows of tokens [start, start + num_tokens) score; [] if all were sent."""
        end = min(start + num_tokens + 1, self.num_prompt_tokens)
        if self.sampling.num_prompt_logprobs is None or end <= self.num_scored:
            return []
        return self.token_ids[start + 1 : end]

    @property
    def has_prompt_to_score(self) -> bool:
        """Whether requested log probabilities of the prompt remain to be sent."""
        return self.sampling.num_prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens

    def score(self, first: int, logprobs: list[TokenLogprobs]) -> list[Action]:
        """Takes log probabilities of the prompt tokens from `first` on; those sent before a preemption are left out."""
        num_told = max(self.num_scored - first, 0)
        self.num_scored = first + len(logprobs)
        return [PromptScored(self.session_id, first + num_told, logprobs[num_told:])]

    def preempt(self) -> None:
        """Returns its KV blocks. Its tokens and statistics stay, and its KV is recomputed later."""
        self.blocks.release()
        if self.head is not None:
            self.head.forget()
        self.path = NO_PATH
        self.num_preemptions += 1

    @property
    def is_drafted(self) -> bool:
        """Whether a draft worker follows it."""
        return not all(each.is_memory for each in self.subscribers.values())

    def can_expect_hints(self) -> bool:
        """Whether a draft worker follows the session and its hints are accepted."""
        return self.accepts_hints and self.is_drafted

    def hint_limit(self, num_speculative_tokens: int) -> int:
        """Most hints worth feeding now, by the limits of the request and the worker and the remaining length."""
        if not self._has_hint_source() or (self.grammar is not None and not self.grammar.affords_hints):
            return 0
        asked = self.speculation.num_speculative_tokens or num_speculative_tokens
        return min(asked, num_speculative_tokens, self.max_len - self.committed_len - 1)

    def _has_hint_source(self) -> bool:
        if self.speculation.is_plain:
            return False
        return self.accepts_hints or self.grammar is not None or bool(self.local)

    def reset_draft_statistics(self, now: float, usual: HintTiming) -> None:
        """Resets what was learned from an earlier draft worker; it does not apply to the new one."""
        self.acceptance, self.presence = BlockAcceptance(), new_presence()
        self.timing = usual.fresh(now)

    def subscribe(self, event: SubscribeDraft) -> list[Action]:
        """Adds a worker's stream; returns the messages that bring it up to date."""
        known_len = min(event.known_len, self.committed_len)
        subscriber = Subscriber(known_len, False, event.num_features, event.is_memory)
        self.subscribers[event.stream_id] = subscriber
        return [*commits_for(self, event.stream_id, subscriber)]

    def publish(self, *, is_finished: bool = False, num_verified: int = 0, num_matched: int = 0) -> list[Action]:
        """Returns the messages due to its subscribers. A paused one gets none until that changes."""
        accepts_hints = self.accepts_hints
        outcomes = {False: (num_verified, num_matched), True: (0, 0)}  # by whether it is a memory worker's
        if self.memory is not None:
            outcomes[True] = self.memory.take_outcome()
        return [
            commit
            for stream_id, subscriber in self.subscribers.items()
            if accepts_hints or is_finished or not subscriber.is_paused
            for commit in commits_for(
                self, stream_id, subscriber, outcomes[subscriber.is_memory], is_finished=is_finished
            )
        ]

    def commit(self, verdict: Verdict, item: StepItem) -> CommitOutcome:
        """Appends a verdict's tokens up to a stop token, the grammar's end or the length limit; rolls the KV back."""
        if not verdict.token_ids:
            self.kv.truncate(min(self.kv.length, self.committed_len - 1))
            return CommitOutcome([], [], 0, 0, 0, 0, 0, (), 0, 0, None, target_pb2.FINISH_REASON_NO_TOKEN, None)
        num_verified, num_matched = self._learn(verdict, item)
        token_ids: list[int] = []
        permitted = verdict.token_ids
        if self.grammar is not None:
            permitted = up_to_completion(self.grammar, permitted, self.end_token_ids)
        reason, stop_token_id = None, None
        for token_id in permitted:
            if token_id in self.stop_token_ids:
                reason, stop_token_id = target_pb2.FINISH_REASON_STOP, token_id
                break
            token_ids.append(token_id)
            if self.committed_len + len(token_ids) == self.max_len:
                reason = target_pb2.FINISH_REASON_LENGTH
                break
        counts = counts_by_source(item, verdict, len(token_ids))
        num_draft_tokens, num_accepted = counts_of_draft(counts)
        predicted = count_sources(self.stats, item.hints, verdict, len(token_ids))
        count_step(self.stats, num_accepted, num_draft_tokens)
        if self.grammar is not None and stop_token_id is None:
            reason = advance(self.grammar, token_ids) or reason
        self.token_ids.extend(token_ids)
        self.tree.commit(token_ids)
        self.has_outcome = num_verified > 0 and reason is None
        self.kv.truncate(min(self.kv.length, self.committed_len - 1))
        origins = origins_of(verdict, item)[: len(token_ids)]
        logprobs = None if verdict.logprobs is None else verdict.logprobs[: len(token_ids)]
        return CommitOutcome(
            token_ids,
            origins,
            num_draft_tokens,
            num_accepted,
            num_accepted_branches(verdict, len(token_ids)),
            *predicted,
            counts,
            num_verified,
            num_matched,
            logprobs,
            reason,
            stop_token_id,
        )

    def _learn(self, verdict: Verdict, item: StepItem) -> tuple[int, int]:
        """Updates acceptance statistics; returns (verified, accepted) counts of a draft worker's hints on the path."""
        hints = item.hints
        if not hints:  # the usual step of a session without a draft, where every microsecond is one between steps
            return 0, 0
        num_verified = sum(map(is_remote, hints))
        num_matched = sum(map(is_remote, hints[: verdict.num_matched]))
        self.path.observe_local(len(hints), verdict.num_matched)
        if num_verified:
            if self.calibration is not None:
                calibrate(self.calibration, hints, verdict.num_matched, self.acceptance.chances(len(hints)))
            else:
                observe_presence(self.presence, num_matched, num_verified, was_all=self.path.is_all(num_verified))
            self.acceptance.observe(num_matched, num_verified)
        if self.of_branches is not None and self.grammar is None:
            observe_alternatives(self.of_branches, self.tree, verdict.token_ids)
        return num_verified, num_matched

    def count_outcome(self) -> None:
        """Counts the outcome of the last step, if it had hints; must be called when the next one could begin."""
        if self.has_outcome:
            self.has_outcome = False
            count_outcome(self.stats, self.tree)

    def final_stats(self) -> common_pb2.SpeculationStats:
        """The session's counts, with those of its hint tree."""
        add_up_to_limit(self.stats, "num_stale_hints", self.tree.num_stale)
        add_up_to_limit(self.stats, "num_late_hints", self.tree.num_late)
        return self.stats
