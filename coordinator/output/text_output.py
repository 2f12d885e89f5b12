"""Text and tokens shown to the client: text up to a stop string, tokens up to the one that completed it.

Pure. Tokens go through one at a time, so the result does not depend on how many a step committed.

The first `min_tokens` tokens are shown whatever their text. The search for stop strings begins with the text that later
tokens complete, so a stop string counts if all of it lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from protos.outrider.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """The prompt's part of a sequence's output, before anything else."""

    text: str  # empty without echo
    logprobs: tuple[common_pb2.TokenLogprobs, ...]  # of the prompt's tokens 1 and after, or empty
    is_repeat: bool = False  # the client has it already, from another replica


@dataclass(frozen=True, slots=True)
class VisibleOutput:
    """Output of a step. `token_ids`, `origins` and `pieces` have one entry per token, as has `logprobs` if they were
    asked for."""

    text: str  # may lag behind the pieces while a stop string is possible
    token_ids: tuple[int, ...]
    origins: tuple[common_pb2.TokenOrigin, ...]
    pieces: tuple[str, ...]  # the text each token completed
    logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()
    is_repeat: bool = False  # the client has it already, from another replica


class TextOutput:
    """Text of one sequence so far. After a stop string matched, `stop_string` is set and further tokens are dropped."""

    def __init__(self, detokenizer: IncrementalDetokenizer, matcher: StopStringMatcher, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self.token_ids: list[int] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output, once one did."""
        return self._matcher.matched

    def push(
        self,
        token_ids: Sequence[int],
        origins: Sequence[common_pb2.TokenOrigin],
        logprobs: Sequence[common_pb2.TokenLogprobs] = (),
    ) -> VisibleOutput:
        """Takes committed tokens in order; those after a completed stop string are dropped."""
        text, pieces = [], []
        for token_id in token_ids:
            piece = self._detokenizer.push(token_id)
            self.token_ids.append(token_id)
            text.append(self._matcher.push(piece) if self._is_matching else piece)
            pieces.append(piece)
            if self.stop_string is not None:
                break
        kept = len(pieces)
        return VisibleOutput(
            "".join(text),
            tuple(token_ids[:kept]),
            tuple(origins[:kept]),
            tuple(pieces),
            tuple(logprobs[:kept]),
        )

    def finish(self) -> str:
        """The rest of the text once all tokens are in; it may still complete a stop string."""
        if self.stop_string is not None:
            return ""
        rest = self._detokenizer.flush()
        if not self._is_matching:
            return rest
        text = self._matcher.push(rest)
        return text if self.stop_string is not None else text + self._matcher.flush()

    @property
    def _is_matching(self) -> bool:
        return len(self.token_ids) > self._min_tokens
