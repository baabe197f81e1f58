"""What every host can do, and the host that is the caller's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rose_compiler.base.errors import RoseError, fail


class Ticket:
    """A submitted call: ``done`` turns true once its result or its exception is known."""

    __slots__ = ("done", "error", "seq", "value", "what")

    def __init__(self, seq: int, what: str) -> None:
        self.seq = seq
        self.what = what
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def resolve(self, value: Any) -> None:
        self.value, self.done = value, True

    def reject(self, error: BaseException) -> None:
        self.error, self.done = error, True

    def result(self) -> Any:
        """The call's value, or raise its exception. Only once it is ``done``."""
        if self.error is not None:
            raise self.error
        return self.value

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self.error else "done"
        return f"<Ticket {self.seq} {self.what}: {state}>"


class Host(Protocol):
    """A place with one component in it, which runs the component's methods in order.

    One thread at a time may use a host. ``timeout`` is the default limit of :meth:`wait` in
    seconds; None waits for ever. ``until``, by ``time.monotonic``, ends every wait, that for the
    component to be built included, whatever its own limit; None does not.
    """

    name: str
    timeout: float | None
    until: float | None

    def ready(self) -> None:
        """Wait until the component is built; raises what building it raised."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Ticket:
        """Begin ``component.method(*args, **kwargs)``, after all that was submitted before."""

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Any:
        """The result of a submitted call. What the call raised is raised here.

        Raises ``HostDied`` if the host ended, ``HostTimeout`` after ``timeout`` seconds.
        """

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """``wait(submit(...))``."""

    def close(self) -> None:
        """Run what was submitted, close the component if it has ``close``, end the host."""


@contextmanager
def within(host: Any, seconds: float | None) -> Iterator[None]:
    """Let all waits of a host, or of a component in one, that begin inside the block end in so many
    seconds together; None changes nothing, nor can it for a host without ``until``."""
    if seconds is None or not hasattr(host, "until"):
        yield
        return
    before, until = host.until, time.monotonic() + seconds
    host.until = until if before is None else min(before, until)
    try:
        yield
    finally:
        host.until = before


def bounded(limit: float | None, until: float | None) -> float | None:
    """The seconds that a wait with a limit of its own may take."""
    if until is None:
        return limit
    left = max(0.0, until - time.monotonic())
    return left if limit is None else min(limit, left)


def closed_error(name: str) -> RoseError:
    """The error of a call on a host that was closed."""
    return fail("fault-closed", f"the host {name!r} was closed and can't run anything any more")


class InlineHost:
    """A component in the caller's own thread: ``submit`` runs the call to its end.

    ``timeout`` is kept for symmetry; a call in the caller's own thread can't be timed out.
    """

    def __init__(
        self, factory: Callable[[], Any], *, name: str = "host", timeout: float | None = None
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.until: float | None = None  # nothing is waited for
        self._target: Any = factory()
        self._count = 0
        self._closed = False

    def ready(self) -> None:
        """Nothing to wait for: the constructor has built the component."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Ticket:
        """Run ``component.method(*args, **kwargs)`` now; its exception is raised by ``wait``."""
        if self._closed:
            raise closed_error(self.name)
        self._count += 1
        ticket = Ticket(self._count, method)
        try:
            ticket.resolve(getattr(self._target, method)(*args, **kwargs))
        except Exception as error:
            ticket.reject(error)
        return ticket

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Any:
        """The result of a submitted call; raises what it raised."""
        del timeout
        return ticket.result()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the component and return its result."""
        return self.wait(self.submit(method, *args, **kwargs))

    def close(self) -> None:
        """Close the component, if it can be closed. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        target, self._target = self._target, None
        if hasattr(target, "close"):
            target.close()
