"""A component in a process of its own."""

from __future__ import annotations

import mmap
import os
import pickle
import select
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from rose_compiler.base.errors import fail
from rose_compiler.runtime.hosts.channel import (
    BYTES,
    CALL,
    CLOSE,
    NONE,
    RAW,
    SHARE,
    START,
    VALUE,
    Frames,
    frame,
)
from rose_compiler.runtime.hosts.child import GRACE, Child, stop_all
from rose_compiler.runtime.hosts.host import Ticket, bounded, closed_error
from rose_compiler.runtime.hosts.transport import dump_call, dump_factory, load_exception


class ProcessHost:
    """A component in a worker process, built there by ``factory``.

    The constructor starts the process and returns, so that several start at once; :meth:`ready`
    or the first result waits. The worker never imports the caller's ``__main__``, ignores Ctrl-C
    and dies with its parent. Its numeric libraries run on one thread unless ``environment``
    (variables added to the caller's) says otherwise.

    A result of type ``bytes`` and None travel as they are, a call without arguments is pickled
    once; larger data belongs into memory from :meth:`share`.

    ``timeout``: default limit of :meth:`wait` in seconds, None for none. ``start_timeout``: limit
    for starting the process and building the component. ``cores``: the numbers of the cores that
    all threads of the process may use, in force before it starts; None for the caller's.

    Raises ``FactoryError`` if the factory can't be pickled, naming the captured variable.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        name: str = "host",
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        start_timeout: float | None = 120.0,
    ) -> None:
        blob = dump_factory(factory, name)
        self.name = name
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.until: float | None = None
        self._pending: deque[Ticket] = deque()
        self._frames = Frames()
        self._bare: dict[str, bytes] = {}
        self._count = 0
        self._shared = 0
        self._broken: Callable[[], BaseException] | None = None
        self._child = Child(name, environment, cores)
        self._finalizer = weakref.finalize(self, self._child.stop)
        self._finalizer.atexit = False  # the children are stopped together at exit
        self._socket = self._child.sock
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if self._child.pidfd is not None:
            self._poll.register(self._child.pidfd, select.POLLIN)
        self._start = self._post(START, pickle.dumps((sys.path, blob)), "factory")

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._child.pid

    @property
    def usable(self) -> bool:
        """False once the host is closed or its process is lost."""
        return self._broken is None

    def ready(self) -> None:
        """Wait until the component is built.

        Raises ``FactoryError`` if its factory raised (the exception is its cause),
        ``RuntimeFault`` if the process did not start, ``HostTimeout`` past ``start_timeout``.
        """
        if not self._start.done:
            self._pump(self._start, self.start_timeout)
        self._start.result()

    @property
    def built(self) -> bool:
        """True once the component was built, also after the end of its process."""
        return self._start.done and self._start.error is None

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Ticket:
        """Begin ``component.method(*args, **kwargs)`` and return at once."""
        if args or kwargs:
            payload = dump_call(method, args, kwargs)
        else:
            known = self._bare.get(method)
            if known is None:
                known = self._bare[method] = dump_call(method, args, kwargs)
            payload = known
        return self._post(CALL, payload, method)

    def submit_dumped(self, payload: bytes, method: str) -> Ticket:
        """Begin a call of this method that ``transport.dump_call`` has pickled."""
        return self._post(CALL, payload, method)

    def submit_raw(self, payload: bytes, what: str) -> Ticket:
        """Begin ``component.raw(payload)``, which answers with bytes; ``what`` is for errors."""
        return self._post(RAW, payload, what)

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Any:
        """The result of a submitted call, or its exception with the worker's traceback as a note.

        Raises ``HostDied`` if the process ended, and ``HostTimeout`` after ``timeout`` seconds
        (default: the host's); the process is killed then, its state being unknown.
        """
        if not ticket.done:
            self.ready()
            self._pump(ticket, self.timeout if timeout is None else timeout)
        return ticket.result()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the component and return its result."""
        return self.wait(self.submit(method, *args, **kwargs))

    def share(self, method: str, size: int, *args: Any) -> tuple[mmap.mmap, Any]:
        """Memory of ``size`` bytes, zeroed, seen by both sides until both drop it.

        Calls ``component.method(memory, *args)`` over there, with the worker's mapping of it.
        Returns (this side's mapping, the call's result).
        """
        if self._broken is not None:
            raise self._broken()
        size = max(size, 1)
        offset = self._shared
        self._shared += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._child.memory, self._shared)
        block = mmap.mmap(self._child.memory, size, offset=offset)
        payload = pickle.dumps((method, offset, size, args))
        return block, self.wait(self._post(SHARE, payload, method))

    def close(self, grace: float = GRACE) -> None:
        """Run what was submitted, close the component, end the process.

        It is killed if that takes longer than ``grace`` seconds. What the component's ``close``
        raises is raised here, after the process is gone. Closing again does nothing.
        """
        close_all([self], grace)

    def kill(self) -> None:
        """End the process now, whatever it is doing. Every later use raises ``HostDied``."""
        if self._broken is None:
            self._break(lambda: self._died("was killed by its owner"))
        self._child.kill()

    def _post(self, op: int, payload: bytes, what: str) -> Ticket:
        if self._broken is not None:
            raise self._broken()
        self._count += 1
        ticket = Ticket(self._count, what)
        try:
            self._pending.append(ticket)
            self._send(ticket, frame(op, self._count & 0xFFFFFFFF, payload))
        except BaseException:
            self._cut_short()
            raise
        return ticket

    def _cut_short(self) -> None:
        """End the process after Ctrl-C within a message: the next one would be added to half of
        this one, or an answer taken for another call's."""
        if self._broken is None:
            how = "was ended, since an interrupt had cut a message to or from it short"
            self._break(lambda: self._died(how))
        self._child.kill()

    def _send(self, ticket: Ticket, data: bytes) -> None:
        rest = memoryview(data)
        limit = bounded(self.timeout, self.until)
        deadline = None if limit is None else time.monotonic() + limit
        while self._broken is None:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                self._lost()
                return
            if not rest:
                return
            # the socket is full; replies must be read meanwhile, for the worker may be blocked
            # on sending one
            self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            events = self._poll.poll(left)
            self._poll.modify(self._socket, select.POLLIN)
            if any(event & ~select.POLLOUT for _, event in events):
                self._receive()
            elif not events:
                self._expire(ticket, limit)

    def _pump(self, ticket: Ticket, limit: float | None) -> None:
        limit = bounded(limit, self.until)
        deadline = None if limit is None else time.monotonic() + limit
        patience = None if limit is None else limit * 1000
        while not ticket.done:
            if self._broken is not None:
                raise self._broken()
            if self._poll.poll(patience):
                self._receive()
            if deadline is not None:
                patience = max(0.0, deadline - time.monotonic()) * 1000
                if patience == 0 and not ticket.done:
                    self._expire(ticket, limit)

    def _receive(self) -> None:
        """Read what has arrived; resolves the tickets that it answers."""
        try:
            self._read()
        except BaseException:
            self._cut_short()
            raise

    def _read(self) -> None:
        frames = self._frames
        try:
            data = self._socket.recv(frames.wanted())
        except BlockingIOError:
            # nothing to read, so it is the process that has ended, its socket held by a child
            if self._child.process.poll() is not None:
                self._lost()
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._lost()
            return
        frames.feed(data)
        while (reply := frames.take()) is not None:
            kind, _, payload = reply
            ticket = self._pending.popleft()
            if kind == NONE:
                ticket.resolve(None)
            elif kind == BYTES:
                ticket.resolve(payload)
            elif kind == VALUE:
                self._unpickle(ticket, payload)
            else:
                self._failed(ticket, load_exception(payload, self.name, self.pid))

    def _unpickle(self, ticket: Ticket, payload: bytes) -> None:
        try:
            ticket.resolve(pickle.loads(payload))
        except Exception as error:  # a class of the user's is rebuilt, which may raise anything
            what = f"the result of {ticket.what}() can't be rebuilt here: {error!r}"
            ticket.reject(fail("host-pickle", what))

    def _failed(self, ticket: Ticket, error: BaseException) -> None:
        if ticket is not self._start:
            ticket.reject(error)
            return
        what = f"the factory of {self.name!r} raised {type(error).__name__} in its process"
        wrapped = fail("host-factory-raised", what, found=str(error) or repr(error))
        wrapped.__cause__ = error
        for note in getattr(error, "__notes__", ()):
            wrapped.add_note(note)
        ticket.reject(wrapped)
        self._break(lambda: wrapped)
        self._child.stop()

    def _lost(self) -> None:
        """The process is gone: every pending call has failed."""
        if self._broken is not None:
            return
        how = self._child.exit_status()
        doing = self._pending[0].what if self._pending else None
        if doing is not None and not self._start.done:
            self._break(lambda: fail("host-start", f"the host {self.name!r} {how} as it started"))
        else:
            self._break(lambda: self._died(how, doing))
        self._child.kill()

    def _expire(self, ticket: Ticket, limit: float | None) -> None:
        what = f"the host {self.name!r} (process {self.pid}) did not finish {ticket.what}()"
        within = f"an answer within {limit:.3g} s"
        self._break(partial(fail, "host-timeout", what, expected=within))
        self._child.kill()

    def _died(self, how: str, doing: str | None = None) -> BaseException:
        during = "" if doing is None else f" while it ran {doing}()"
        return fail("host-died", f"the host {self.name!r} (process {self.pid}) {how}{during}")

    def _break(self, error: Callable[[], BaseException]) -> None:
        self._broken = error
        while self._pending:
            pending = self._pending.popleft()
            if not pending.done:
                pending.reject(error())


