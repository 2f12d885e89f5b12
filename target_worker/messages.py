"""Events that the scheduler takes, and actions and steps that it returns. Pure data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from outrider.engine.chunk_cost import Chunk
from outrider.engine.kv.kv_cache import KVSequence
from outrider.engine.sampling.logit_context import LogitContext
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.engine.sampling.verdict import Verdict
from outrider.errors import OutriderError
from outrider.grammar import GrammarState
from outrider.hint_service.messages import CloseStream as CloseStream
from outrider.hint_service.messages import CommitPublished as CommitPublished
from outrider.hint_service.messages import HintsArrived as HintsArrived
from outrider.hint_service.messages import StreamId as StreamId
from outrider.hint_service.messages import SubscribeDraft as SubscribeDraft
from outrider.hint_service.messages import UnsubscribeDraft as UnsubscribeDraft
from outrider.hints.confidence import Calibration
from outrider.hints.hint_tree import Branch, Hint
from outrider.sampling_params import (
    BACKGROUND_PRIORITY,
    AcceptanceRule,
    DecodingMode,
    Exactness,
    SamplingParams,
    SpeculationSettings,
)
from protos.outrider.v1 import common_pb2, target_pb2
from target_worker.objectives import NO_AIM, Aim


@dataclass(frozen=True, slots=True)
class StartSession:
    """A request to generate one sequence. `token_ids` is the prompt, followed by what is already committed."""

    session_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationSettings
    seed: int  # for every random number of the session
    grammar: GrammarState | None = None  # in its initial state; the session owns it from here on
    priority: int = 0  # lower is served first and preempted last
    deadline_at: float = math.inf  # shell's clock, seconds; a result after it is not wanted
    cache_salt: str = ""  # of the sessions it shares KV blocks and recent outputs with
    owner: str = ""  # the tenant that its grammar is compiled for; `aim` has it for everything else
    prediction: Sequence[int] = ()  # token ids that the client expects as output
    aim: Aim = NO_AIM  # its service-level objective

    @property
    def is_background(self) -> bool:
        """Whether it runs for no waiting client."""
        return self.priority >= BACKGROUND_PRIORITY


@dataclass(frozen=True, slots=True)
class CancelSession:
    """The caller no longer wants the sequence."""

    session_id: str


@dataclass(frozen=True, slots=True)
class ChangeSpeculation:
    """The caller changes a session's speculation settings."""

    session_id: str
    speculation: SpeculationSettings


Event = (
    StartSession | CancelSession | ChangeSpeculation | SubscribeDraft | UnsubscribeDraft | CloseStream | HintsArrived
)


@dataclass(frozen=True, slots=True)
class SessionAdmitted:
    """The session has a slot or waits for one."""

    session_id: str
    decoding_mode: DecodingMode
    exactness: Exactness | None = None  # None: follows from the decoding mode


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The session was not admitted."""

    session_id: str
    error: OutriderError


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the prompt tokens from `first_position` on."""

    session_id: str
    first_position: int
    logprobs: list[TokenLogprobs]


