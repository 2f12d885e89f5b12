"""Clocks that can be set: a preloaded library (libfaketime) shifts what a process takes for the time of day.

It comes with the development packages where there is one for the machine (the system's package does as well); nothing
here touches the machine's own clock. Monotonic clocks stay as they are, as they do when an administrator or NTP sets
one.

A step is for Redis alone: gRPC waits for absolute times by the kernel's clock, which the library does not shift, and
would hang where it does not under a real step. A process that goes by another clock from its start on is another
matter: its waits end in time, however fast that clock runs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_NAME = "libfaketime.so.1"
_SYSTEM_FOLDERS = ("/usr/lib", "/usr/local/lib", "/usr/lib64")
TAKES_S = 1.5  # until the process has looked at its file again


def find_library() -> Path | None:
    """The library, where it is installed."""
    package = importlib.util.find_spec("libfaketime")
    if package is not None and package.origin is not None:
        for found in Path(package.origin).parent.rglob(_NAME):
            return found
    for folder in _SYSTEM_FOLDERS:
        for found in (*Path(folder).glob(f"faketime/{_NAME}"), *Path(folder).glob(f"*/faketime/{_NAME}")):
            return found
    return None


class Clock:
    """The time of day that one process sees. It cannot be set without the library."""

    def __init__(self, file: Path, library: Path | None) -> None:
        """`file` is ours; the process looks into it about once a second."""
        self._file = file
        self._library = library
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the process that uses this clock."""
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
            "FAKETIME_CACHE_DURATION": "1",
        }

    def set(self, seconds: int, rate: float = 1.0) -> None:
        """Sets the clock to this number of seconds ahead of the right time from now on, and its rate from the process'
        start on."""
        self._file.write_text(f"{seconds:+d} x{rate:g}\n" if rate != 1.0 else f"{seconds:+d}\n")
