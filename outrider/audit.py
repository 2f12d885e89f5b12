"""Judges whether speculation changed an output, by comparing runs of one request. Pure.

The promise under audit: greedy and seeded output is a function of model, prompt, parameters and seed, so a run that
verified hints generates the same tokens as a plain one. Where two runs first differ, plain decoding is repeated at the
same prefix. If it generates the same token as before, speculation changed the output. If not, the engine itself is not
reproducible and the difference proves nothing about speculation.

Vocabulary: the *plain* run is the reference, without speculation; *speculated* runs are compared with it; a *replay* is
a further plain run to the position of the first difference. Positions count output tokens from 0; log probabilities and
margins are natural logarithms (nats).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

RULED_OUT: Final = -9999.0
"""The API's log probability of a token that cannot be generated."""

ROUNDING_NATS: Final = 0.25
"""Below this a greedy margin may be rounding: bfloat16 numbers from 16 to 32, as logits are, lie 0.125 apart."""

EXIT_UNPROVEN: Final = 4
"""Exit status where speculation was required and no hint was ever verified."""


class Verdict(StrEnum):
    """Result of the audit of one request, or of one run of it."""

    IDENTICAL = "identical"
    DIVERGED = "diverged"  # speculation generated another token where plain decoding is reproducible
    UNSTABLE = "unstable"  # plain decoding is not reproducible
    FAILED = "failed"  # a request got no usable answer
    INEXACT = "inexact"  # a difference that the engine permits, which promises only the distribution


