"""Functions whose schemas the grammar holds: those without `strict` are loosened as far as needed, and no further.

Invariants: a request is refused for a schema only if the client asked that this schema be followed. A schema that the
grammar holds stays as it was sent, unless finding that out takes more than `COMPILE_S_MAX`, or all of them together are
beyond a bound of the grammar. Whatever takes time in proportion to a schema runs in a thread.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from coordinator.formats.answer_parts import ToolUse
from coordinator.intake.loosening.loosened_schema import RISKY, Loosened, loosened, outline
from outrider.errors import InvalidRequest

COMPILE_S_MAX: Final = 1.0
"""Processor time of compilations, in seconds, after which no schema is tried alone. What is loosened then stays so, and
all functions are outlined if that is not held."""
CHECKS_MAX: Final = 32
"""Most compilations to find the functions whose schemas are not held although they were loosened."""

_ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


class Verdict(NamedTuple):
    """The refusal of a grammar, if there is one, and the processor time that compiling it took."""

    refusal: InvalidRequest | None
    compile_s: float


Check = Callable[[ToolUse], Awaitable[Verdict]]
"""Compiles the grammar of an answer that may call these functions."""
Run = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs something that takes longer than the event loop may be held up."""
_Function = tuple[str, Mapping[str, Any] | None]


class _Form(NamedTuple):
    """A function, and what its schema has lost."""

    function: _Function
    dropped: tuple[str, ...] = ()


_Forms = tuple[_Form, ...]


async def held_tools(use: ToolUse, check: Check, run: Run) -> tuple[ToolUse, tuple[str, ...]]:
    """Returns the functions as the grammar holds them, and what was dropped, by the name of its function and its place.

    Raises InvalidRequest if those with `strict` are not held, or if nothing is. It compiles each function once and
    `CHECKS_MAX` + 6 groups of them at most; and not more than five groups once that has taken `COMPILE_S_MAX`.
    """
    search = _Search(use, check, run)
    refusal = await search.refusal(use.functions)
    if refusal is None:
        return use, ()
    await search.check_strict(refusal)
    for step in (search.loosen, search.narrow, search.outline, search.open):
        await step()
        held = search.functions
        if await search.refusal(held) is None:
            return dataclasses.replace(use, functions=held), search.dropped
    raise refusal


class _Search:
    """Functions, and what they have lost so far."""

    def __init__(self, use: ToolUse, check: Check, run: Run) -> None:
        self._use = use
        self._check = check
        self._run = run
        self._sent: _Forms = tuple(_Form(function) for function in use.functions)
        self._forms = self._sent
        self._checks_left = len(self._sent) + CHECKS_MAX
        self._compile_s_left = COMPILE_S_MAX

    @property
    def functions(self) -> tuple[_Function, ...]:
        return tuple(form.function for form in self._forms)

    @property
    def dropped(self) -> tuple[str, ...]:
        return tuple(f"tools.{name}.{each}" for (name, _), dropped in self._forms for each in dropped)

    async def refusal(self, functions: Sequence[_Function]) -> InvalidRequest | None:
        refusal, compile_s = await self._check(dataclasses.replace(self._use, functions=tuple(functions)))
        self._compile_s_left -= compile_s
        return refusal

    async def check_strict(self, refusal: InvalidRequest) -> None:
        """Raises InvalidRequest if the functions with `strict` are not held. `refusal` is that of all functions."""
        strict = tuple(function for function in self._use.functions if function[0] in self._use.strict)
        if not strict:
            return
        if len(strict) < len(self._sent):
            of_strict = await self.refusal(strict)
            if of_strict is None:
                return
            refusal = of_strict
        names = ", ".join(name for name, _ in strict)
        raise InvalidRequest(
            refusal.parameter,
            f"strict: true on {names} demands what cannot be enforced (without it, the schema would be loosened): "
            f"{refusal.message}",
        )

    async def loosen(self) -> None:
        """Loosens the functions whose schemas are not held alone."""
        looser = await self._changed(self._sent, loosened)
        self._forms = tuple([
            sent if changed is sent or await self._are_held((sent,)) else changed
            for sent, changed in zip(self._sent, looser, strict=True)
        ])  # fmt: skip

    async def narrow(self) -> None:
        """Loosens the functions further whose schemas are not held although they were loosened, found by halves."""
        self._forms = await self._held(range(len(self._sent)))

    async def outline(self) -> None:
        self._forms = await self._changed(self._sent, _outlined)

    async def open(self) -> None:
        self._forms = await self._changed(self._sent, _opened)

    async def _held(self, places: range) -> _Forms:
        """Returns forms of the functions at these places that are held, together if possible."""
        forms = self._forms[places.start : places.stop]
        if await self._are_held(forms):
            return forms
        if len(places) > 1 and self._can_check:
            middle = len(places) // 2
            return await self._held(places[:middle]) + await self._held(places[middle:])
        sent = self._sent[places.start : places.stop]
        if self._can_check:
            milder = await self._changed(sent, partial(loosened, without=RISKY))
            if await self._are_held(milder):
                return milder
        return await self._changed(sent, _outlined)

    @property
    def _can_check(self) -> bool:
        return self._checks_left > 0 and self._compile_s_left > 0

    async def _are_held(self, forms: _Forms) -> bool:
        if not self._can_check:
            return False
        self._checks_left -= 1
        return await self.refusal([form.function for form in forms]) is None

    async def _changed(self, forms: _Forms, loosen: Callable[[Any], Loosened]) -> _Forms:
        """Returns looser forms of what was sent; the same one for a function that this does not change."""
        changed: list[_Form] = []
        strict = self._use.strict
        await self._run(
            lambda: changed.extend(form if form.function[0] in strict else _looser(form, loosen) for form in forms)
        )
        return tuple(changed)


def _looser(form: _Form, loosen: Callable[[Any], Loosened]) -> _Form:
    name, sent = form.function
    if sent is None:
        return form
    schema, dropped = loosen(sent)
    made = schema if isinstance(schema, Mapping) else _ANY_OBJECT
    # Not by equality: 2.0 equals 2, but a grammar does not take it for a length.
    return form if json.dumps(made) == json.dumps(sent) else _Form((name, made), dropped)


def _outlined(schema: Any) -> Loosened:
    return Loosened(outline(schema), ("schema",))


def _opened(schema: Any) -> Loosened:
    return Loosened(_ANY_OBJECT, ("schema",))
