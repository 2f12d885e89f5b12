"""Addresses as text: what is joined can be taken apart again, and what is ambiguous is refused."""

from __future__ import annotations

import errno
import socket

import pytest

from outrider import addresses
from outrider.addresses import (
    bare_host,
    bound_socket,
    is_unspecified,
    join_address,
    own_host_towards,
    split_address,
    with_port,
)
from tests.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.2", "10.0.0.2:50051"),
        ("worker.internal", "worker.internal:50051"),
        ("fd00::1", "[fd00::1]:50051"),
        ("[fd00::1]", "[fd00::1]:50051"),
        ("::", "[::]:50051"),
    ],
)
def test_an_ipv6_host_is_in_brackets_before_a_port(host: str, address: str) -> None:
    assert join_address(host, 50051) == address
    assert split_address(address) == (bare_host(host), 50051)


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "nowhere:", ":1", "nowhere:x", "nowhere:-1", "nowhere:65536", "fd00::1:50051", "[::1]", "[]:1"],
)
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)


@pytest.mark.parametrize(
    ("announced", "address"),
    [
        ("10.0.0.2", "10.0.0.2:50051"),
        ("10.0.0.2:7000", "10.0.0.2:7000"),
        ("worker.internal", "worker.internal:50051"),
        ("fd00::1", "[fd00::1]:50051"),
        ("fd00:0:0:0:0:0:0:1", "[fd00:0:0:0:0:0:0:1]:50051"),
        ("[fd00::1]", "[fd00::1]:50051"),
        ("[fd00::1]:7000", "[fd00::1]:7000"),
    ],
)
def test_an_address_without_a_port_gets_the_servers_own(announced: str, address: str) -> None:
    assert with_port(announced, 50051) == address


@pytest.mark.parametrize("announced", ["fd00::1:50051", "1:2:3:4:5:6:7:8:50051", "fd00::1:8000"])
def test_a_bare_ipv6_address_with_a_port_is_refused_with_the_way_to_write_it(announced: str) -> None:
    """As Kubernetes writes it where a manifest says $(POD_IP):8000 and pods have IPv6 addresses."""
    host, _, port = announced.rpartition(":")
    with pytest.raises(ValueError, match=r"\[") as caught:
        with_port(announced, 8000)
    assert f"[{host}]:{port}" in str(caught.value)


@pytest.mark.parametrize("announced", ["::", "[::]:7000", "0.0.0.0", "0.0.0.0:7000"])
def test_all_addresses_of_a_machine_are_nobodys(announced: str) -> None:
    assert is_unspecified(announced.removesuffix(":7000"))
    with pytest.raises(ValueError, match="nobody can reach"):
        with_port(announced, 50051)


def accepts(listener: socket.socket, host: str) -> bool:
    try:
        with socket.create_connection((host, listener.getsockname()[1]), timeout=10):
            return True
    except OSError:
        return False


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_all_addresses_are_those_of_both_families(host: str) -> None:
    with bound_socket(host, 0) as listener:
        listener.listen()
        assert accepts(listener, "::1")
        assert accepts(listener, "127.0.0.1")


@needs_ipv6
def test_one_address_is_one_address() -> None:
    with bound_socket("::1", 0) as listener:
        listener.listen()
        assert accepts(listener, "::1")
        assert not accepts(listener, "127.0.0.1")


def test_a_machine_without_ipv6_listens_on_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = addresses._bound

    def refuse_ipv6(family: int, where: tuple[str | int, ...], *, is_reusing: bool) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return bind(family, where, is_reusing=is_reusing)

    monkeypatch.setattr(addresses, "_bound", refuse_ipv6)
    with bound_socket("::", 0) as listener:
        listener.listen()
        assert accepts(listener, "127.0.0.1")


def test_a_port_that_is_taken_is_refused() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", taken.getsockname()[1])


def test_the_own_host_is_that_on_the_way_to_another() -> None:
    assert own_host_towards("127.0.0.1:7001") == "127.0.0.1"
    with pytest.raises(ValueError, match="host:port"):
        own_host_towards("127.0.0.1")


@needs_ipv6
def test_the_own_host_on_the_way_to_an_ipv6_address_is_one() -> None:
    assert own_host_towards("[::1]:7001") == "::1"
