"""The verification of a step for one sequence, request and result. Plain data, and loads without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.sampling.logit_context import LogitContext
from outrider.engine.sampling.logit_edits import LogitEdits
from outrider.engine.sampling.token_logprobs import TokenLogprobs
from outrider.hints.hint_tree import Branch, Hint
from outrider.sampling_params import AcceptanceRule, SamplingParams


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """One sequence's rows of logits, and the hints that they decide about.

    Row i decides the token at position `position + i`, which `hints[i]` guesses. All rows but the first come from
    hints that were fed to the model; there may be one hint more, for the last row. Rows behind these come from
    `branches`, which were fed, too: greedy and coupled decoding go on with one where it has the token that was decided.
    """

    first_row: int  # in the step's logits
    text: LogitContext  # the first i hints are `continuations[i]`, then come those of the branches
    hints: Sequence[Hint]
    params: SamplingParams
    seed: int
    acceptance_rule: AcceptanceRule = AcceptanceRule.BLOCK
    edits: LogitEdits | None = None  # what the parameters change in the logits
    branches: Sequence[Branch] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.num_path_rows - 1 <= len(self.hints) <= self.num_path_rows

    @property
    def num_rows(self) -> int:
        """Rows of logits: one after the committed tokens, and one after each hint that was fed."""
        return len(self.text.continuations)

    @property
    def num_path_rows(self) -> int:
        """Rows without those of branches."""
        return self.num_rows - len(self.branches)

    @property
    def position(self) -> int:
        """Position of the first token to decide."""
        return len(self.text.token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One step's result for one session: the accepted hints, then one more token unless the last hint was accepted too.

    Empty where the parameters leave no token at the first position.
    """

    token_ids: list[int]
    num_accepted: int  # of the path's hints that were fed to the model
    num_matched: int  # of the path's hints, one that was not fed included
    logprobs: list[TokenLogprobs] | None = None  # one per token, where the request asks for them
    trail: tuple[int, ...] = ()  # the branches that were accepted after these
