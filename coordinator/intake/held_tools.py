"""Functions whose schemas the grammar holds: those without `strict` are loosened as far as needed, and no further.

Invariant: a request is refused for a schema only if the client asked that this schema be followed. A schema that the
grammar holds stays as it was sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from coordinator.formats.answer_parts import ToolUse
from coordinator.intake.loosening.loosened_schema import RISKY, Loosened, loosened, outline
from outrider.errors import InvalidRequest

CHECKS_MAX: Final = 32
"""Most compilations to find the functions whose schemas are not held although they were loosened."""

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
Check = Callable[[ToolUse], Awaitable[InvalidRequest | None]]
"""Compiles the grammar of an answer that may call these functions, and returns its refusal if there is one."""
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs something that takes longer than the event loop may be held up."""
_Function = tuple[str, Mapping[str, Any] | None]
_Functions = tuple[_Function, ...]


async def held_tools(use: ToolUse, check: Check, run: Run) -> tuple[ToolUse, tuple[str, ...]]:
    """Returns the functions as the grammar holds them, and what was dropped, by the name of its function and its place.

    Raises InvalidRequest if those with `strict` are not held, or if nothing is. At most `CHECKS_MAX` + 6 compilations.
    """
    refusal = await check(use)
    if refusal is None:
        return use, ()
    await _check_strict(use, check, refusal)
    search = _Search(use, check)
    steps = (partial(run, search.loosen_all), search.loosen_some, partial(run, search.outline_all), search.open_all)
    for step in steps:
        await step()
        if await check(search.use) is None:
            return search.use, search.dropped
    raise refusal


async def _check_strict(use: ToolUse, check: Check, refusal: InvalidRequest) -> None:
    strict = tuple(function for function in use.functions if function[0] in use.strict)
    if not strict:
        return
    if len(strict) < len(use.functions):
        of_strict = await check(dataclasses.replace(use, functions=strict))
        if of_strict is None:
            return
        refusal = of_strict
    names = ", ".join(name for name, _ in strict)
    raise InvalidRequest(
        refusal.parameter,
        f"{refusal.message}; without strict: true on {names} the schema would be loosened instead",
    )


class _Search:
    """Functions, and what they have lost so far."""

    def __init__(self, use: ToolUse, check: Check) -> None:
        self._sent = dict(use.functions)
        self._check = check
        self._checks_left = CHECKS_MAX
        self._dropped: dict[str, tuple[str, ...]] = {}  # by the function's name
        self.use = use

    @property
    def dropped(self) -> tuple[str, ...]:
        return tuple(f"tools.{name}.{each}" for name, dropped in self._dropped.items() for each in dropped)

    def loosen_all(self) -> None:
        self._replace([self._change(function, loosened) for function in self.use.functions])

    async def loosen_some(self) -> None:
        """Loosens the functions further whose schemas are not held although they were loosened."""
        self._replace(await self._held(self.use.functions))

    def outline_all(self) -> None:
        self._replace([self._outlined(function) for function in self.use.functions])

    async def open_all(self) -> None:
        self._replace([self._change(function, _opened) for function in self.use.functions])

    def _replace(self, functions: Sequence[_Function]) -> None:
        self.use = dataclasses.replace(self.use, functions=tuple(functions))

    async def _held(self, functions: _Functions) -> _Functions:
        if await self._are_held(functions):
            return functions
        if len(functions) > 1:
            middle = len(functions) // 2
            return await self._held(functions[:middle]) + await self._held(functions[middle:])
        milder = self._change(functions[0], partial(loosened, without=RISKY))
        return (milder if await self._are_held((milder,)) else self._outlined(functions[0]),)

    async def _are_held(self, functions: _Functions) -> bool:
        if self._checks_left == 0:
            return False
        self._checks_left -= 1
        return await self._check(dataclasses.replace(self.use, functions=functions)) is None

    def _outlined(self, function: _Function) -> _Function:
        return self._change(function, lambda schema: Loosened(outline(schema), ("schema",)))

    def _change(self, function: _Function, loosen: Callable[[Any], Loosened]) -> _Function:
        """Returns a function with a looser form of the schema that was sent."""
        name, _ = function
        sent = self._sent[name]
        if name in self.use.strict or sent is None:
            return function
        schema, self._dropped[name] = loosen(sent)
        return name, schema if isinstance(schema, Mapping) else _ANY_OBJECT


def _opened(schema: Any) -> Loosened:
    return Loosened(_ANY_OBJECT, ("schema",))
