"""Grammars compiled for tests that do not run on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from outrider.grammar import GrammarCompiler, GrammarState
from outrider.sampling_params import GrammarSpec

_T = TypeVar("_T")


def compiled(compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarState:
    return _finished(compiler.compile_async(spec))


def asked_by(owner: str, compiler: GrammarCompiler, spec: GrammarSpec) -> GrammarState:
    return _finished(compiler.compile_async(spec, owner))


def check(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    _finished(compiler.check_async(spec))


def _finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Waits on a thread of its own, because the caller's may have a running loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