class SourceCount(NamedTuple):
    """Hints of one source that a step fed, and how many of them are in the output."""

    source: common_pb2.HintSource
    num_verified: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class TokensCommitted:
    """One step's result for a session: the committed tokens, and how many hints were verified and accepted."""

    session_id: str
    token_ids: list[int]
    origins: list[common_pb2.TokenOrigin]
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    step_ms: float
    logprobs: list[TokenLogprobs] | None = None  # one per token, where requested
    _: KW_ONLY
    num_prediction_tokens: int = 0  # verified hints of the client's prediction
    num_accepted_prediction_tokens: int = 0
    num_branches: int = 0  # of num_draft_tokens, those beside the path
    num_accepted_branches: int = 0
    sources: Sequence[SourceCount] = ()  # of the hints, in their order
    is_resting: bool = False  # as on the wire: hints are wanted but not accepted at present

    @property
    def hint_source(self) -> int:
        """Source of the first hint, a value of HintSource; 0 without any."""
        return self.sources[0].source if self.sources else common_pb2.HINT_SOURCE_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The output is complete."""

    session_id: str
    reason: target_pb2.FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was in the cache already
    stats: common_pb2.SpeculationStats
    queue_ms: float
    prefill_ms: float
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SessionAborted:
    """An admitted session has ended before its output was complete."""

    session_id: str
    error: OutriderError


Action = (
    SessionAdmitted | SessionRefused | PromptScored | TokensCommitted | SessionEnded | SessionAborted | CommitPublished
)


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step: `token_ids` are fed, and the last `num_logits` of them yield logits.

    The last `num_decided` rows of logits decide tokens and verify `hints` and then `branches`: `num_decided - 1` of
    them were fed, and one more of `hints` may follow for the last position. A prefill chunk that is not the last
    decides nothing. Where the prompt's own log probabilities are requested, the first rows belong to `prompt_targets`.
    """

    session_id: str
    kv: KVSequence
    token_ids: Sequence[int]
    num_logits: int
    num_decided: int
    hints: list[Hint]
    context: LogitContext
    sampling: SamplingParams
    seed: int
    acceptance_rule: AcceptanceRule = AcceptanceRule.BLOCK
    prompt_targets: Sequence[int] = ()
    branches: Sequence[Branch] = ()

    @property
    def num_fed_hints(self) -> int:
        """Those of the path and its branches."""
        return max(self.num_decided - 1, 0)

    @property
    def num_fed_on_path(self) -> int:
        return self.num_fed_hints - len(self.branches)

    def seen_entries(self, branch: Branch) -> list[int]:
        """KV entries between the committed tokens and a branch, its own included. Valid only before the KV is rolled
        back."""
        first = self.kv.length - self.num_fed_hints
        return [*range(first, first + branch.on_path), *self.branch_entries(branch.trail)]

    def branch_entries(self, trail: Sequence[int]) -> list[int]:
        """KV entries of branches. Valid as above."""
        first = self.kv.length - len(self.branches)
        return [first + branch for branch in trail]

    def moved_entries(self, verdict: Verdict) -> tuple[list[int], list[int]]:
        """KV entries of the accepted branches, and where they belong among the committed tokens. Valid as above."""
        first = self.kv.length - self.num_fed_hints + verdict.num_accepted
        return self.branch_entries(verdict.trail), [*range(first, first + len(verdict.trail))]

    @property
    def chunk(self) -> Chunk | None:
        """The prompt chunk that is fed; None for a single committed token. Valid only before the KV is rolled back."""
        num_tokens = len(self.token_ids) - self.num_fed_hints
        return Chunk(self.kv.length - len(self.token_ids), num_tokens) if num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Step:
    """The sessions of one forward pass."""

    items: list[StepItem]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def num_context(self) -> int:
        """Tokens in the KV that the step reads, its own included."""
        return sum(item.kv.length for item in self.items)

    @property
    def num_reread(self) -> int:
        """Those of them that branches read once more, each on its own."""
        return sum(len(item.branches) * (item.kv.length - item.num_fed_hints) for item in self.items if item.branches)

    @property
    def only_decodes(self) -> bool:
        """Whether every session feeds one committed token, and perhaps hints."""
        return all(len(item.token_ids) == item.num_decided for item in self.items)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one forward pass."""

    verdicts: list[Verdict | None]  # one per item; None where nothing is decided
    step_ms: float
    prompt_logprobs: list[list[TokenLogprobs]] | None = None  # one list per item, for its prompt_targets


@dataclass(frozen=True, slots=True)
class HeadItem:
    """One session's part in a turn of a draft head: the head runs the committed tokens [start, end), each on the
    target's state of the token before it, and where `context` is set drafts what follows."""

    session_id: str
    token_ids: Sequence[int]  # all that are committed
    start: int
    end: int
    kv: KVSequence | None  # of the head, with the entries before `start`; None for a head without attention
    target_kv: KVSequence
    context: LogitContext | None
    sampling: SamplingParams
    seed: int
    records: Sequence[float] = ()  # acceptance of its hints so far, by position; as many as it may draft
    calibration: Calibration | None = None  # of the head's confidence; None: the records alone count

    def chance(self, position: int, level: int) -> float:
        """Probability that a hint is accepted, given those before it; level: the head's confidence in it."""
        record = self.records[position]
        return record if self.calibration is None else self.calibration.chance(level, record)


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """The work of a draft head before the next step."""

    items: list[HeadItem]
    pass_worth: float = 0.0  # tokens that a further pass must promise in all
    row_worth: float = 0.0  # tokens that each of its rows must promise beside that


class Drafted(NamedTuple):
    """Tokens drafted for an item, and the confidence level of each (`confidence.confidence_level`)."""

    token_ids: list[int]
    levels: list[int]


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The result of a turn."""

    drafts: list[Drafted]  # one per item; empty where it does not draft
    passes: list[tuple[int, float]]  # rows and milliseconds of each forward pass


@dataclass(frozen=True, slots=True)
class WaitForHints:
    """Tells the shell to run nothing before `until` (its clock, seconds) unless an event arrives."""

    until: float
