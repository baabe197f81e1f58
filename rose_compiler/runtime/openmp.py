"""Threads of OpenMP that a resting thread holds.

libgomp gives each thread that runs an operation in parallel a pool of its own, which stays as long
as that thread does. While all pools together hold more threads than there are processors, members
of every pool sleep between two parallel regions and have to be woken, where they would spin: short
operations of torch then take up to twice their time, in the whole process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")

#: Seconds without work after which a thread gives its pool back. The next parallel operation makes
#: it anew, in some tens of microseconds a member on cores that are free, up to some milliseconds on
#: a machine that is busy: so whoever has work every few dozen milliseconds keeps it.
REST_S = 0.1

_SOFT = 1  # omp_pause_soft of omp_pause_resource_t, OpenMP 5.0 section 3.2.43


_found: list[Callable[[int], int]] = []
_none = False  # whether it was looked for where it would be


def _pauses() -> list[Callable[[int], int]]:
    """``omp_pause_resource_all`` of each libgomp in this process; another OpenMP has one pool for
    the whole process, or lets it be."""
    global _none
    if not _found and not _none:
        # it comes with torch, which a thread's component may load later
        _none = "torch._C" in sys.modules
        with suppress(OSError):
            lines = Path("/proc/self/maps").read_text().splitlines()
            paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line)
            for path in paths:
                with suppress(OSError, AttributeError):
                    # loaded already: opening it by its path finds the very copy
                    pause = ctypes.CDLL(path, mode=os.RTLD_NOLOAD).omp_pause_resource_all
                    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
                    _found.append(pause)
    return _found


def rest() -> None:
    """Give back the pool of the calling thread, if it has one. Must not be called in a region."""
    for pause in _pauses():
        pause(_SOFT)


def next_of(queue: SimpleQueue[_T]) -> _T:
    """The queue's next item. A thread that waits longer than :data:`REST_S` for it rests."""
    with suppress(Empty):
        return queue.get(timeout=REST_S)
    rest()
    return queue.get()
