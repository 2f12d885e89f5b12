"""Checks that what is relied on of another engine is there, by name. Imports the engine only when it is checked."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any


def _found(path: str) -> Any:
    """The class, function or module at a path. Raises ImportError and AttributeError."""
    module, _, name = path.rpartition(".")
    owner = importlib.import_module(module)
    return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(path)


def missing(
    methods: Mapping[str, Mapping[str, tuple[str, ...]]], sources: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yields by name what is not there; nothing where all is.

    methods: by class, its methods with their first parameters; () for what is no method or may be set on the instance.
    sources: by class, function or module, parts that its source must contain.
    """
    for path, members in methods.items():
        try:
            owner = _found(path)
        except (ImportError, AttributeError):
            yield path
            continue
        for name, parameters in members.items():
            member = inspect.getattr_static(owner, name, None)
            member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if member is None:
                yield f"{path}.{name}"
            elif parameters and tuple(inspect.signature(member).parameters)[: len(parameters)] != parameters:
                yield f"{path}.{name}({', '.join(parameters)}, …)"
    for path, parts in sources.items():
        try:
            source = inspect.getsource(_found(path))
        except (ImportError, AttributeError, OSError):
            yield path
            continue
        yield from (f"{part} in {path}" for part in parts if part not in source)
