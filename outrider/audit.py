"""Whether speculation changed what was said: runs of one request are compared and a verdict is drawn. Pure.

The promise under audit: greedy and seeded output is a function of model, prompt, parameters and seed, so a run that
verified hints says what a plain one says, token by token. Where two runs first differ, one question decides whose
fault it is: does plain decoding, asked again at the same prefix, say what it said before? If so, speculation changed
the output. If not, the engine answers unequally by itself and proves nothing about speculation.

Vocabulary: the *plain* run is the reference, without speculation; *speculated* runs are compared with it; a *replay*
is a further plain run to the position of the first difference. Positions count output tokens from 0; log
probabilities and margins are natural logarithms (nats).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

RULED_OUT: Final = -9999.0
"""How the API writes the log probability of a token that cannot be said."""

ROUNDING_NATS: Final = 0.25
"""Below this a greedy margin may be rounding: bfloat16 numbers from 16 to 32, as logits are, lie 0.125 apart."""

EXIT_UNPROVEN: Final = 4
"""Exit status where speculation was required and no hint was ever verified."""


class Verdict(StrEnum):
    """On one request, or one run of it."""

    IDENTICAL = "identical"
    DIVERGED = "diverged"  # speculation said something else where plain decoding is sure of itself
    UNSTABLE = "unstable"  # plain decoding contradicts itself
    FAILED = "failed"  # some request got no usable answer


# Worst first, with what the process exits with.
_EXIT_CODES: Final[Mapping[Verdict, int]] = {
    Verdict.DIVERGED: 1, Verdict.UNSTABLE: 3, Verdict.FAILED: 2, Verdict.IDENTICAL: 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The distribution at one position, as far as the server shows it."""

    token_id: int  # the token said there
    logprobs: Mapping[int, float]  # by token id: the likeliest ones and the one said

    @property
    def ranked(self) -> list[tuple[int, float]]:
        """(token id, log probability), likeliest first, without what cannot be said."""
        possible = [(token_id, logprob) for token_id, logprob in self.logprobs.items() if logprob > RULED_OUT]
        return sorted(possible, key=lambda item: -item[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class HintCounts:
    """What speculation did. Sums of counts are counts of several runs."""

    num_draft_tokens: int = 0  # hints verified
    num_accepted_draft_tokens: int = 0
    num_spec_steps: int = 0  # steps that verified at least one

    @property
    def draft_acceptance_rate(self) -> float | None:
        """None where no hint was verified."""
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

    token_ids: tuple[int, ...]  # of the output
    finish_reason: str | None = None
    content: str = ""  # what the client reads: text, in a chat also the calls of tools
    prompt_token_ids: tuple[int, ...] = ()
    decoding_mode: str = ""  # greedy, coupled or rejection
    hints: HintCounts = field(default_factory=HintCounts)
    num_forced_tokens: int = 0  # fed ahead because a grammar left no choice
    weights: tuple[TokenWeights, ...] = ()  # of the last `len(weights)` tokens of the output

    def token_at(self, position: int) -> int | None:
        """None where the output had ended."""
        return self.token_ids[position] if position < len(self.token_ids) else None

    def weights_at(self, position: int) -> TokenWeights | None:
        """None where the server showed no distribution."""
        index = position - (len(self.token_ids) - len(self.weights))
        return self.weights[index] if 0 <= index < len(self.weights) else None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two runs. Both tokens are None when the tokens agree to the end and the text or
    the reason to finish does not."""

    position: int
    plain_token_id: int | None  # None: the plain run had ended
    speculated_token_id: int | None  # None: the speculated run had ended


@dataclass(frozen=True, slots=True)
class Margin:
    """How much likelier plain decoding's token is than speculation's, at the position of a divergence."""

    plain_logprob: float
    speculated_logprob: float  # an upper bound where `is_bound`
    is_bound: bool  # speculation's token is not among the likeliest, which are all that the server shows

    @property
    def nats(self) -> float:
        """A lower bound where `is_bound`; negative when speculation's token is the likelier one."""
        return self.plain_logprob - self.speculated_logprob

    @property
    def is_ruled_out(self) -> bool:
        """Whether speculation said what the parameters forbid."""
        return self.speculated_logprob <= RULED_OUT


def compare(plain: Run, speculated: Run) -> Divergence | None:
    """The first difference; None when a client could not tell the two answers apart."""
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
    """Whether the replay says what the plain run said, up to the position of the divergence and there.

    Where the plain run had ended, the end must be the same; the replay then is of the whole request.
    """
    if divergence.plain_token_id is None:
        return compare(plain, replay) is None
    end = divergence.position + 1
    return replay.token_ids[:end] == plain.token_ids[:end]


def judge(plain: Run, divergence: Divergence | None, replays: Sequence[Run]) -> Verdict:
    """The verdict on one speculated run. A divergence needs at least one replay; one that disagrees clears
    speculation, for nothing is left to compare it with."""
    if divergence is None:
        return Verdict.IDENTICAL
    assert replays, "a divergence is judged by a replay"
    if all(is_reproduced(plain, divergence, replay) for replay in replays):
        return Verdict.DIVERGED
    return Verdict.UNSTABLE


def margin(divergence: Divergence, weights: TokenWeights | None) -> Margin | None:
    """How far apart the two tokens are by a replay's distribution; None where it does not show them.

    Where the plain run had ended, `weights` are of a replay that went on, so its token is the one that ends a text.
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
    """The one that decides: diverged before unstable before failed before identical, which nothing at all is too."""
    seen = set(verdicts)
    return next((verdict for verdict in _EXIT_CODES if verdict in seen), Verdict.IDENTICAL)


def exit_code(verdicts: Iterable[Verdict], *, is_unproven: bool = False) -> int:
    """1 for a divergence, else 3 for unstable, else 2 for a failure, else 4 where `is_unproven`, else 0.

    `is_unproven`: speculation was required and no hint was ever verified.
    """
    code = _EXIT_CODES[worst(verdicts)]
    return EXIT_UNPROVEN if is_unproven and not code else code
