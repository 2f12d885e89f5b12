"""Stands in for torchvision, whose published build does not load beside torch's CPU build. No test processes images.

SGLang imports many parts of it when it starts: each is a module whose names can be imported, and do nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _Name:
    """Anything that is imported from here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name()


class _Parts(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of torchvision."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _found  # type: ignore[method-assign]


def _found(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name()


__getattr__ = _found
sys.meta_path.append(_Parts())
