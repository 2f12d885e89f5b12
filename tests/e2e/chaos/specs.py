"""The same process with something else about it: another environment, a later start. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outrider.local.child_spec import ChildSpec


def with_environment(spec: ChildSpec, more: Mapping[str, str]) -> ChildSpec:
    """With these variables on top of its own."""
    return replace(spec, environment={**spec.environment, **more})


def delayed(spec: ChildSpec, seconds: float) -> ChildSpec:
    """One that does nothing for so long after it was started; whoever ends it meanwhile ends it."""
    words = ("/bin/sh", "-c", f'sleep {seconds:.3f}; exec "$@"', "sh", *spec.command)
    return replace(spec, command=words, ready_timeout_s=spec.ready_timeout_s + seconds)
