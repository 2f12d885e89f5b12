"""Takes the place of the HAProxy program that Ray Serve starts, puts its configuration right and becomes it.

    python -I -S haproxy_launcher.py HAPROXY HOST FRONTENDS HAPROXY'S ARGUMENTS...

Serve decides what stands in the configuration, and has it listen for the public, for its statistics and for
Prometheus on the address that replicas listen on too, or on all. Here only the two public listeners, those whose
ports FRONTENDS names ("8000,9000"), take HOST, and everything else the loopback. What is not understood is an error:
better no proxy than one open to more than was asked for.

Data is not spliced past HAProxy: where it may be, HAProxy 2.8 stops reading from a client that waits for an answer on
a connection it had used before, does not see it leave, and the workers generate the whole text for nobody.

The process dies with the one that started it, as no part of a Ray system may outlive the rest.

Only the standard library's core: the file runs by itself, without site packages, in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys

LOOPBACK = "127.0.0.1"
_BIND = re.compile(r"^(\s*bind\s+)(\S*):(\d+)(.*)$", re.MULTILINE)
_SPLICE = re.compile(r"^\s*option\s+splice-\w+[^\S\n]*\n", re.MULTILINE)
_PR_SET_PDEATHSIG = 1


def rewritten(configuration: str, host: str, public_ports: frozenset[int]) -> str:
    """The configuration with every listener where it belongs and nothing spliced. Raises ValueError for a listener
    that is no host and port."""
    lines = re.findall(r"^\s*bind\s.*$", configuration, re.MULTILINE)
    if not lines or not all(_BIND.fullmatch(line) for line in lines):
        raise ValueError(f"cannot read HAProxy's listeners: {lines}")

    def place(found: re.Match[str]) -> str:
        before, _, port, after = found.groups()
        return f"{before}{host if int(port) in public_ports else LOOPBACK}:{port}{after}"

    return _BIND.sub(place, _SPLICE.sub("", configuration))


def main(arguments: list[str]) -> None:
    """Does not return."""
    program, host, ports, *rest = arguments
    path = rest[rest.index("-f") + 1]
    with open(path, encoding="utf-8") as file:
        configuration = rewritten(file.read(), host, frozenset(map(int, ports.split(","))))
    with open(path, "w", encoding="utf-8") as file:
        file.write(configuration)
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the process that asked for HAProxy is gone")
    os.execv(program, [program, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
