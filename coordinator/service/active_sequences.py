"""The sequences that one replica serves or lets wait, by model, and how many of each there may be. Pure.

A model whose targets are full or slow gathers requests here. So that it does not take up the whole replica, half of the
limit is kept for all served models in equal parts: each may always have its part. The other half, and all of the limit
where there is one model, is for whoever comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection


class ActiveSequences:
    """Counts the sequences of one replica."""

    def __init__(self, num_max: int) -> None:
        self.num_max = num_max
        self._num_of: Counter[str] = Counter()

    @property
    def num(self) -> int:
        return self._num_of.total()

    def excess(self, model: str, num: int, served: Callable[[], Collection[str]]) -> int:
        """How many of `num` more sequences of a model are too many; `served` returns the models that requests may name.

        A request with more sequences than the limit is served alone."""
        if not self.num or self.num + num <= self.num_max // 2:  # all others' parts are free, too
            return 0
        names, num_kept = served(), 0
        part = self.num_max // (2 * max(len(names), 1))
        if self._num_of[model] + num > part:
            num_kept = sum(max(part - self._num_of[other], 0) for other in names if other != model)
        return max(self.num + num + num_kept - self.num_max, 0)

    def add(self, model: str, num: int) -> None:
        self._num_of[model] += num

    def remove(self, model: str, num: int) -> None:
        self._num_of[model] -= num
        if not self._num_of[model]:
            del self._num_of[model]
