"""Settings as options of a Typer command, and usage errors that name the option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from outrider.errors import InvalidRequest
from outrider.settings import Setting, SettingError, settings_of

_SHORT = {"--verbose": "-v"}


def takes_settings(*owners: type) -> Callable[[Callable[..., None]], Any]:
    """Makes the settings of these classes the options of a Typer command, which gets them as keyword arguments."""
    settings = {name: each for owner in owners for name, each in settings_of(owner).items()}

    def decorate(command: Callable[..., None]) -> Any:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, each in settings.items():
                if each.is_list:
                    given[name] = tuple(given[name] or ())
            try:
                command(**given)
            except SettingError as error:
                if error.name not in settings:  # of a class that the command makes of its own settings
                    raise
                flag = settings[error.name].title
                message = error.message.removeprefix(flag).lstrip(": ")
                raise typer.BadParameter(message, param_hint=flag) from None

        made: Any = run
        made.__signature__ = inspect.Signature([_parameter(each) for each in settings.values()])
        return made

    return decorate


def _parameter(each: Setting) -> inspect.Parameter:
    kind: Any = list[each.kind] if each.is_list else each.kind  # type: ignore[name-defined]
    default = None if each.is_list else each.initial
    has_two = each.kind is bool and each.initial and not each.is_inverse
    names = f"{each.flag}/--no-{(each.flag or '')[2:]}" if has_two else each.flag
    facts: dict[str, Any] = {"rich_help_panel": each.group or None} if each.flag else {}
    is_optional = default is None
    kind = kind | None if is_optional else kind
    if each.word is not None:  # typer knows no unions
        kind, facts["parser"] = Any, reader(each)
    option: Any = (typer.Option if each.flag else typer.Argument)(
        *(name for name in (names, _SHORT.get(each.flag or "")) if name),
        help=f"{each.help[:1].upper()}{each.help[1:]}{each.bounds and f' ({each.bounds})'}.",
        metavar=each.unit.upper() or None,
        envvar=each.variable if each.reads_variable else None,
        show_default=each.shows or (default not in (None, "") and each.kind is not bool),
        **facts,
    )
    annotation: Any = Annotated
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation[kind, option]
    )


def reader(each: Setting) -> Callable[[str], Any]:
    """Reads the option's value. Raises typer's usage error."""

    def read(text: str) -> Any:
        try:
            return each.read(text)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error

    return read


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Turns errors about a flag's value into usage errors that name the flag."""
    try:
        yield
    except (InvalidRequest, OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error
