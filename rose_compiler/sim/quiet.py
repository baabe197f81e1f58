"""Keeping MuJoCo's deprecation warnings off the terminal while environments are built."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Lines that MuJoCo's XML compiler prints per model; everything else is printed after all.
_NOISE = (b"WARNING: compiler attribute", b"WARNING: XML")

_lock = threading.Lock()
_users = 0
_saved = -1
_held = -1


@contextmanager
def quiet_mujoco() -> Iterator[None]:
    """Hold back MuJoCo's warnings, which its C library writes to file descriptor 2.

    What else is written there meanwhile appears when the outermost block ends, also if that is by
    an exception. Safe to nest and to enter from several threads; where the descriptor can't be
    redirected, nothing happens.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users, _saved, _held
    with _lock:
        _users += 1
        if _users > 1:
            return
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        try:
            _saved = os.dup(2)
            with tempfile.TemporaryFile() as file:
                _held = os.dup(file.fileno())
            os.dup2(_held, 2)
        except OSError:
            _close()


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users > 0 or _saved < 0:
            return
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()
        os.dup2(_saved, 2)
        os.lseek(_held, 0, os.SEEK_SET)
        with os.fdopen(os.dup(_held), "rb") as file:
            kept = [line for line in file if not line.startswith(_NOISE)]
        # MuJoCo ends a warning with an empty line
        text = b"".join(kept)
        with suppress(OSError):
            if text.strip():
                os.write(2, text)
        _close()


def _close() -> None:
    global _saved, _held
    for descriptor in (_saved, _held):
        if descriptor >= 0:
            os.close(descriptor)
    _saved = _held = -1
