"""What the scheduler is told (events) and what it wants done (actions). Pure data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.chunk_cost import Chunk
from outrider.engine.kv_cache import KVSequence
from outrider.engine.text_before import TextBefore
from outrider.engine.verdict import Verdict
from outrider.errors import OutriderError
from outrider.grammar import GrammarState
from outrider.hint_tree import Hint
from outrider.sampling_params import (
    AcceptanceRule,
    DecodingMode,
    SamplingParams,
    SpeculationSettings,
)
from outrider.token_logprobs import TokenLogprobs
from protos.outrider.v1 import common_pb2, target_pb2

StreamId = int


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
    priority: int = 0  # lower goes first, and is preempted last
    deadline_at: float = math.inf  # shell's clock, seconds; what is not complete by then is not wanted
    cache_salt: str = ""  # of the sessions that it shares KV blocks and recent outputs with
    owner: str = ""  # on whose behalf its grammar is compiled


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
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class SessionAborted:
    """After it had been admitted, and before its text was complete."""

    session_id: str
    error: OutriderError


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


Action = (
    SessionAdmitted
    | SessionRefused
    | PromptScored
    | TokensCommitted
    | SessionEnded
    | SessionAborted
    | CommitPublished
)


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

    @property
    def chunk(self) -> Chunk | None:
        """Of its text, where more than one committed token is fed. To be asked before anything is rolled back."""
        num_tokens = len(self.token_ids) - self.num_fed_hints
        return Chunk(self.kv.length - len(self.token_ids), num_tokens) if num_tokens > 1 else None


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
