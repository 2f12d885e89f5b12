"""Settings of a fleet file: each has a default, bounds and a line of help, and describes permitted values. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from command_line.tune.times import StepTimes
from outrider.errors import InvalidRequest

T = TypeVar("T")


def _setting(default: Any, help: str, permitted: str, read: Callable[[Any], Any]) -> Any:
    return field(default=default, metadata={"help": help, "permitted": permitted, "read": read})


def _within(value: float, least: float, most: float) -> bool:
    return math.isfinite(value) and least <= value <= most


def whole(default: int | None, help: str, least: int, most: int) -> Any:
    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError
        return value

    return _setting(default, help, f"a whole number from {least} to {most}", read)


def real(default: float | None, help: str, least: float, most: float) -> Any:
    def read(value: Any) -> float:
        if type(value) not in (int, float) or not _within(value, least, most):
            raise ValueError
        return float(value)

    return _setting(default, help, f"a number from {least:g} to {most:g}", read)


def switch(default: bool, help: str) -> Any:
    def read(value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError
        return value

    return _setting(default, help, "true or false", read)


def length(default: tuple[int, int], help: str, most: int) -> Any:
    """A number of tokens, or two between which all are equally likely."""

    def read(value: Any) -> tuple[int, int]:
        low, high = value if isinstance(value, list) else (value, value)
        if type(low) is not int or type(high) is not int or not 1 <= low <= high <= most:
            raise ValueError
        return low, high

    return _setting(default, help, f"a whole number from 1 to {most}, or [least, most]", read)


def times(help: str) -> Any:
    """Milliseconds by number of tokens."""

    def read(value: Any) -> StepTimes:
        pairs = [(int(size), float(ms)) for size, ms in value.items()]
        if not all(size > 0 and _within(ms, 0.0, 1e6) for size, ms in pairs):
            raise ValueError
        return StepTimes.measured(pairs)

    return _setting(None, help, "milliseconds by number of tokens, such as { 1 = 20.0, 8 = 21.5 }", read)


def read_table(kind: type[T], table: Any, name: str) -> T:
    """Reads the settings of one table. Raises InvalidRequest, which names the setting and what is permitted."""
    if not isinstance(table, Mapping):
        raise InvalidRequest(name, f"{name} is not a table")
    known = {each.name: each for each in settings_of(kind)}
    values = {}
    for key, value in table.items():
        if key not in known:
            raise InvalidRequest(name, f"{name} has no setting {key!r}; there are: {', '.join(known)}")
        values[key] = check(known[key], value, name)
    return kind(**values)


def check(setting: Field[Any], value: Any, name: str) -> Any:
    """Checks and converts a value. Raises InvalidRequest."""
    try:
        return setting.metadata["read"](value)
    except (ValueError, TypeError, AttributeError):
        permitted = setting.metadata["permitted"]
        raise InvalidRequest(setting.name, f"{name} {setting.name} is {value!r}; permitted: {permitted}") from None


def settings_of(kind: type[Any]) -> list[Field[Any]]:
    """The fields that a file may set."""
    return [each for each in fields(kind) if each.metadata]


def example_of(kind: type[Any], name: str) -> list[str]:
    """A table with every setting at its default; those without a default are commented out."""
    lines = [name]
    for each in settings_of(kind):
        value = each.default
        if value is None:
            shown = f"# {each.name} ="
        elif isinstance(value, bool):
            shown = f"{each.name} = {str(value).lower()}"
        elif isinstance(value, tuple):
            shown = f"{each.name} = {value[0] if value[0] == value[1] else list(value)}"
        else:
            shown = f"{each.name} = {value}"
        lines.append(f"{shown:<32} # {each.metadata['help']}")
    return lines
