"""Messages of errors quote what was sent and stay as short as a header has to be; kept errors keep nothing else."""

from __future__ import annotations

import ast
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import MESSAGE_BYTES_MAX, InvalidRequest, NotFound, detached

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600", "\ud800"])
def test_a_long_message_loses_its_middle(character: str) -> None:
    error = NotFound(f"no model {character * 1_000_000} here", "model")
    assert len(error.message.encode()) <= MESSAGE_BYTES_MAX
    assert error.message.startswith("no model")
    assert error.message.endswith("here")
    assert str(error) == error.message
    assert pickle.loads(pickle.dumps(error)).message == error.message


def test_a_short_message_stays_as_it_is() -> None:
    assert InvalidRequest("stop", "stop is \U0001f600").message == "stop is \U0001f600"


def test_a_detached_error_keeps_nothing_alive() -> None:
    class Large:
        pass

    def fail() -> None:
        large = Large()
        alive.append(weakref.ref(large))
        try:
            raise KeyError("behind it")
        except KeyError as behind:
            raise InvalidRequest("stop", "no") from behind

    alive: list[weakref.ref[Large]] = []
    kept: list[InvalidRequest] = []
    try:
        fail()
    except InvalidRequest as error:
        kept.append(detached(error))
    assert alive[0]() is None  # by counting references alone: the garbage collector has not come
    assert (kept[0].parameter, kept[0].message) == ("stop", "no")


KEEPING = {"append", "appendleft", "add", "put", "put_nowait", "setdefault", "set_exception", "insert"}
KEPT_WITH_TRACEBACK = {
    "coordinator/intake/worker_threads.py": "raised again by the caller that waits for its work",
    "coordinator/service/prompts.py": "raised again by the reader of the same request, whose log has the traceback",
    "outrider/worker/loading_thread.py": "raised again by who waits for the model; the process ends",
}


def test_errors_are_kept_without_what_their_tracebacks_refer_to() -> None:
    """An error is caught under a name that ends with the handler. Where it gets another one, or goes into a container
    or another object, its frames would live as long: `detached` goes there, or its message."""
    packages = ("coordinator", "outrider", "target_worker", "draft_worker")
    modules = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(modules) > 300
    found = {
        f"{path.relative_to(ROOT)}": [f"{node.lineno}: {ast.unparse(node)}" for node in nodes]
        for path in modules
        if (nodes := list(_keeping(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found.keys() == KEPT_WITH_TRACEBACK.keys(), found


def test_the_search_finds_each_way_to_keep_an_error() -> None:
    for kept in (
        "self.last = {}", "last = last or {}", "kept[key] = {}", "return Verdict({}, 1.0)", "return {}, 1.0",
        "future.set_exception({})", "lost.append(Lost(1, {}))", "return [Refused({})]", "kept = {} if last else None",
    ):  # fmt: skip
        for value, num_found in (("error", 1), ("detached(error)", 0), ("str(error)", 0), ("error.message", 0)):
            code = f"def one():\n try:\n  pass\n except ValueError as error:\n  {kept.format(value)}\n"
            assert len(list(_keeping(ast.parse(code)))) == num_found, code


def _keeping(tree: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for node in ast.walk(ast.Module(handler.body, [])):
            value: ast.expr | None = None
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
                value = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEEPING:
                value = node.args[-1] if node.args else None
            if value is not None and isinstance(node, ast.stmt | ast.expr) and _refers(value, handler.name):
                yield node


def _refers(value: ast.expr, name: str) -> bool:
    """Whether a value is what the name stands for, or a choice, a container or a new object with it."""
    if isinstance(value, ast.Name):
        return value.id == name
    parts: list[ast.expr] = []
    if isinstance(value, ast.BoolOp):
        parts = value.values
    elif isinstance(value, ast.Tuple | ast.List | ast.Set):
        parts = value.elts
    elif isinstance(value, ast.Dict):
        parts = value.values
    elif isinstance(value, ast.IfExp):
        parts = [value.body, value.orelse]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id[:1].isupper():
        parts = [*value.args, *(each.value for each in value.keywords)]  # a class
    return any(_refers(part, name) for part in parts)
