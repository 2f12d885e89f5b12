"""Checks that the Python programs share: each one is a function, its result one line of JSON on standard output."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

_failed: list[str] = []
_runner = asyncio.Runner()  # one event loop for all checks, because clients keep connections


def check(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Runs the function at once and prints whether it succeeded; coroutine functions share one event loop."""

    def run(function: Callable[[], Any]) -> Callable[[], Any]:
        error = None
        try:
            result = function()
            if inspect.iscoroutine(result):
                _runner.run(result)
        except Exception as failure:
            _failed.append(name)
            error = f"{type(failure).__name__}: {failure}"
            traceback.print_exc()
        print(json.dumps({"check": name, "ok": error is None} | ({"error": error} if error else {})), flush=True)
        return function

    return run


def equal(actual: object, expected: object) -> None:
    """Fails with both values if they differ."""
    assert actual == expected, f"{actual!r} instead of {expected!r}"


def finish() -> None:
    """Ends the program: status 1 if a check failed."""
    _runner.close()
    sys.exit(1 if _failed else 0)
