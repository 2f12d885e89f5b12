"""The prompt's part of a sequence's output: its text if it is echoed, its log probabilities if they were asked for.

Pure. The target sends log probabilities with each chunk of its prefill; another target, after a replay, sends them
again. They are shown once, complete, before anything else.
"""

from __future__ import annotations

from coordinator.intake.generation_request import GenerationSpec
from coordinator.output.text_output import PromptOutput
from outrider.errors import WorkerFailed
from protos.outrider.v1 import common_pb2, target_pb2


class PromptScores:
    """Collects the prompt's part of one sequence's output."""

    def __init__(self, spec: GenerationSpec, *, is_repeat: bool = False) -> None:
        """`is_repeat`: the client has it already."""
        self._is_repeat = is_repeat
        self._text = spec.prompt_text
        self._num_expected = 0
        if spec.sampling.num_prompt_logprobs is not None:
            self._num_expected = len(spec.prompt_token_ids) - 1  # the first one has no context
        self._by_position: dict[int, common_pb2.TokenLogprobs] = {}
        self._is_due = spec.prompt_text is not None or spec.sampling.num_prompt_logprobs is not None

    def add(self, chunk: target_pb2.PromptLogprobs) -> None:
        """Adds a chunk; positions that are known or not in the prompt change nothing."""
        for position, logprobs in enumerate(chunk.logprobs, chunk.first_position):
            if 1 <= position <= self._num_expected:
                self._by_position.setdefault(position, logprobs)

    def shown(self) -> list[PromptOutput]:
        """The output of the prompt when it is due; nothing from then on.

        Raises WorkerFailed if the target began to generate without all that was asked for.
        """
        if not self._is_due:
            return []
        if len(self._by_position) < self._num_expected:
            raise WorkerFailed(
                f"the target sent log probabilities of {len(self._by_position)} of {self._num_expected} prompt tokens"
            )
        self._is_due = False
        logprobs = tuple(map(self._by_position.__getitem__, range(1, self._num_expected + 1)))
        return [PromptOutput(self._text or "", logprobs, self._is_repeat)]
