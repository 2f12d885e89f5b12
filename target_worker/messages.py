"""What the scheduler is told (events) and what it wants done (actions). Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.kv_cache import KVSequence
from outrider.engine.logit_processing import TextBefore
from outrider.engine.verification import Verdict
from outrider.errors import ConfigurationError, OutriderError
from outrider.grammar import GrammarState
from outrider.hint_tree import Hint
from outrider.sampling_params import (
    MAX_SPECULATIVE_TOKENS,
    AcceptanceRule,
    DecodingMode,
    SamplingParams,
    SpeculationSettings,
)
from outrider.token_logprobs import TokenLogprobs
from protos.outrider.v1 import common_pb2, target_pb2

StreamId = int
MAX_BATCHED_TOKENS = 512  # rows for which `engine.linear` tries its forms


# Events.


@dataclass(frozen=True, slots=True)
class StartSession:
    session_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationSettings
    seed: int  # of every random number of the session
    grammar: GrammarState | None = None  # at its beginning; the session's own from here on


@dataclass(frozen=True, slots=True)
class CancelSession:
    session_id: str


@dataclass(frozen=True, slots=True)
class ChangeSpeculation:
    session_id: str
    speculation: SpeculationSettings


@dataclass(frozen=True, slots=True)
class SubscribeDraft:
    stream_id: StreamId
    session_id: str
    attachment: int
    known_len: int


@dataclass(frozen=True, slots=True)
class UnsubscribeDraft:
    stream_id: StreamId
    session_id: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    stream_id: StreamId


@dataclass(frozen=True, slots=True)
class HintsArrived:
    session_id: str
    attachment: int
    base_len: int
    hints: list[Hint]
    arrived_at: float  # shell's clock, seconds; the event may be handled a whole step later
    num_bytes: int = 0  # of the message that brought them


Event = (
    StartSession
    | CancelSession
    | ChangeSpeculation
    | SubscribeDraft
    | UnsubscribeDraft
    | CloseStream
    | HintsArrived
)


# Actions.


@dataclass(frozen=True, slots=True)
class SessionAdmitted:
    session_id: str
    decoding_mode: DecodingMode


@dataclass(frozen=True, slots=True)
class SessionRefused:
    session_id: str
    error: OutriderError


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Of the prompt tokens at `first_position` and after."""

    session_id: str
    first_position: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class TokensCommitted:
    session_id: str
    token_ids: list[int]
    origins: list[common_pb2.TokenOrigin]
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    step_ms: float
    logprobs: list[TokenLogprobs] | None = None  # one per token, where asked for
    is_resting: bool = False  # draft workers may be listened to, and are not at present


@dataclass(frozen=True, slots=True)
class SessionEnded:
    session_id: str
    reason: target_pb2.FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # of the prompt, whose KV was there already
    stats: common_pb2.SpeculationStats
    queue_ms: float
    prefill_ms: float


@dataclass(frozen=True, slots=True)
class CommitPublished:
    """For one draft worker's stream."""

    stream_id: StreamId
    session_id: str
    from_len: int
    token_ids: list[int]
    is_listening: bool
    is_finished: bool
    num_tried: int = 0  # the draft worker's hints that were verified for these tokens
    num_held: int = 0  # of these, the leading ones that held


Action = SessionAdmitted | SessionRefused | PromptScored | TokensCommitted | SessionEnded | CommitPublished


# One step.


@dataclass(frozen=True, slots=True)
class StepItem:
    """One session's part in a step: `token_ids` are fed, the last `num_logits` of them are asked for logits.

    The last `num_decided` rows of logits decide tokens, and `hints` are verified by them: `num_decided - 1` were fed,
    one more may follow for the last position. A prefill chunk that is not the last decides nothing. The first rows,
    where the prompt's own log probabilities are wanted, are those of `prompt_targets`.
    """

    session_id: str
    kv: KVSequence
    token_ids: Sequence[int]
    num_logits: int
    num_decided: int
    hints: list[Hint]
    text: TextBefore
    sampling: SamplingParams
    seed: int
    acceptance_rule: AcceptanceRule = AcceptanceRule.BLOCK
    prompt_targets: Sequence[int] = ()

    @property
    def num_fed_hints(self) -> int:
        return max(self.num_decided - 1, 0)


@dataclass(frozen=True, slots=True)
class Step:
    items: list[StepItem]

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def num_context(self) -> int:
        """Tokens in the KV that the step reads, its own included."""
        return sum(item.kv.length for item in self.items)

    @property
    def only_decodes(self) -> bool:
        """Whether every session feeds one committed token, and perhaps hints."""
        return all(len(item.token_ids) == item.num_decided for item in self.items)


@dataclass(frozen=True, slots=True)
class StepResult:
    verdicts: list[Verdict | None]  # one per item; None where nothing was to be decided
    step_ms: float
    prompt_logprobs: list[list[TokenLogprobs]] | None = None  # one list per item, for its prompt_targets


@dataclass(frozen=True, slots=True)
class WaitForHints:
    """Run nothing before `until` (the shell's clock, seconds), unless an event changes the picture."""

    until: float


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one target worker (I7)."""

    max_num_seqs: int = 32  # sessions that run at once
    max_num_waiting: int = 64  # sessions that wait for a place
    max_num_batched_tokens: int = 512  # fed in one step
    max_model_len: int = 1024  # prompt plus output, tokens
    # Hints fed per session and step; with the last token nine rows, a tile of the compiled products (`decode.cpp`).
    num_speculative_tokens: int = 8
    hint_wait_ms_max: float = 10.0
    wait_for_num_hints: int | None = None  # hints that a step waits for; None: as many as measurements say
    has_lookup: bool = True  # of hints in a session's own text, and in
    max_lookup_tokens: int = 0  # so many tokens of ended sessions' outputs
    may_rest: bool = True  # sessions that lose time by listening to their draft worker stop for a while
    max_early_sessions: int = 256  # that draft workers speak of before the coordinator does
    max_early_events: int = 128  # kept for each of them
    max_early_hints: int = 512  # in these events
    early_s: float = 5.0  # seconds that they are kept
    end_of_sequence_ids: frozenset[int] = field(default_factory=frozenset)
    enable_prefix_caching: bool = True  # prompts that begin alike share KV blocks

    def __post_init__(self) -> None:
        """Raises ConfigurationError, naming the flag."""
        if self.max_lookup_tokens < 0:
            raise ConfigurationError(
                f"--max-lookup-tokens is {self.max_lookup_tokens}; permitted: 0 and more"
            )
        if self.max_num_seqs < 1 or self.max_num_waiting < 1:
            raise ConfigurationError("--max-num-seqs and --max-num-waiting must be at least 1")
        if not self.max_num_seqs < self.max_num_batched_tokens <= MAX_BATCHED_TOKENS:
            raise ConfigurationError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; permitted: above --max-num-seqs "
                f"({self.max_num_seqs}), so that prompts get on, to {MAX_BATCHED_TOKENS}, as far as batch invariance "
                "is proven"
            )
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigurationError(
                f"--num-speculative-tokens is {self.num_speculative_tokens}; permitted: 0 to {MAX_SPECULATIVE_TOKENS}"
            )
