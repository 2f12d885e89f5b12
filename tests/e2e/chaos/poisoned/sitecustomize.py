"""Preloaded into the target workers of a chaos run: a sequence with a marker in it kills the process that computes it.

Python imports a module of this name at its start where it finds one on its path, so that nothing of the product has to
know. The variable CHAOS_POISON is a JSON list of [marker token ids, number of steps]. A process dies of SIGKILL, as
from a defect of a kernel, in a step with a sequence whose tokens contain the marker: after so many that decided tokens
there, 0 for the first that it is part of.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "target_worker.runner"


class Poison:
    """Markers that kill this process, and how many steps sequences with one have made here."""

    def __init__(self, recipes: Sequence[tuple[Sequence[int], int]]) -> None:
        self._recipes = [(list(marker), num_steps) for marker, num_steps in recipes]
        self._num_steps: Counter[str] = Counter()  # that decided tokens, by session

    def kills(self, session_id: str, token_ids: Sequence[int], num_decided: int) -> bool:
        """Whether a step with this part in it is the last of the process."""
        for marker, num_steps in self._recipes:
            if _contains(token_ids, marker):
                if self._num_steps[session_id] >= num_steps:
                    return True
                self._num_steps[session_id] += num_decided > 0
        return False


def _contains(token_ids: Sequence[int], marker: Sequence[int]) -> bool:
    first, length = marker[0], len(marker)
    return any(
        token_id == first and list(token_ids[at : at + length]) == marker for at, token_id in enumerate(token_ids)
    )


class _Patching(MetaPathFinder):
    """Changes the module when it is imported, which is after this one."""

    def __init__(self, poison: Poison) -> None:
        self._poison = poison

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _poison(module, self._poison)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _poison(module: Any, poison: Poison) -> None:
    run_step = module.run_step

    def run_poisoned(engine: Any, step: Any) -> Any:
        for item in step.items:
            if poison.kills(item.session_id, item.context.token_ids, item.num_decided):
                os.kill(os.getpid(), signal.SIGKILL)
        return run_step(engine, step)

    module.run_step = run_poisoned


if "CHAOS_POISON" in os.environ:
    sys.meta_path.insert(0, _Patching(Poison(json.loads(os.environ["CHAOS_POISON"]))))
