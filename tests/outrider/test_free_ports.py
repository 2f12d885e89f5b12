"""Ports for listeners that are told theirs before they bind."""

from __future__ import annotations

import socket

import pytest

from outrider.local import free_ports as module
from outrider.local.free_ports import free_ports


def test_they_differ_and_no_outgoing_connection_gets_them() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert max(ports) < 32_768


def test_those_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports(1)
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(module, "_PORTS", range(first, first + 40))
        monkeypatch.setattr(module, "_TRIES_MAX", 40)
        assert first not in free_ports(1)
        monkeypatch.setattr(module, "_PORTS", range(first, first + 1))
        monkeypatch.setattr(module, "_TRIES_MAX", 1)
        with pytest.raises(OSError, match="in use"):
            free_ports(1)


def test_those_that_are_meant_for_others_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports(1)
    monkeypatch.setattr(module, "_PORTS", range(first, first + 1))
    assert free_ports(1) == [first]
    with pytest.raises(OSError, match="none is left"):
        free_ports(1, besides=(first,))
