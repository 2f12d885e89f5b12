"""Time slices of a worker's threads on a shared core. Linux only; elsewhere nothing happens.

A worker's event loop has microseconds of work at a time, its model thread milliseconds without a pause. On one core the
kernel lets a running thread finish its slice of about 3 ms before it runs one that wakes, and a commit delayed that
long reaches the draft worker when the next one is due. A thread may ask for a shorter slice (Linux 6.12, EEVDF with
`PREEMPT_SHORT`); one that wakes then runs at once. This needs no privilege and leaves the share of the core unchanged.
Older kernels accept the request and do nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys

logger = logging.getLogger(__name__)

SHORT_SLICE_US = 100  # the minimum in Linux
_SYSCALLS = {"x86_64": 314, "aarch64": 274}  # of sched_setattr
_SCHED_OTHER = 0


class _Attributes(ctypes.Structure):
    """struct sched_attr of linux/sched/types.h, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),  # nanoseconds; for ordinary threads the slice, 0 for the default
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def use_short_slices() -> bool:
    """Requests short slices for this thread and those it starts from now on; returns whether the system accepted."""
    return _set_slice(SHORT_SLICE_US * 1000)


def use_default_slices() -> bool:
    """Restores the default slice of this thread."""
    return _set_slice(0)


def _set_slice(slice_ns: int) -> bool:
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != _SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _Attributes(ctypes.sizeof(_Attributes), _SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.byref(attributes), 0) != 0:
        logger.info("time slices stay unchanged: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
