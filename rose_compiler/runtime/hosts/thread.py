"""A component in a thread of its own."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from rose_compiler.base.errors import fail
from rose_compiler.runtime.hosts.host import Ticket, bounded, closed_error
from rose_compiler.runtime.openmp import next_of


class _GatedTicket(Ticket):
    """A ticket that can be waited for: its gate opens when it is done."""

    __slots__ = ("gate",)

    def __init__(self, seq: int, what: str) -> None:
        super().__init__(seq, what)
        self.gate = threading.Lock()
        self.gate.acquire()

    def resolve(self, value: Any) -> None:
        super().resolve(value)
        self.gate.release()

    def reject(self, error: BaseException) -> None:
        super().reject(error)
        self.gate.release()


_Tasks = queue.SimpleQueue[tuple[_GatedTicket, str, tuple[Any, ...], dict[str, Any]] | None]

#: Seconds that closing waits for a call in progress.
GRACE = 5.0


class ThreadHost:
    """A component in a daemon thread, built there by ``factory``.

    ``timeout``: default limit of :meth:`wait` in seconds, None for none; ``start_timeout``: limit
    for building the component. A thread can't be stopped: after a time-out the host refuses further
    use and its call, or its factory, runs on unheard.

    ``torch_threads``: thread count of torch inside this thread, if torch is loaded by the time
    the component has been built; other threads keep theirs. None leaves it alone.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        name: str = "host",
        timeout: float | None = None,
        torch_threads: int | None = 1,
        start_timeout: float | None = None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.until: float | None = None
        self._tasks: _Tasks = queue.SimpleQueue()
        self._count = 0
        self._broken: Callable[[], BaseException] | None = None
        self._start = _GatedTicket(0, "factory")
        # the thread must not hold this object: it ends when the object is collected
        self._thread = threading.Thread(
            target=_work,
            args=(factory, torch_threads, self._start, self._tasks),
            name=f"rose-{name}",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self._tasks.put, None)
        self._finalizer.atexit = False
        _running[self._thread] = self._tasks
        self._thread.start()

    @property
    def usable(self) -> bool:
        """False once the host is closed or a call of it ran out of time."""
        return self._broken is None

    def ready(self) -> None:
        """Wait until the component is built.

        Raises ``FactoryError`` if its factory raised; the exception is its cause. ``HostTimeout``
        past ``start_timeout``.
        """
        if self._broken is not None and not self._start.done:
            raise self._broken()
        limit = bounded(self.start_timeout, self.until)
        if not self._start.gate.acquire(timeout=-1 if limit is None else limit):
            self._expire(self._start, limit)
        self._start.gate.release()
        if self._start.error is not None:
            self._factory_failed(self._start.error)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> _GatedTicket:
        """Begin ``component.method(*args, **kwargs)`` and return at once."""
        if self._broken is not None:
            raise self._broken()
        self._count += 1
        ticket = _GatedTicket(self._count, method)
        self._tasks.put((ticket, method, args, kwargs))
        return ticket

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Any:
        """The result of a submitted call; raises what it raised, the very object.

        Raises ``HostTimeout`` after ``timeout`` seconds (default: the host's).
        """
        if not ticket.done:
            assert isinstance(ticket, _GatedTicket)
            self.ready()
            limit = bounded(self.timeout if timeout is None else timeout, self.until)
            if not ticket.gate.acquire(timeout=-1 if limit is None else limit):
                self._expire(ticket, limit)
        return ticket.result()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the component and return its result."""
        return self.wait(self.submit(method, *args, **kwargs))

    def close(self, grace: float = GRACE) -> None:
        """Run what was submitted, close the component, end the thread. Again: does nothing.

        Raises ``HostTimeout`` if a call keeps the thread busy longer than ``grace`` seconds, and
        what the component's ``close`` raises.
        """
        if self._broken is not None:
            return
        ticket = self.submit("close")
        self._broken = partial(closed_error, self.name)
        self._tasks.put(None)
        self._thread.join(grace)
        if self._thread.is_alive():
            raise fail(
                "host-timeout",
                f"the thread host {self.name!r} is busy and could not be closed",
                expected=f"its call to end within {grace:g} s",
            )
        if ticket.error is not None and not isinstance(ticket.error, _NoClose):
            raise ticket.error

    def abandon(self) -> None:
        """Let the thread run what was submitted, close the component and end, unawaited."""
        if self._broken is None:
            self.submit("close")
            self._broken = partial(closed_error, self.name)
        self._tasks.put(None)

    def _expire(self, ticket: Ticket, limit: float | None) -> None:
        what = f"the thread host {self.name!r} did not finish {ticket.what}()"
        within = f"an answer within {limit:.3g} s"
        self._broken = partial(fail, "host-timeout", what, expected=within)
        self._tasks.put(None)
        raise self._broken()

    def _factory_failed(self, error: BaseException) -> None:
        what = f"the factory of {self.name!r} raised {type(error).__name__} in its thread"
        wrapped = fail("host-factory-raised", what, found=str(error) or repr(error))
        wrapped.__cause__ = error
        self._broken = lambda: wrapped
        raise wrapped


class _NoClose(Exception):
    """The component has no ``close``."""


_running: dict[threading.Thread, _Tasks] = {}


def _work(
    factory: Callable[[], Any], torch_threads: int | None, start: _GatedTicket, tasks: _Tasks
) -> None:
    try:
        target = None
        try:
            limited = _limit_torch(torch_threads)
            target = factory()
            if not limited:  # the factory may have loaded torch
                _limit_torch(torch_threads)
        except BaseException as error:
            start.reject(error)
        else:
            start.resolve(None)
        del factory
        while (task := next_of(tasks)) is not None:
            ticket, method, args, kwargs = task
            del task
            try:
                if start.error is not None:
                    raise start.error
                if method == "close" and not hasattr(target, "close"):
                    raise _NoClose
                value = getattr(target, method)(*args, **kwargs)
            except BaseException as error:
                ticket.reject(error)
            else:
                ticket.resolve(value)
                del value
            del ticket, args, kwargs  # or they would live until the next call
    finally:
        _running.pop(threading.current_thread(), None)


def _limit_torch(count: int | None) -> bool:
    """Set torch's thread count in this thread only, if torch is loaded; says whether.

    ``set_num_threads`` acts on the calling thread, and on threads that use torch for the first
    time later: a throw-away thread puts that second effect back.
    """
    torch = sys.modules.get("torch")
    if torch is None or count is None:
        return False
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,), daemon=True)
    restore.start()
    restore.join()
    return True


@atexit.register
def _stop_running() -> None:
    threads = dict(_running)
    for tasks in threads.values():
        tasks.put(None)
    deadline = time.monotonic() + 2.0
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
