"""Hosts and ports as text: joined, taken apart, and bound to try them.

An IPv6 host stands in brackets before a port, [fd00::1]:50051, and bare where it is alone, fd00::1. The host `::` means
all addresses of the machine, IPv6 and IPv4; `0.0.0.0` means those of IPv4.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Final

PORT_MAX: Final = 65535
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_NO_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def bare_host(host: str) -> str:
    """The host without brackets, as sockets want it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets, and port. Raises ValueError for anything but host:port and [host]:port."""
    before, colon, port = address.rpartition(":")
    host = bare_host(before)
    is_bare_ipv6 = ":" in before and host == before
    if not colon or not host or is_bare_ipv6 or not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
        raise ValueError(f"{address!r} is not host:port, such as 10.0.0.2:50051 or [fd00::2]:50051")
    return host, int(port)


def with_port(address: str, port: int) -> str:
    """The address of a server, host:port, from one with a port or, where `port` is the server's own, without.

    So a name and a bare IPv6 address need none. A bare IPv6 address that ends like a port is refused: it cannot be told
    from one without brackets before a port. Raises ValueError.
    """
    host = bare_host(address)
    is_ipv6 = _is_ipv6(host)
    if is_ipv6 and host == address and host.rpartition(":")[2] == str(port):
        before = host.rpartition(":")[0]
        raise ValueError(f"{address} could end with a port; write [{before}]:{port} or [{address}]")
    if is_ipv6 or ":" not in address:
        found = host, port
    elif _is_ipv6(address.rpartition(":")[0]):
        before, _, given = address.rpartition(":")
        raise ValueError(f"an IPv6 address before a port stands in brackets; write [{before}]:{given} or {before}")
    else:
        found = split_address(address)
    if not found[0] or not found[1]:
        raise ValueError(f"{address!r} has no host, or the port 0")
    if is_unspecified(found[0]):
        raise ValueError(f"nobody can reach {found[0]}, which means all addresses of a machine")
    return join_address(*found)


def own_host_towards(address: str) -> str:
    """This machine's own IP address on the way to host:port, an IP address. Sends nothing. Raises OSError."""
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def is_unspecified(host: str) -> bool:
    """Whether it means all addresses of a machine."""
    try:
        return ipaddress.ip_address(bare_host(host)).is_unspecified
    except ValueError:
        return False


def is_ip_address(host: str) -> bool:
    """Whether it is an address itself, rather than a name."""
    try:
        ipaddress.ip_address(bare_host(host).partition("%")[0])
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: not this machine's, not a private network's, not the
    metadata service's of a cloud, and no IPv6 address that stands for such an IPv4 address."""
    found = ipaddress.ip_address(bare_host(address).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
        if found.ipv4_mapped is not None:
            return True
    return found.is_global and not found.is_multicast


def bound_socket(host: str, port: int, *, is_reusing: bool = True) -> socket.socket:
    """A TCP socket that is bound and does not listen yet; of a name's addresses, one of IPv4 first. Raises OSError.

    is_reusing: connections of a former server that linger in TIME_WAIT do not count. `::` takes IPv4 connections as
    well, and is 0.0.0.0 on a machine without IPv6.
    """
    host = bare_host(host)
    if host != "::":
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
        return _bound(family, where, is_reusing=is_reusing)
    try:
        return _bound(socket.AF_INET6, ("::", port), is_reusing=is_reusing)
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
        return _bound(socket.AF_INET, ("0.0.0.0", port), is_reusing=is_reusing)


def _bound(family: int, where: tuple[str | int, ...] | tuple[int, bytes], *, is_reusing: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if is_reusing:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if where[0] == "::":
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(where)
    except OSError:
        made.close()
        raise
    return made


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
