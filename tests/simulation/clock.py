"""Virtual time for asyncio: a loop that never waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any, Final


class NothingLeftToDoError(Exception):
    """Every task waits for something that will never come."""


class TimeStandsStillError(Exception):
    """Somebody is busy without end and lets no time pass."""


_TURNS_MAX: Final = 20_000
"""Of the loop, at one moment."""


class _NoInput(selectors.BaseSelector):
    """Stands where the loop waits for sockets. There are none, so waiting is letting time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_turns = 0  # since time has passed
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftToDoError
        if timeout > 0:
            self.now_s += timeout
            self._num_turns = 0
        elif (turns := self._num_turns + 1) > _TURNS_MAX:
            raise TimeStandsStillError
        else:
            self._num_turns = turns
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(
            fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data
        )
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Out of `run_until_complete` come NothingLeftToDoError on a deadlock and TimeStandsStillError."""

    def __init__(self) -> None:
        self._no_input = _NoInput()
        super().__init__(self._no_input)

    def time(self) -> float:
        return self._no_input.now_s
