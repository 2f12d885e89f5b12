"""A list that counts what is read of it, for tests of costs that must not grow with a text."""

from __future__ import annotations

from collections import UserList
from typing import Any


class CountingList(UserList[int]):
    """Counts the elements that are read, one by one or by slices, which are plain lists."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = self.data[index]
        self.num_read += len(found) if isinstance(found, list) else 1
        return found

    def take_num_read(self) -> int:
        """The number of elements read since the last call."""
        num_read, self.num_read = self.num_read, 0
        return num_read
