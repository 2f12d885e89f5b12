"""Bounds of what a chat template may do: it comes with a model's folder, and its variables come from clients.

Jinja's sandbox keeps a template from everything outside; it lets it run for ever, and take all memory: loops in loops,
text times a number, one list that holds another a million times. So `BoundedEnvironment` counts steps, and a template
that takes too many is ended. A step is about a microsecond: one turn of a loop, one call, one operator, 64 characters
or 32 entries that are read or made. Hence the number of steps bounds both time and memory. It is the same for the same
conversation, however busy the machine is.

Invariant: every operation of a template whose cost can grow with its operands is counted, before it is done where its
result can be larger than its operands. These are: turns of loops (with the size of the body, whose texts are output
and whose lists are made in each), calls of macros and methods, filters and tests, arithmetic, concatenation, slices,
output, and comparisons and keys of nested lists, which Python compares element by element without a pause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import islice
from typing import Any, Final, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS_MAX: Final = 2_000_000
"""Steps of one rendering: a megabyte in a thousand messages takes 50,000, a complex template some hundred a message."""
TEMPLATE_CHARS_MAX: Final = 1 << 20
"""Longest template; the longest of known models has 20,000 characters."""
_NUMBER_MAX: Final = 100_000
"""Largest number that a method or a filter takes, as of the entries of a range."""
_BITS_MAX: Final = 4096
_CHARS_A_STEP: Final = 64
_ENTRIES_A_STEP: Final = 32
_INDENT_MAX: Final = 16
_ESCAPED_CHARS: Final = 6
"""Most characters that a filter makes of one, such as \\u0007."""
_TEXT: Final = (str, bytes)
_ENTRIES: Final = (list, tuple, dict, set, frozenset)
_PERCENT_FIELD: Final = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*")
_BRACE_FIELD: Final = re.compile(r"\{[^{}]*\{?")

# Neither a chat format nor, by their number of passes over a text, for text of any length.
_NOT_OFFERED: Final = ("urlize", "wordwrap", "striptags", "xmlattr", "pprint", "lipsum")
# They hand entries on, and neither write nor compare them.
_LAZY: Final = frozenset(
    {
        *("length", "count", "list", "first", "last", "map", "select", "selectattr", "reject", "rejectattr"),
        *("default", "d", "items", "reverse", "batch", "slice", "attr", "defined", "undefined", "none"),
        *("mapping", "sequence", "iterable", "boolean", "true", "false", "number", "integer", "float", "callable"),
    }
)


class TemplateLimit(jinja2.TemplateError):
    """A template takes too many steps."""


class Steps:
    """The steps that a rendering has left."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, number: int) -> None:
        """Raises TemplateLimit if there are not so many."""
        self.left -= number
        if self.left < 0:
            raise TemplateLimit("it takes too long, or too much memory")


_steps: ContextVar[Steps] = ContextVar("steps")


@contextmanager
def at_most(num_steps: int) -> Iterator[None]:
    """Bounds what is compiled and rendered inside."""
    token = _steps.set(Steps(num_steps))
    try:
        yield
    finally:
        _steps.reset(token)


def _take(number: int = 1) -> None:
    steps = _steps.get(None)
    if steps is None:
        raise TemplateLimit("it runs without a bound")  # an error of ours
    steps.take(number)


def _size(value: Any) -> int:
    """The steps that reading a value once takes, without what is nested in it."""
    if isinstance(value, _TEXT):
        return len(value) // _CHARS_A_STEP
    if isinstance(value, _ENTRIES):
        return len(value) // _ENTRIES_A_STEP
    if isinstance(value, range):
        return len(value)  # each number is made
    if isinstance(value, int) and value.bit_length() > _BITS_MAX:
        raise TemplateLimit("a number is too large")
    return 0


def _weigh(value: Any) -> int:
    """Takes steps for a value and all that is nested in it, as often as it occurs there; returns its characters."""
    num_chars, rest = 0, [value]
    while rest:
        each = rest.pop()
        _take(_size(each))
        if isinstance(each, _TEXT):
            num_chars += len(each)
        elif isinstance(each, int):
            num_chars += each.bit_length() // 3 + 1
        elif isinstance(each, _ENTRIES):
            _take(len(each))
            rest += each
            if isinstance(each, dict):
                rest += each.values()
    return num_chars


