"""Starting a worker process and making sure that it ends.

A worker never outlives its parent: it reads end-of-file on its socket when the parent is gone, a
watcher in it ends it even in the middle of a call, and on Linux the kernel kills it. The memory
shared with it is an anonymous file, which vanishes with the last process that has it open.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rose_compiler.base.errors import RoseError, fail

#: Numeric libraries in a worker run on one thread each, unless the caller's environment decides.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}
#: Seconds a worker has for closing its component before it is killed.
GRACE = 2.0


class Child:
    """A running worker: its process, the socket to it and the memory shared with it."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str] | None,
        cores: Collection[int] | None = None,
    ) -> None:
        """Start a worker, bound to ``cores`` if they are given.

        Raises ``RuntimeFault`` if the system can't, ``ConfigError`` for variables that are no text
        and cores that there are not.
        """
        if not sys.executable:
            raise fail("host-start", f"host {name!r}: this Python does not know its executable")
        self.sock, theirs = socket.socketpair()
        self.memory = _anonymous_file(name)
        # the kernel's death signal follows the thread that starts the worker, not the process
        by_main_thread = threading.current_thread() is threading.main_thread()
        command = [
            *(sys.executable, "-P", "-m", "rose_compiler.runtime.hosts.worker"),
            *(str(theirs.fileno()), str(self.memory)),
            *(str(os.getpid()), str(int(by_main_thread))),
        ]
        try:
            with _interrupts_held(), _bound(cores):
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self.memory),
                    env={**os.environ, **ONE_THREAD, **_python_path(), **(environment or {})},
                )
        except BaseException as error:  # whatever it was, Ctrl-C too: nothing stays open
            self.sock.close()
            os.close(self.memory)
            if isinstance(error, OSError):
                raise fail("host-start", f"host {name!r} could not be started: {error}") from error
            if isinstance(error, TypeError | ValueError):  # what Popen says of its `env`
                raise fail(
                    "config-argument",
                    f"host {name!r} can't be given these variables: {error}",
                    expected="environment={name: value}, both of them text",
                    found=f"environment={dict(environment or {})}",
                    help="give numbers as text too",
                ) from error
            raise
        finally:
            theirs.close()
        self.pidfd = _open_pidfd(self.process.pid)
        self._parent = os.getpid()
        #: Told of the process before it is killed.
        self.before_kill: Callable[[int], object] | None = None
        self._stopping = threading.Lock()
        self._stopped = False
        _running[id(self)] = self

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_status(self, patience: float = 1.0) -> str:
        """How the process ended, waiting for that a moment."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return "closed its socket but still runs"
        if code >= 0:
            return f"exited with status {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def stop(self, grace: float = GRACE) -> None:
        """Close the socket, so that the worker ends; kill it after ``grace`` seconds."""
        stop_all([self], grace)

    def kill(self) -> None:
        """End the process at once and free what belongs to it.

        In a forked copy of the parent, for whom it is no child, this only frees descriptors.
        """
        self._kill()
        self.stop()

    def _kill(self) -> None:
        tell, self.before_kill = self.before_kill, None
        if tell is not None and self.process.poll() is None:
            with suppress(RoseError):
                tell(self.pid)
        with suppress(OSError):
            self.process.kill()

    def _hang_up(self) -> bool:
        """Close this side's descriptors; False if that has been done."""
        with self._stopping:
            if self._stopped:
                return False
            self._stopped = True
        _running.pop(id(self), None)
        if os.getpid() == self._parent:
            # forked processes, such as those of a DataLoader, may hold the socket as well
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        os.close(self.memory)
        if self.pidfd is not None:
            os.close(self.pidfd)
        return True


def own_cores() -> frozenset[int] | None:
    """The cores that this thread may use, None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def bind_process(pid: int, cores: Collection[int]) -> None:
    """Bind all threads of a process to these cores; those that it makes later inherit them.

    Raises ``OSError`` if the system refuses.
    """
    bound: set[str] = set()
    while new := {*os.listdir(f"/proc/{pid}/task")} - bound:  # one not bound yet may make others
        for task in new:
            with suppress(ProcessLookupError):  # a thread may end meanwhile
                os.sched_setaffinity(int(task), cores)
        bound |= new


def before_kill(pid: int, tell: Callable[[int], object]) -> None:
    """Have ``tell(pid)`` called before a running worker is killed: what it has on a device that it
    shares may have to be ended in order. Errors of it count for nothing."""
    for child in list(_running.values()):
        if child.pid == pid:
            child.before_kill = tell


_running: dict[int, Child] = {}


def stop_all(children: Iterable[Child], grace: float = GRACE) -> None:
    """End workers together: all of them have the same ``grace`` seconds."""
    mine = [child for child in children if child._hang_up()]
    deadline = time.monotonic() + grace
    for child in mine:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child._kill()
            child.process.wait()


@atexit.register
def _stop_running() -> None:
    stop_all(list(_running.values()))


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rose-" + re.sub(r"\W", "-", name, flags=re.A)[:200], os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _python_path() -> dict[str, str]:
    """The worker's PYTHONPATH: it must find this package before it learns the caller's path.

    The package's folder is added only where the caller found it by its path too. An editable
    install finds it another way, in the worker as well.
    """
    root = Path(__file__).resolve().parents[3]
    if not any(Path(entry or os.curdir).resolve() == root for entry in sys.path):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


@contextmanager
def _bound(cores: Collection[int] | None) -> Iterator[None]:
    """What is started inside inherits the cores of this thread, and has them before it runs."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError, TypeError) as error:
        raise fail(
            "config-argument",
            f"a host can't be bound to these cores: {error}",
            expected=f"some of {sorted(before)}",
            found=f"cores={cores!r}",
            help="`os.sched_getaffinity(0)` has the numbers of those that may be used",
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches the whole process group: a worker that starts must not die of it.

    It inherits the blocked signal, ignores it once Python runs, and unblocks it then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
