"""A process host's other side: ``python -m rose_compiler.runtime.hosts.worker FD FD PID FLAG``.

It is started as a module, so that the caller's ``__main__`` is never imported, and imports nothing
heavy: what the component needs, its factory imports.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rose_compiler.runtime.hosts.channel import (
    BYTES,
    CALL,
    CLOSE,
    ERROR,
    NONE,
    RAW,
    SHARE,
    START,
    VALUE,
    Frames,
    frame,
)
from rose_compiler.runtime.hosts.transport import dump_exception, dump_result

_PR_SET_PDEATHSIG = 1
#: Seconds that a call may still run after the parent has gone.
_ORPHAN_GRACE = 1.5


class Worker:
    """Builds the component and runs its methods, one request after the other."""

    def __init__(self, sock: socket.socket, memory: int) -> None:
        self.sock = sock
        self.memory = memory
        self.target: Any = None
        self._bare: dict[bytes, tuple[str, Callable[[], Any]]] = {}
        self._running = True

    def serve(self) -> None:
        """Answer requests until the parent closes its end or asks to stop."""
        frames = Frames()
        while self._running:
            request = frames.take()
            if request is None:
                data = self.sock.recv(frames.wanted())
                if not data:
                    break
                frames.feed(data)
                continue
            self.sock.sendall(self._answer(*request))

    def close(self) -> None:
        """Close the component, if it has ``close``."""
        target, self.target = self.target, None
        self._bare.clear()
        if hasattr(target, "close"):
            target.close()

    def _answer(self, op: int, seq: int, payload: bytes) -> bytes:
        try:
            kind, reply = self._run(op, payload)
        except BaseException as error:
            self._running = op != START and op != CLOSE
            kind, reply = ERROR, dump_exception(error)
        return frame(kind, seq, reply)

    def _run(self, op: int, payload: bytes) -> tuple[int, bytes]:
        if op == CALL:
            method, result = self._call(payload)
        elif op == RAW:
            return BYTES, self.target.raw(payload)
        elif op == SHARE:
            method, offset, size, args = pickle.loads(payload)
            block = mmap.mmap(self.memory, size, offset=offset)
            result = getattr(self.target, method)(block, *args)
        elif op == START:
            method, result = "factory", None
            path, factory = pickle.loads(payload)
            sys.path[:] = path
            self.target = pickle.loads(factory)()
        else:
            method, result, self._running = "close", None, False
            self.close()
        if result is None:
            return NONE, b""
        if type(result) is bytes:
            return BYTES, result
        return VALUE, dump_result(method, result)

    def _call(self, payload: bytes) -> tuple[str, Any]:
        bare = self._bare.get(payload)
        if bare is not None:
            return bare[0], bare[1]()
        method, args, kwargs = pickle.loads(payload)
        bound = getattr(self.target, method)
        if not args and not kwargs:
            self._bare[payload] = method, bound
        return method, bound(*args, **kwargs)


def _watch(descriptor: int) -> None:
    """End this process when the parent's end of the socket closes, even inside a call."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are reported without being asked for
    while not poll.poll():
        pass
    time.sleep(_ORPHAN_GRACE)
    os._exit(1)


def main(arguments: list[str]) -> None:
    """Serve the parent at the other end of the socket whose descriptor is given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    descriptor, memory, parent, die_with_parent = (int(text) for text in arguments)
    if die_with_parent and sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent was gone before the kernel could be told to watch it
    with suppress(ValueError, OSError, RuntimeError):
        # a copy of the descriptor: a component that redirects its errors must not swallow a crash
        faulthandler.enable(os.dup(2))
    sock = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    os.set_inheritable(memory, False)
    threading.Thread(target=_watch, args=(descriptor,), daemon=True).start()
    worker = Worker(sock, memory)
    with suppress(BrokenPipeError, ConnectionResetError):
        worker.serve()
    worker.close()
    # what was registered to run at exit runs, but modules are not torn down: that takes seconds
    # with some simulators, and crashes others
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
