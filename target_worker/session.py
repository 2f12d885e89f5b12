"""One sequence being generated on this worker, and the only place where its committed tokens grow (I1). Pure."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field

from outrider.engine.kv_cache import KVSequence
from outrider.engine.verification import Verdict
from outrider.hint_tree import HintTree
from outrider.sampling_params import DecodingMode, SamplingParams
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.messages import SpeculationSettings, StartSession, StreamId
from target_worker.speculation import AcceptanceHistory, HintTiming


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What one verdict added to a session."""

    token_ids: list[int]
    origins: list[common_pb2.TokenOrigin]
    num_accepted: int  # hints among the tokens
    reason: target_pb2.FinishReason | None  # set when the session has ended
    stop_token_id: int | None


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
    arrived_at: float  # shell's clock, seconds
    kv: KVSequence
    num_reserved_blocks: int
    tree: HintTree = field(default_factory=HintTree)
    acceptance: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    timing: HintTiming = field(default_factory=HintTiming)
    subscribers: dict[StreamId, int] = field(default_factory=dict)  # stream -> attachment
    stats: common_pb2.SpeculationStats = field(default_factory=common_pb2.SpeculationStats)
    first_step_at: float | None = None
    first_token_at: float | None = None

    @classmethod
    def from_event(
        cls,
        event: StartSession,
        *,
        max_model_len: int,
        end_of_sequence_ids: frozenset[int],
        kv: KVSequence,
        num_reserved_blocks: int,
        now: float,
    ) -> Session:
        sampling = event.sampling
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
            arrived_at=now,
            kv=kv,
            num_reserved_blocks=num_reserved_blocks,
        )

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
    def is_listening(self) -> bool:
        return self.speculation.enabled

    def can_expect_hints(self) -> bool:
        """Whether a draft worker follows the session and is heard."""
        return self.is_listening and bool(self.subscribers)

    def hint_limit(self, num_speculative_tokens: int) -> int:
        """Most hints worth feeding now: the request's and the worker's limit, and the room that is left."""
        if not self.is_listening:
            return 0
        asked = self.speculation.num_speculative_tokens or num_speculative_tokens
        return min(asked, num_speculative_tokens, self.max_len - self.committed_len - 1)

    def forget_the_draft(self, now: float) -> None:
        """A draft worker comes, or comes back: what was learned from an earlier one does not hold for it."""
        self.acceptance = AcceptanceHistory()
        self.timing = HintTiming(lost_at=now, grown_at=now)

    def commit(self, verdict: Verdict, num_fed_hints: int, num_hints: int) -> CommitOutcome:
        """Appends what a step decided, up to a stop token or the length limit, and rolls KV back to it.

        Of `num_hints` that were verified, `num_fed_hints` had been fed to the model.
        """
        if num_hints:
            self.acceptance.observe(verdict.num_matched, num_hints)
        token_ids: list[int] = []
        reason, stop_token_id = None, None
        for token_id in verdict.token_ids:
            if token_id in self.stop_token_ids:
                reason, stop_token_id = target_pb2.FINISH_REASON_STOP, token_id
                break
            token_ids.append(token_id)
            if self.committed_len + len(token_ids) == self.max_len:
                reason = target_pb2.FINISH_REASON_LENGTH
                break
        num_accepted = min(verdict.num_accepted, len(token_ids))
        self._count(num_accepted, num_fed_hints)
        self.token_ids.extend(token_ids)
        self.tree.commit(token_ids)
        self.kv.truncate(min(self.kv.length, self.committed_len - 1))
        origins = _origins(verdict, num_fed_hints)[: len(token_ids)]
        return CommitOutcome(token_ids, origins, num_accepted, reason, stop_token_id)

    def _count(self, num_accepted: int, num_fed_hints: int) -> None:
        stats = self.stats
        stats.num_steps += 1
        if num_fed_hints == 0:
            return
        stats.num_spec_steps += 1
        stats.num_draft_tokens += num_fed_hints
        stats.num_accepted_draft_tokens += num_accepted
        _increment(stats.acceptance_histogram, num_accepted)
        _increment(stats.draft_length_histogram, num_fed_hints)

    def final_stats(self) -> common_pb2.SpeculationStats:
        self.stats.num_stale_hints = self.tree.num_stale
        return self.stats


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
