"""The interface of what writes the answer to a generating call, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from coordinator.recovery.resumption import ResumePoint
from coordinator.request.choices import ChoiceOutput, RequestFinished
from outrider.errors import OutriderError


class AnswerWriter(Protocol):
    """Writes one answer. A stream's events are its opening, those of its items in order, and its closing or its error,
    then its end."""

    @property
    def request_id(self) -> str:
        """The id of the request in logs."""

    @property
    def answer(self) -> dict[str, Any] | None:
        """The complete answer, where later requests may refer to it; None otherwise, and before the last token."""

    @property
    def end(self) -> str:
        """The last bytes of a stream, after its closing or its error."""

    def whole(self, collected: Sequence[ChoiceOutput], finished: RequestFinished) -> dict[str, Any]:
        """Builds the answer to a request that does not stream."""

    def num_values(self, item: ChoiceOutput) -> int:
        """Estimates the tokens and log probabilities that are written for an item."""

    def size_of(self, item: ChoiceOutput) -> int:
        """Estimates the peak bytes that `whole` takes for an item, besides the item itself."""

    def is_long(self, item: ChoiceOutput) -> bool:
        """Whether writing an item takes long enough to do it in a thread."""

    def opening(self, points: Sequence[ResumePoint] | None = None) -> list[str]:
        """Writes the events before the first token. `points`: where the client of a resumed stream is."""

    def event(self, item: ChoiceOutput) -> str | None:
        """Writes an item as events; None if there is nothing to show."""

    def closing(self, finished: RequestFinished) -> list[str]:
        """Writes the events after the last token."""

    def failure(self, error: OutriderError) -> str:
        """Writes the event of an error that ends the stream."""