# Worst first, with the exit status.
_EXIT_CODES: Final[Mapping[Verdict, int]] = {
    Verdict.DIVERGED: 1, Verdict.UNSTABLE: 3, Verdict.FAILED: 2, Verdict.INEXACT: 0, Verdict.IDENTICAL: 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The distribution at one position, as far as the server shows it."""

    token_id: int  # the token generated there
    logprobs: Mapping[int, float]  # by token id: the likeliest ones and the generated one

    @property
    def ranked(self) -> list[tuple[int, float]]:
        """(token id, log probability), likeliest first, without tokens that cannot be generated."""
        possible = [(token_id, logprob) for token_id, logprob in self.logprobs.items() if logprob > RULED_OUT]
        return sorted(possible, key=lambda item: -item[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class HintCounts:
    """Counters of speculation over one or several runs."""

    num_draft_tokens: int = 0  # hints verified
    num_accepted_draft_tokens: int = 0
    num_spec_steps: int = 0  # steps that verified at least one

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Share of verified hints that were accepted; None where none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per step that verified hints; None where there was none."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else None

    @classmethod
    def total(cls, parts: Iterable[HintCounts]) -> HintCounts:
        every = list(parts)
        return cls(
            num_draft_tokens=sum(part.num_draft_tokens for part in every),
            num_accepted_draft_tokens=sum(part.num_accepted_draft_tokens for part in every),
            num_spec_steps=sum(part.num_spec_steps for part in every),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer to a request."""

    token_ids: tuple[int, ...]  # output tokens
    finish_reason: str | None = None
    content: str = ""  # text as the client reads it, in a chat with its tool calls
    prompt_token_ids: tuple[int, ...] = ()
    decoding_mode: str = ""  # greedy, coupled or rejection
    exactness: str = ""  # what the engine promises: tokens or distribution; empty: an earlier release, tokens
    hints: HintCounts = field(default_factory=HintCounts)
    num_forced_tokens: int = 0  # fed ahead because a grammar permitted nothing else
    weights: tuple[TokenWeights, ...] = ()  # of the last `len(weights)` output tokens

    @property
    def is_exact(self) -> bool:
        """Whether the engine promises the same tokens with speculation as without."""
        return self.exactness != "distribution"

    def token_at(self, position: int) -> int | None:
        """The output token at a position; None where the output had ended."""
        return self.token_ids[position] if position < len(self.token_ids) else None

    def weights_at(self, position: int) -> TokenWeights | None:
        """The distribution at a position; None where the server showed none."""
        index = position - (len(self.token_ids) - len(self.weights))
        return self.weights[index] if 0 <= index < len(self.weights) else None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two runs. Both tokens are None when only the text or the finish reason differs."""

    position: int
    plain_token_id: int | None  # None: the plain run had ended
    speculated_token_id: int | None  # None: the speculated run had ended


@dataclass(frozen=True, slots=True)
class Margin:
    """How much likelier plain decoding's token is than the speculated one, at the position of a divergence."""

    plain_logprob: float
    speculated_logprob: float  # an upper bound where `is_bound`
    is_bound: bool  # the speculated token is not among those that the server shows

    @property
    def nats(self) -> float:
        """The difference in nats: a lower bound where `is_bound`; negative when the speculated token is likelier."""
        return self.plain_logprob - self.speculated_logprob

    @property
    def is_ruled_out(self) -> bool:
        """Whether the parameters forbid the token that speculation generated."""
        return self.speculated_logprob <= RULED_OUT


def compare(plain: Run, speculated: Run) -> Divergence | None:
    """Returns the first difference; None when a client could not tell the two answers apart."""
    shorter = min(len(plain.token_ids), len(speculated.token_ids))
    for position in range(shorter):
        if plain.token_ids[position] != speculated.token_ids[position]:
            return Divergence(position, plain.token_ids[position], speculated.token_ids[position])
    is_same_end = (len(plain.token_ids), plain.finish_reason, plain.content) == (
        len(speculated.token_ids), speculated.finish_reason, speculated.content,
    )  # fmt: skip
    if is_same_end:
        return None
    return Divergence(shorter, plain.token_at(shorter), speculated.token_at(shorter))


def is_reproduced(plain: Run, divergence: Divergence, replay: Run) -> bool:
    """Whether the replay agrees with the plain run up to and including the position of the divergence.

    Where the plain run had ended, the end must be the same; the replay then covers the whole request.
    """
    if divergence.plain_token_id is None:
        return compare(plain, replay) is None
    end = divergence.position + 1
    return replay.token_ids[:end] == plain.token_ids[:end]


def judge(plain: Run, divergence: Divergence | None, replays: Sequence[Run]) -> Verdict:
    """Returns the verdict on one speculated run. A divergence needs at least one replay. One that disagrees clears
    speculation, because the reference is not reproducible."""
    if divergence is None:
        return Verdict.IDENTICAL
    assert replays, "a divergence is judged by a replay"
    if all(is_reproduced(plain, divergence, replay) for replay in replays):
        return Verdict.DIVERGED
    return Verdict.UNSTABLE


def weigh(verdict: Verdict, plain: Run, found: Margin | None) -> Verdict:
    """The verdict on a difference of an engine that promises the distribution only: between tokens that are nearly
    equally likely it is permitted. `found` is None where the margin is unknown: then only plain decoding that
    contradicts itself, of which speculation had no part, is permitted."""
    if plain.is_exact or verdict not in (Verdict.DIVERGED, Verdict.UNSTABLE):
        return verdict
    if found is None:
        is_permitted = verdict is Verdict.UNSTABLE
    else:
        is_permitted = not found.is_ruled_out and abs(found.nats) < ROUNDING_NATS
    return Verdict.INEXACT if is_permitted else verdict


def margin(divergence: Divergence, weights: TokenWeights | None) -> Margin | None:
    """Margin between the two tokens by a replay's distribution; None where it does not show them.

    Where the plain run had ended, `weights` belong to a replay that went on, so its token is the one that ends the
    output.
    """
    speculated = divergence.speculated_token_id
    if weights is None or speculated is None:
        return None
    plain = weights.token_id if divergence.plain_token_id is None else divergence.plain_token_id
    plain_logprob = weights.logprobs.get(plain)
    if plain_logprob is None:
        return None
    if speculated in weights.logprobs:
        return Margin(plain_logprob, weights.logprobs[speculated], is_bound=False)
    return Margin(plain_logprob, min(weights.logprobs.values()), is_bound=True)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the worst verdict: diverged, then unstable, failed, inexact, identical; identical for none."""
    seen = set(verdicts)
    return next((verdict for verdict in _EXIT_CODES if verdict in seen), Verdict.IDENTICAL)


def exit_code(verdicts: Iterable[Verdict], *, is_unproven: bool = False) -> int:
    """Exit status: 1 for a divergence, else 3 for unstable, else 2 for a failure, else 4 where `is_unproven`, else 0.

    `is_unproven`: speculation was required and no hint was ever verified.
    """
    code = _EXIT_CODES[worst(verdicts)]
    return EXIT_UNPROVEN if is_unproven and not code else code