def abandon_all(hosts: Iterable[ProcessHost], grace: float = GRACE) -> None:
    """End hosts together without waiting for what was submitted.

    Calls in progress and the components' ``close`` have ``grace`` seconds, then they are killed.
    """
    open_hosts = [host for host in hosts if host.usable]
    for host in open_hosts:
        host._break(partial(closed_error, host.name))
    stop_all([host._child for host in open_hosts], grace)


def close_all(hosts: Iterable[ProcessHost], grace: float = GRACE) -> None:
    """Close hosts together, within ``grace`` seconds for all. Raises the first error of them."""
    deadline = time.monotonic() + grace
    errors: list[BaseException] = []
    closing: list[tuple[ProcessHost, Ticket]] = []
    open_hosts = [host for host in hosts if host.usable]
    for host in open_hosts:
        if host._start.done:
            closing.append((host, host._post(CLOSE, b"", "close")))
    for host, ticket in closing:
        try:
            host.wait(ticket, max(0.0, deadline - time.monotonic()))
        except Exception as error:  # what a `close` of the user's raises; the others are closed too
            errors.append(error)
    for host in open_hosts:
        if host.usable:
            host._break(partial(closed_error, host.name))
    stop_all([host._child for host in open_hosts], max(0.5, deadline - time.monotonic()))
    if errors:
        raise errors[0]