def _numbers(values: Iterable[Any]) -> int:
    """The sum of the numbers among arguments. Raises TemplateLimit for one that is too large."""
    found = [abs(value) for value in values if isinstance(value, int)]
    if max(found, default=0) > _NUMBER_MAX:
        raise TemplateLimit(f"a number is larger than {_NUMBER_MAX}")
    return sum(found)


def _listed(values: Any) -> Any:
    """A bounded list of what can be read only once; other values as they are."""
    if not isinstance(values, Iterator):
        return values
    found = list(islice(values, _NUMBER_MAX + 1))
    _take(len(found))
    if len(found) > _NUMBER_MAX:
        raise TemplateLimit(f"a list has more than {_NUMBER_MAX} entries")
    return found


def _take_written(template: str | bytes, values: Any, field: re.Pattern[str]) -> None:
    """Takes steps for the text that `%` or `format` makes: each field may show all values, as wide as the template
    says. Raises TemplateLimit for a width that is itself a value."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    fields = field.findall(text.replace("{{", ""))
    if any("*" in each or "{" in each[1:] for each in fields):
        raise TemplateLimit("the width of a field is computed")
    width = _numbers(int(digits[:9]) for each in fields for digits in re.findall(r"\d+", each))
    _take((len(template) + (len(fields) + 1) * _weigh(values) + width) // _CHARS_A_STEP)


def _take_replaced(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    if isinstance(text, _TEXT) and type(text) is type(old) is type(new):
        _take((text.count(old) * len(new) + len(text)) // _CHARS_A_STEP)  # type: ignore[arg-type]


def _take_joined(items: Any, separator: Any) -> None:
    num_items = len(items) if hasattr(items, "__len__") else 0
    _take((_weigh(items) + num_items * (len(separator) if isinstance(separator, _TEXT) else 0)) // _CHARS_A_STEP)


def _before_method(text: str | bytes, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Takes the steps of a text's method; returns its arguments."""
    if name == "replace":
        _take_replaced(text, *arguments)
    elif name == "join" and arguments:
        arguments = (_listed(arguments[0]), *arguments[1:])
        _take_joined(arguments[0], text)
    elif name == "expandtabs":
        _take(len(text) * (_numbers(arguments) + 8) // _CHARS_A_STEP)
    elif name == "translate":
        _take(len(text) * (_weigh(arguments) + 1) // _CHARS_A_STEP)
    elif "split" in name:
        separator = arguments[0] if arguments else None
        if isinstance(separator, _TEXT) and type(separator) is type(text):
            num_pieces = text.count(separator)  # type: ignore[arg-type]
        else:
            num_pieces = len(text) // 2  # each may be one character
        _take(num_pieces // 2 + len(text) // _CHARS_A_STEP)
    return arguments


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that takes steps."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        value, *arguments = (_listed(each) for each in given[num_passed:])
        others = (*arguments, *named.values())
        _take(1 + _size(value) + sum(map(_size, others)) + _numbers(others) // 2)
        if name not in _LAZY:
            num_chars = _weigh(value) + _weigh(others)
            if name == "join":
                _take_joined(value, others[0] if others else "")
            elif name == "replace":
                _take_replaced(str(value), *others)
            elif name == "format":
                _take_written(str(value), others, _PERCENT_FIELD)
            elif name == "indent":
                _take(str(value).count("\n") * (_weigh(others) + _numbers(others)) // _CHARS_A_STEP)
            elif name == "tojson" and (_weigh(others) > _CHARS_A_STEP or _numbers(others) > _INDENT_MAX):
                raise TemplateLimit(f"an indentation is wider than {_INDENT_MAX}")
            _take(_ESCAPED_CHARS * num_chars // _CHARS_A_STEP)
        found = function(*given[:num_passed], value, *arguments, **named)
        _take(_size(found))
        return found

    return bounded


class _BoundedFunctions(dict[str, Callable[..., Any]]):
    """Filters or tests by name, each bounded."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, function))


def _all_bounded(functions: Mapping[str, Any]) -> _BoundedFunctions:
    found = _BoundedFunctions()
    for name, function in functions.items():
        found[name] = function
    return found


def _turns(values: Any, size: int) -> Iterator[Any]:
    """Yields the entries of a loop, and takes the steps of its body for each."""
    for value in values:
        _take(1 + size)
        yield value


def _joined(values: Iterable[Any]) -> str:
    """Joins operands, as `~` does."""
    _take(1 + _weigh(values) // _CHARS_A_STEP)
    return "".join(map(str, values))


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    _take(1 + _size(value))
    return value[start:stop:step]


def _compared(value: Any) -> Any:
    """An operand of a comparison, which goes through all that is nested in it."""
    if isinstance(value, _ENTRIES):
        _weigh(value)
    else:
        _take(_size(value))
    return value


def _key(value: Any) -> Any:
    """A key, whose hash goes through all that is nested in it."""
    if isinstance(value, tuple):
        _weigh(value)
    return value


@jinja2.pass_context  # with the context, so that nothing is output while the template is compiled
def _output(_: Context, value: Any) -> Any:
    _take(1 + _weigh(value) // _CHARS_A_STEP)
    return value


_OPERATIONS: Final[dict[str, Any]] = {
    "_turns": _turns,
    "_joined": _joined,
    "_sliced": _sliced,
    "_compared": _compared,
    "_key": _key,
}


def _applied(name: str, value: nodes.Node, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(cast(nodes.Expr, value), name, list(arguments), [], None, None, lineno=value.lineno)


def _static_size(node: nodes.Node) -> int:
    """Steps for what is written out in a part of a template: its texts, its lists and their entries."""
    size = 0
    for each in node.find_all(nodes.Node):
        text = each.data if isinstance(each, nodes.TemplateData) else getattr(each, "value", None)
        size += 4 + (len(text) if isinstance(text, str) else 0)
    return size // _CHARS_A_STEP


class _Counting(NodeTransformer):
    """Puts our operations in the place of those that Jinja compiles to Python's own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = _static_size(node)
        self.generic_visit(node)
        node.iter = _applied("_turns", node.iter, nodes.Const(size))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _applied("_joined", nodes.List(node.nodes, lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        return _applied("_sliced", node.node, *(part or nodes.Const(None) for part in parts))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(each, nodes.Const) for each in (node.expr, *(one.expr for one in node.ops))):
            node.expr = _applied("_compared", node.expr)
            for one in node.ops:
                one.expr = _applied("_compared", one.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _applied("_key", node.key)
        return node


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with bounds. It renders inside of `at_most` alone."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named, optimized=False, finalize=_output)
        for name in _NOT_OFFERED:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.filters: Any = _all_bounded(self.filters)
        self.filters.update(_OPERATIONS)
        self.tests: Any = _all_bounded(self.tests)
        self._size = 0  # of the template, in steps

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > TEMPLATE_CHARS_MAX:
            raise TemplateLimit(f"it is longer than {TEMPLATE_CHARS_MAX} characters")
        parsed = super()._parse(source, name, filename)
        self._size = _static_size(parsed)
        _Counting().visit(parsed)
        return parsed

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _key(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _take(1 + _size(left) + _size(right))
        if operator == "%" and isinstance(left, _TEXT):
            _take_written(left, right, _PERCENT_FIELD)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and isinstance(other, (*_TEXT, *_ENTRIES)):
                    _take(one * len(other) // (_CHARS_A_STEP if isinstance(other, _TEXT) else _ENTRIES_A_STEP))
        elif operator == "**" and isinstance(left, int) and left.bit_length() * right > _BITS_MAX:
            raise TemplateLimit("a number is too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        @wraps(safe)
        def bounded(*arguments: Any, **named: Any) -> str:
            _take_written(value.__self__, (*arguments, *named.values()), _BRACE_FIELD)
            return safe(*arguments, **named)

        return bounded

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **named: Any) -> Any:
        owner, others = getattr(__obj, "__self__", None), (*arguments, *named.values())
        _take(1 + _size(owner) + sum(map(_size, others)))
        if isinstance(__obj, Macro | BlockReference):
            _take(__self._size)
        elif isinstance(__obj, LoopContext):  # of a loop that is recursive
            arguments = (_turns(arguments[0], __self._size), *arguments[1:])
        elif isinstance(owner, _TEXT):
            _take(_numbers(others) // _CHARS_A_STEP)
            arguments = _before_method(owner, __obj.__name__, arguments)
        elif isinstance(owner, (*_ENTRIES, int, float)):
            _numbers(others)
            if isinstance(owner, list | tuple):  # `index` and `count` compare
                _weigh((owner, arguments))
        found = super().call(__context, __obj, *arguments, **named)
        _take(_size(found))
        return found
