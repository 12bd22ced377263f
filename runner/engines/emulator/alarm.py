"""An alarm on an event loop with microseconds of precision.

The loop's own timers round to milliseconds, which a time scale of 20 turns into 20 ms of error
in every token. The kernel's timer descriptors do not round. Python 3.11 has no binding for them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_TFD_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK
_TFD_TIMER_ABSTIME = 1
_NANO = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int64))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Alarm:
    """Calls `callback` once, at the monotonic second it was last set to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._descriptor: int = libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_CLOEXEC_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "the kernel gave no timer")
        self._spec = _Itimerspec()
        self._spec_pointer = ctypes.byref(self._spec)
        loop.add_reader(self._descriptor, self._ring)

    def set(self, monotonic_s: float) -> None:
        """Ring at this second; replaces what was set before. A past second rings at once."""
        total = max(1, int(monotonic_s * _NANO))
        value = self._spec.it_value
        value.tv_sec, value.tv_nsec = divmod(total, _NANO)
        self._settime(self._descriptor, _TFD_TIMER_ABSTIME, self._spec_pointer, None)

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:  # set again between ringing and here
            return
        self._callback()
