"""Fake children, and a way to wait for what must become true."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from outrider.local.child_spec import ChildSpec

FAKE_CHILD = Path(__file__).parent / "fake_child.py"


def fake_command(role: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", str(FAKE_CHILD), role, *options)


def fake_spec(name: str, *options: str, ready_timeout_s: float = 10.0, stop_grace_s: float = 5.0) -> ChildSpec:
    role = name.partition("-")[0]
    return ChildSpec(
        name, role, fake_command(role, *options), ready_timeout_s=ready_timeout_s, stop_grace_s=stop_grace_s
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def expect_eventually(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Returns once `condition()` holds; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)
