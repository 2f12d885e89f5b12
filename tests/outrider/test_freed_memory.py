from __future__ import annotations

import platform

import pytest

from outrider.local import freed_memory
from outrider.local.freed_memory import FreedMemory

MIB = 1 << 20


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The resident bytes that the next looks find, and None for each time that memory was returned."""
    found: list[int] = []
    monkeypatch.setattr(freed_memory, "_resident_bytes", lambda: found.pop(0))
    monkeypatch.setattr(freed_memory, "return_freed_memory", lambda: None)
    return found


def test_it_is_returned_where_the_process_has_grown_since_the_last_time(sizes: list[int]) -> None:
    sizes += [200 * MIB, 210 * MIB, 300 * MIB, 290 * MIB, 300 * MIB, 400 * MIB, 150 * MIB, 180 * MIB, 180 * MIB]
    memory = FreedMemory()
    assert [memory.return_some() for _ in range(5)] == [False, True, False, True, True]
    assert not sizes


def test_where_the_size_is_not_known_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_resident_bytes", lambda: 0)
    assert not FreedMemory().return_some()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")
def test_the_size_is_known_here() -> None:
    before = freed_memory._resident_bytes()
    block = b"x" * (64 * MIB)
    assert freed_memory._resident_bytes() - before > 32 * MIB
    assert len(block) == 64 * MIB
    freed_memory.return_freed_memory()
