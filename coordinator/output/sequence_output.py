"""The output of one sequence: committed tokens go in, items for its client come out. Pure.

Shown output is final. A client that resumes a stream has a part of it already, up to its `ResumePoint`; that part is
shown again as a repeat, so that positions stay the same for everything that counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.intake.generation_request import GenerationSpec
from coordinator.observability.statistics import RequestTimes, SpeculationCounts
from coordinator.output.prompt_scores import PromptScores
from coordinator.output.text_output import PromptOutput, TextOutput, VisibleOutput
from coordinator.recovery.resumption import ResumePoint
from outrider.errors import WorkerFailed
from outrider.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from outrider.text.tokenizer import Tokenizer
from protos.outrider.v1 import common_pb2, target_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """The end of a completed sequence; the last item of its output."""

    text: str  # held back until now
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None  # the stop string, or the stop token's id
    num_prompt_tokens: int
    num_output_tokens: int
    decoding_mode: common_pb2.DecodingMode
    counts: SpeculationCounts
    times: RequestTimes
    num_cached_tokens: int | None  # of the prompt; known from the target's last event only
    exactness: common_pb2.Exactness = common_pb2.EXACTNESS_UNSPECIFIED
    is_repeat: bool = False  # the client has it already, from another replica


OutputItem = PromptOutput | VisibleOutput | SequenceFinished


class Output(Protocol):
    """The output of one sequence, as `coordinator.request.sequence` uses it; the simulator implements it too."""

    counts: SpeculationCounts
    times: RequestTimes
    decoding_mode: common_pb2.DecodingMode
    exactness: common_pb2.Exactness

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def stop_string(self) -> str | None: ...
    @property
    def has_room(self) -> bool: ...
    def add_prompt_scores(self, chunk: target_pb2.PromptLogprobs) -> None: ...
    def show_prompt(self) -> list[PromptOutput]: ...
    def check(self, step: Any) -> None: ...
    def show(self, step: Any) -> list[VisibleOutput]: ...
    def repeat(self, token_ids: Sequence[int]) -> VisibleOutput: ...
    def take_end(self, counted: Any, queued_ms: float, *, is_replay: bool) -> None: ...
    def finish(self, reason: str, stop_reason: str | int | None, now_s: float) -> SequenceFinished: ...


class SequenceOutput:
    """Collects the committed tokens of one sequence and turns them into items for its client."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, point: ResumePoint, arrival_s: float) -> None:
        """`point`: the client's position in the sequence. `arrival_s`: when its request came."""
        request = spec.request
        self.counts = SpeculationCounts()
        self.times = RequestTimes(arrival_s)
        self.decoding_mode: common_pb2.DecodingMode = common_pb2.DECODING_MODE_UNSPECIFIED
        self.exactness: common_pb2.Exactness = common_pb2.EXACTNESS_UNSPECIFIED
        self._num_cached_tokens: int | None = None
        self._spec = spec
        self._point = point
        self._prompt = PromptScores(spec, is_repeat=point.has_begun)
        self._text = TextOutput(
            IncrementalDetokenizer(
                tokenizer,
                context_token_ids=spec.prompt_token_ids,
                skip_special_tokens=not spec.shows_special_tokens,
            ),
            StopStringMatcher(request.stop, include_stop_str_in_output=request.include_stop_str_in_output),
            spec.sampling.min_tokens,
        )

    @property
    def token_ids(self) -> list[int]:
        """The committed tokens, prompt excluded."""
        return self._text.token_ids

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, once one did."""
        return self._text.stop_string

    @property
    def has_room(self) -> bool:
        """Whether another token may follow. A target counts `max_tokens` anew after a replay."""
        return len(self.token_ids) < self._spec.max_tokens

    def add_prompt_scores(self, chunk: target_pb2.PromptLogprobs) -> None:
        """Takes log probabilities of prompt tokens."""
        self._prompt.add(chunk)

    def show_prompt(self) -> list[PromptOutput]:
        """The prompt's part of the output, once, before anything else. Raises WorkerFailed if some of it is missing."""
        return self._prompt.shown()

    def repeat(self, token_ids: Sequence[int]) -> VisibleOutput:
        """Takes tokens that the client has already, which no target need generate again."""
        origins = [common_pb2.TOKEN_ORIGIN_UNSPECIFIED] * len(token_ids)
        return self._push(token_ids, origins, (), is_repeat=True)

    def check(self, step: target_pb2.StepOutput) -> None:
        """Raises WorkerFailed if the step lacks something that was asked for."""
        if self._spec.sampling.num_logprobs is not None and len(step.logprobs) != len(step.token_ids):
            raise WorkerFailed("the target worker sent tokens without log probabilities")

    def show(self, step: target_pb2.StepOutput) -> list[VisibleOutput]:
        """Takes the tokens of one step, up to `max_tokens`: two items if the client has the first part already."""
        num_tokens = len(self.token_ids)
        room = self._spec.max_tokens - num_tokens
        token_ids, origins, logprobs = step.token_ids[:room], step.origins[:room], step.logprobs[:room]
        num_repeated = min(max(self._point.num_tokens - num_tokens, 0), len(token_ids))
        if self._point.has_ended:
            num_repeated = len(token_ids)
        shown: list[VisibleOutput] = []
        for part, is_repeat in ((slice(0, num_repeated), True), (slice(num_repeated, None), False)):
            if token_ids[part] and self.stop_string is None:
                shown.append(self._push(token_ids[part], origins[part], logprobs[part], is_repeat=is_repeat))
        return shown

    def take_end(self, counted: target_pb2.SessionFinished, queued_ms: float, *, is_replay: bool) -> None:
        """Takes the target's counts. A target counts its part of a replay only, and a lost target's counts are lost
        with it."""
        self.times.queue_ms = queued_ms + counted.queue_ms
        self.times.prefill_ms = counted.prefill_ms
        self.counts.add_end(counted.stats, is_complete=not is_replay)
        if not is_replay:
            self._num_cached_tokens = counted.num_cached_tokens

    def finish(self, reason: str, stop_reason: str | int | None, now_s: float) -> SequenceFinished:
        """The last item, with the text that was held back. `reason` is "stop" or "length"."""
        text = self._text.finish()
        if self.stop_string is not None:  # completed by a character that only the end made visible
            reason, stop_reason = "stop", self.stop_string
        self.times.end_s = now_s
        return SequenceFinished(
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=len(self._spec.prompt_token_ids),
            num_output_tokens=len(self.token_ids),
            decoding_mode=self.decoding_mode,
            counts=self.counts,
            times=self.times,
            num_cached_tokens=self._num_cached_tokens,
            exactness=self.exactness,
            is_repeat=self._point.has_ended,
        )

    def _push(
        self,
        token_ids: Sequence[int],
        origins: Sequence[common_pb2.TokenOrigin],
        logprobs: Sequence[common_pb2.TokenLogprobs],
        *,
        is_repeat: bool,
    ) -> VisibleOutput:
        visible = self._text.push(token_ids, origins, logprobs)
        return dataclasses.replace(visible, is_repeat=True) if is_repeat else visible
