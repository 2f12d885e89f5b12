"""Connects to each ADDRESS:PORT at once, and prints a line for each: `open` if there was an answer, else `shut`.

A program of its own, because it runs in another network namespace: `python dial.py TIMEOUT_S ADDRESS:PORT …`.
"""

from __future__ import annotations

import errno
import selectors
import socket
import sys
import time


def dial(targets: list[tuple[str, int]], timeout_s: float) -> list[bool]:
    """Whether each answered within the time, be it with a refusal."""
    answered = [False] * len(targets)
    with selectors.DefaultSelector() as selector:
        for number, target in enumerate(targets):
            connection = socket.socket()
            connection.setblocking(False)
            error = connection.connect_ex(target)
            if error == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, number)
            else:
                answered[number] = error in (0, errno.ECONNREFUSED)
                connection.close()
        deadline = time.monotonic() + timeout_s
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                error = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                answered[key.data] = error in (0, errno.ECONNREFUSED)
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return answered


def main(timeout_s: str, *words: str) -> None:
    pairs = [word.rpartition(":") for word in words]
    for is_open in dial([(address, int(port)) for address, _, port in pairs], float(timeout_s)):
        print("open" if is_open else "shut")


if __name__ == "__main__":
    main(*sys.argv[1:])
