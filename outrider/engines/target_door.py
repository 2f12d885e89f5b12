"""An engine's way to the target worker that has started it: a Unix socket in a folder of the worker's own.

The engine keeps one connection open and ends with it, so that no engine outlives a worker that was killed. Over another
one it hands the worker its end of the hint link, a socket pair, which stands in place of a hint server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Final

from outrider.engines.hint_link import Child

CONNECT_S: Final = 5.0
TETHER: Final = b"t"
LINK: Final = b"l"


class _Worker:
    """The target worker in place of a hint server's process: the engine cannot end it, nor has it to."""

    def poll(self) -> int | None:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass


def _connect(door: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(CONNECT_S)
    try:
        made.connect(door)
    except OSError:
        made.close()
        raise
    return made


class Door:
    """The engine's end. `path` is the worker's socket."""

    def __init__(self, path: str) -> None:
        self._path = path

    def hand_over(self, theirs: socket.socket) -> Child:
        """Gives the worker its end of a hint link, as `hint_link.Start`. Raises OSError."""
        with _connect(self._path) as connection:
            socket.send_fds(connection, [LINK], [theirs.fileno()])
        return _Worker()

    def tie(self) -> None:
        """Ends this process when the worker is gone, from now on. Raises OSError."""
        connection = _connect(self._path)
        connection.sendall(TETHER)
        connection.settimeout(None)

        def wait() -> None:
            with contextlib.suppress(OSError):
                connection.recv(1)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="target worker's end", daemon=True).start()


def open_door(folder: Path) -> tuple[socket.socket, str]:
    """The worker's end: a listening socket in its private folder, and its path."""
    path = str(folder / "engine")
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    made.listen(8)
    made.setblocking(False)
    return made, path
