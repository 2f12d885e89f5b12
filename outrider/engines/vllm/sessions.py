"""Messages between a target worker on vLLM and the scheduler in it: sessions, and counts with each output. Pure.

The first travels in the `extra_args` of a request's sampling parameters, the second in the `ec_transfer_params` of its
outputs, which vLLM hands through. Counts add up over the session's life, so that outputs may be merged on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from outrider.engines.announcements import SWITCH

KEY: Final = "outrider"


@dataclass(frozen=True, slots=True)
class SessionArgs:
    """A session, as its target worker gives it to vLLM."""

    name: str  # `outrider.hint_service.session_names.session_name`
    num_committed: int = 0  # tokens at the end of vLLM's prompt that are output, committed elsewhere
    num_speculative_tokens: int = 0  # most hints per step; 0: as many as the engine verifies
    is_always: bool = False  # all hints are verified, even where they do not pay

    def to_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {
            KEY: {"session": self.name, "num_committed": self.num_committed, "is_always": self.is_always}
        }
        return args | ({SWITCH: self.num_speculative_tokens} if self.num_speculative_tokens else {})

    @classmethod
    def of(cls, sampling_params: Any) -> Self | None:
        """Reads them from vLLM's sampling parameters; None for a request that no target worker sent."""
        told = ((sampling_params.extra_args if sampling_params is not None else None) or {}).get(KEY)
        return None if told is None else cls(told["session"], told["num_committed"], is_always=told["is_always"])


@dataclass(slots=True)
class StepCounts:
    """Counts of one session so far, and its last step."""

    num_steps: int = 0  # decode steps
    num_spec_steps: int = 0  # that verified hints
    num_draft_tokens: int = 0
    num_accepted: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_length_histogram: list[int] = field(default_factory=list)
    step: int = 0  # number of the engine's last step
    step_ms: float = 0.0

    def count(self, hints: Sequence[int], token_ids: Sequence[int]) -> None:
        """Takes the hints that a step verified and the tokens that it committed."""
        self.num_steps += 1
        if not hints:
            return
        num_accepted = num_matching(hints, token_ids)
        self.num_spec_steps += 1
        self.num_draft_tokens += len(hints)
        self.num_accepted += num_accepted
        _increment(self.acceptance_histogram, num_accepted)
        _increment(self.draft_length_histogram, len(hints))

    def to_message(self, *, is_last: bool) -> dict[str, Any]:
        """The counts as they are sent with an output; the histograms with the last one."""
        counts = [self.step, self.step_ms, self.num_steps, self.num_spec_steps]
        counts += [self.num_draft_tokens, self.num_accepted]
        return {KEY: [*counts, *((self.acceptance_histogram, self.draft_length_histogram) if is_last else ())]}

    @classmethod
    def from_message(cls, message: Any) -> Self | None:
        """The counts in an output's message; None if it has none, as when vLLM ends a request by itself."""
        told = (message or {}).get(KEY)
        if told is None:
            return None
        step, step_ms, num_steps, num_spec_steps, num_draft_tokens, num_accepted, *histograms = told
        accepted, lengths = histograms or ([], [])
        counts = cls(num_steps, num_spec_steps, num_draft_tokens, num_accepted, list(accepted), list(lengths))
        counts.step, counts.step_ms = step, step_ms
        return counts


def restore_output(request: Any, num_committed: int) -> None:
    """Makes the end of a new request's prompt its output, for vLLM's scheduler. Its list of all tokens is right as it
    is, and the workers get the whole as a prompt, which `split_prompt` splits likewise."""
    request.num_prompt_tokens -= num_committed
    request._output_token_ids.extend(request._all_token_ids[-num_committed:])
    # Of the prompt, and it would be wrong: the cache may hold more than the prompt.
    request.prefill_stats = None


def split_prompt(state: Any) -> None:
    """Moves the tokens that were committed elsewhere from the end of a new request's prompt into its output, in one of
    vLLM's workers."""
    session = SessionArgs.of(state.sampling_params)
    if session is not None and session.num_committed and not state.output_token_ids:
        state.output_token_ids = list(state.prompt_token_ids[-session.num_committed :])
        state.prompt_token_ids = list(state.prompt_token_ids[: -session.num_committed])


def num_matching(hints: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many leading hints were committed. One that is rejected is never committed all the same."""
    num_matched = 0
    for hint, token_id in zip(hints, token_ids, strict=False):
        if hint != token_id:
            break
        num_matched += 1
    return num_matched


def _increment(histogram: list[int], index: int) -> None:
    histogram.extend([0] * (index + 1 - len(histogram)))
    histogram[index] += 1
