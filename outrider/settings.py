"""Settings of a process, each declared once, as a field of a frozen dataclass.

    @dataclass(frozen=True)
    class Limits:
        max_nodes: int = setting(240, "live nodes of one hint tree", unit="nodes", at_least=1, at_most=256)

        def __post_init__(self) -> None:
            check(self)

From such a class come flags and `--help` (`make_parser`, `from_flags`), environment variables, the keys of a
configuration file (`from_mapping`) and the command line of another process (`words`).

pydantic-settings was tried and left out: the workers' images hold no pydantic, its errors name the field and not the
flag, and it reads a variable for every field, while Kubernetes sets variables of such names for a Service `outrider`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from outrider.errors import ConfigurationError

T = TypeVar("T")
REQUIRED: Final[Any] = MISSING
_FOUND: Final[dict[type, dict[str, Setting]]] = {}

MODEL: Final = "Model"
NETWORK: Final = "Network"
CAPACITY: Final = "Capacity"
SPECULATION: Final = "Speculation"
SECURITY: Final = "Security and observability"


class SettingError(ConfigurationError, ValueError):
    """A value that is not permitted; the message names the flag. `name` is the field's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything about one setting."""

    help: str
    group: str = ""  # heading in `--help`
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    word: str | None = None  # that may be given instead of a number
    aliases: tuple[str, ...] = ()  # other ways to write the word
    flag: str | None = ""  # "": made from the field's name; None: in a configuration file only
    variable: str | None = None  # of the environment; counts where there is no flag
    reads_variable: bool = True  # False: code of the setting's own reads it (`redis_url_from`)
    shows: str | None = None  # instead of the default
    parse: Callable[[str], Any] | None = None  # raises ValueError or OSError; None: by the field's type
    is_inverse: bool = False  # a flag that turns off what is on by default
    is_advanced: bool = False  # only benchmarks and tests turn it: shown by `--help-all`
    # The field's:
    name: str = ""
    kind: Any = str  # the type of one value
    is_list: bool = False
    initial: Any = None
    owner: type | None = None
    source: Setting | None = None  # of `same_as`

    @property
    def title(self) -> str:
        """How messages name it."""
        return self.flag or self.name

    @property
    def bounds(self) -> str:
        """The permitted values in words; empty where all are."""
        numbers = self._numbers
        return f"{numbers}, or {self.word}" if numbers and self.word else numbers

    @property
    def _numbers(self) -> str:
        upper = "" if self.at_most is None else f"{self.at_most:g}"
        if self.above is not None:
            return f"above {self.above:g}" + (upper and f", to {upper}")
        if self.at_least is not None:
            return f"{self.at_least:g} to {upper}" if upper else f"{self.at_least:g} and more"
        return upper and f"at most {upper}"

    @property
    def default(self) -> str:
        """In words; empty where there is none to tell."""
        if self.shows is not None:
            return self.shows
        if self.kind is bool:
            return "on" if self.initial and not self.is_inverse else ""
        is_empty = self.initial in (None, (), "", MISSING)
        return "" if is_empty else f"{self.initial:g}" if self.kind is float else str(self.initial)

    @property
    def description(self) -> str:
        """The help with bounds, variable and default."""
        default = self.default and f"default: {self.default}"
        facts = [fact for fact in (self.bounds, self.variable, default) if fact]
        return f"{self.help} ({'; '.join(facts)})" if facts else self.help

    def permits(self, value: Any) -> bool:
        """Whether a value lies within the bounds."""
        return (
            not self.bounds
            or (self.word is not None and value == self.word)
            or (
                isinstance(value, (int, float))
                and (self.at_least is None or value >= self.at_least)
                and (self.at_most is None or value <= self.at_most)
                and (self.above is None or value > self.above)
            )
        )

    def read(self, text: str) -> Any:
        """The value that a flag or a variable gives. Raises ValueError, which says what is permitted, or OSError."""
        if self.parse is not None:
            return self.parse(text)
        if self.word is not None and text in (self.word, *self.aliases):
            return self.word
        if self.kind is bool and text in ("0", "1"):
            return text == "1"
        with suppress(ValueError):
            if self.kind is not bool:
                return self.kind(text)
        wanted = {bool: "0 or 1", int: "a whole number", float: "a number"}.get(self.kind)
        if self.word is not None:
            wanted = f"{wanted} or {self.word}"
        raise ValueError(f"{text!r} is not {wanted or 'one of ' + ', '.join(map(str, self.kind))}")

    def words(self, value: Any) -> list[str]:
        """The words that set it on a command line; none where that changes nothing."""
        if value is None or self.flag is None or (self.kind is bool and value == self.initial):
            return []
        if self.kind is bool:
            return [f"--no-{self.flag[2:]}" if self.initial and not self.is_inverse else self.flag]
        return [word for each in (value if self.is_list else (value,)) for word in (self.flag, str(each))]


def setting(default: T, help: str, group: str = "", unit: str = "", **facts: Any) -> T:
    """A field with a setting; `facts` are fields of `Setting`."""
    made: T = field(default=default, metadata={"setting": Setting(help, group, unit, **facts)})
    return made


def same_as(owner: type, name: str, default: Any = MISSING, **changes: Any) -> Any:
    """A field with the setting of another class, and its default unless another one is given: None says that the other
    class decides."""
    source = settings_of(owner)[name]
    if default is None:
        changes = {"shows": source.default or None} | changes
    initial = source.initial if default is MISSING else default
    return field(default=initial, metadata={"setting": replace(source, source=source, **changes)})


