"""The engine of a target worker on vLLM, over a stand-in for vLLM's own."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

import pytest

from target_worker.vllm import engine as module
from target_worker.vllm.engine import EngineLost, VllmEngine


class EngineDeadError(Exception):
    """Stands for vLLM's."""


class SilentLlm:
    """It never answers, as vLLM's does whose engine process died over the question."""

    errored = False

    async def is_paused(self) -> bool:
        await asyncio.Event().wait()
        return False


@pytest.fixture(autouse=True)
def exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("vllm.v1.engine.exceptions")
    made.EngineDeadError = EngineDeadError
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)


async def test_a_ping_that_the_engine_dies_over_ends() -> None:
    llm = SilentLlm()
    description: Any = None
    asking = asyncio.create_task(VllmEngine(llm, description).ping())
    await asyncio.sleep(0)
    assert not asking.done()
    llm.errored = True
    with pytest.raises(EngineLost, match="has ended"):
        await asking


async def test_a_ping_to_a_dead_engine_says_so() -> None:
    class DeadLlm(SilentLlm):
        async def is_paused(self) -> bool:
            raise EngineDeadError

    description: Any = None
    with pytest.raises(EngineLost, match="has ended"):
        await VllmEngine(DeadLlm(), description).ping()