def settings_of(owner: type) -> dict[str, Setting]:
    """The settings of a dataclass by name, in its order."""
    if owner not in _FOUND:
        hints = get_type_hints(owner)
        declared = [each for each in fields(owner) if "setting" in each.metadata]
        _FOUND[owner] = {each.name: _completed(each, hints[each.name], owner) for each in declared}
    return _FOUND[owner]


def _completed(made: Field[Any], hint: Any, owner: type) -> Setting:
    """The setting of a field, with what the field itself says."""
    kinds = [kind for kind in get_args(hint) if kind not in (type(None), ...)] or [hint]
    facts: dict[str, Any] = {
        "name": made.name,
        "kind": get_origin(kinds[0]) or kinds[0],
        "is_list": get_origin(hint) is tuple,
        "initial": made.default,
        "owner": owner,
    }
    known: Setting = made.metadata["setting"]
    return replace(known, flag=f"--{made.name.replace('_', '-')}" if known.flag == "" else known.flag, **facts)


def words_for(given: Any, *owners: type) -> list[str]:
    """The flags of these classes, for what `given` has of them through `same_as`."""
    pairs = [(each.source, getattr(given, name)) for name, each in settings_of(type(given)).items()]
    return [word for each, value in pairs if each and each.owner in owners for word in each.words(value)]


def check(owner: Any) -> None:
    """Raises SettingError for the first value that is not finite or outside its bounds."""
    for name, each in settings_of(type(owner)).items():
        value = getattr(owner, name)
        shown = f"{value:g}" if isinstance(value, float) else value
        if value is not None and not each.permits(value):
            raise SettingError(name, f"{each.title} is {shown}; permitted: {each.bounds}")
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingError(name, f"{each.title} is {shown}, which is not a finite number")


def check_each(name: str, flag: str, texts: Iterable[str], parse: Callable[[str], object]) -> None:
    """Raises SettingError for the first text of a repeated flag that `parse` refuses."""
    for text in texts:
        try:
            parse(text)
        except ValueError as error:
            raise SettingError(name, f"{flag}: {error}") from None


def from_environment(owner: type) -> dict[str, Any]:
    """Values by name of the fields whose variable is set. Raises SettingError."""
    values = {}
    for name, each in settings_of(owner).items():
        if each.variable and each.reads_variable and (text := os.environ.get(each.variable)):
            try:
                values[name] = each.read(text)
            except (ValueError, OSError) as error:
                raise SettingError(name, f"{each.variable}: {error}") from error
    return values


def from_mapping(owner: type, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Values by name of the fields that a configuration file or else the environment sets. Raises SettingError."""
    known = settings_of(owner)
    if unknown := sorted(given.keys() - known.keys()):
        message = f"unknown {what}: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        raise SettingError(unknown[0], message)
    values = from_environment(owner)
    for name, value in given.items():
        values[name] = tuple(value) if isinstance(value, list) else value
        if isinstance(value, str) and issubclass(known[name].kind, Enum):
            values[name] = known[name].read(value)
    return values


def make_parser(prog: str, description: str | None, *owners: type) -> argparse.ArgumentParser:
    """A parser of the flags of these classes. A flag that several of them have is one flag for all."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    groups: dict[str, Any] = {"": parser}
    hidden: dict[argparse.Action, str] = {}
    for name, each in _all(owners).items():
        if each.flag is not None:
            if each.group not in groups:
                groups[each.group] = parser.add_argument_group(each.group)
            action = groups[each.group].add_argument(each.flag, dest=name, **_argument(each))
            action.help = each.description.replace("%", "%%")
            if each.is_advanced:
                hidden[action], action.help = action.help, argparse.SUPPRESS
    try:
        parser.set_defaults(**{name: value for owner in owners for name, value in from_environment(owner).items()})
    except SettingError as error:
        parser.error(error.message)

    class ShowAll(argparse.Action):
        def __call__(self, *_: object) -> NoReturn:
            for action, text in hidden.items():
                action.help = text
            parser.print_help()
            parser.exit()

    if hidden:
        help_all = "show the flags of benchmarks and tests, too, and exit"
        parser.add_argument("--help-all", action=ShowAll, nargs=0, help=help_all)
    return parser


def _argument(each: Setting) -> dict[str, Any]:
    """Keywords of `add_argument`, but for the help."""
    if each.kind is bool:
        switch = "store_false" if each.is_inverse else "store_true"
        is_switch = each.is_inverse or not each.initial
        return {"default": each.initial, "action": switch if is_switch else argparse.BooleanOptionalAction}

    def read(text: str) -> Any:
        try:
            return each.read(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    choices = f"{{{','.join(choice.value for choice in each.kind)}}}" if issubclass(each.kind, Enum) else ""
    told = {"type": read, "metavar": choices or each.unit.upper() or "TEXT"}
    if each.is_list:
        return told | {"action": "append", "default": list(each.initial)}
    return told | ({"required": True} if each.initial is MISSING else {"default": each.initial})


def from_flags(owner: type[T], given: argparse.Namespace, **others: Any) -> T:
    """The settings that a parser of `make_parser` has read; `others` are no flags. Raises SettingError."""
    values = {name: getattr(given, name) for name, each in settings_of(owner).items() if each.flag is not None}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return owner(**(values | others))


def _all(owners: Iterable[type]) -> dict[str, Setting]:
    """The settings of a process. Where several of its classes have a field of one name, it is one setting."""
    return {name: each for owner in owners for name, each in settings_of(owner).items()}
