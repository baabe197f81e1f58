"""A component in a host of its own that is used like the component itself.

Arguments and results travel as values, never as references: arrays by memory that is shared once
and used again by every call, the rest pickled. So the component can't see what the caller does to
its arrays later, in whatever host it lives.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import time
import types
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Self, cast

from rose_compiler.base import phases
from rose_compiler.base.errors import RuntimeFault, fail
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.hosts import arrays, ipc, parameters, served
from rose_compiler.runtime.hosts.child import bind_process
from rose_compiler.runtime.hosts.host import Ticket
from rose_compiler.runtime.hosts.numbering import Numbering
from rose_compiler.runtime.hosts.pending import Pending, deferring
from rose_compiler.runtime.hosts.places import PLACES, Places
from rose_compiler.runtime.hosts.process import ProcessHost
from rose_compiler.runtime.hosts.reviving import Call, Journal
from rose_compiler.runtime.hosts.tape import ENDS
from rose_compiler.runtime.hosts.thread import ThreadHost
from rose_compiler.runtime.hosts.transport import unpicklable_argument


class Hosted:
    """A component in a host: its methods are called as if it were here.

    Made by :func:`~rose_compiler.runtime.hosts.making.hosted`. Names that begin with an underscore,
    and those of this class, don't reach the component.
    """

    #: What the compiler knows it by.
    rose_hosted = True

    def __init__(
        self,
        start: Callable[..., Any],
        name: str,
        timeout: float | None,
        threads: int = 1,
        planned: Any = None,
    ) -> None:
        self.name = name
        self.rose_threads = threads  # of its numeric libraries, for quotas
        self.timeout = timeout
        self.rose_stateless = False  # nothing is lost with its process but time
        self._start = self._first = start  # now, and before any quota
        self._extra: dict[str, dict[str, str]] = {}  # variables of its process, by who gave them
        #: Of each call that is waited for at once: when it began, when it ran there (start, end),
        #: and when its result was here; kept while somebody asks for them.
        self.rose_calls: list[tuple[float, float, float, float]] | None = None
        #: The plan that it was started under, a ``Planned``, if any.
        self.rose_planned = planned
        if planned is not None:
            given = planned.environment(f"host:{name}")
            self._extra = {planned.by: given}
            first = cast("partial[Any]", start).keywords["environment"]
            self._start = partial(start, environment={**first, **given})
        self._threads: int | None = None  # of torch's operations, by a quota
        #: What could not be had, for ``explain()``.
        self.rose_remarks: list[Remark] = []
        self._version = self._replied = 0
        self._published: parameters.Published | None = None
        self._journal: Journal | None = None
        self._host: Any = None
        self._until: float | None = None
        self._open()
        if planned is not None:
            planned.started(f"host:{name}", self.pid)

    def _open(self) -> None:
        self._memory = Places(self._share)
        self._numbers = Numbering()
        self._places: list[Pending | None] = [None] * PLACES
        self._count = 0
        self._host = self._start()
        self._host.until = self._until
        if self._threads is not None:
            self._host.submit("limit_threads", self._threads)  # in front of every call

    # -- calls -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return types.MethodType(_remote(name), self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the component itself, in its host."""
        return self._call("__call__", args, kwargs)

    __call__.__rose_hosted__ = True  # type: ignore[attr-defined]

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = time.perf_counter()
        pending = self._begin(method, args, kwargs)
        if deferring():
            return pending
        value = pending.result()
        if self.rose_calls is not None and pending.times is not None:
            self.rose_calls.append((began, *pending.times[:2], time.perf_counter()))
        if pending.phases:
            phases.note(pending.phases)
        return value

    def _begin(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        try:
            blob, found = arrays.dump((args, kwargs))
        except RuntimeFault:
            raise
        except Exception as error:
            raise unpicklable_argument(method, error) from error
        call = Call(method, blob, tuple(arrays.layout_of(array) for array in found))
        try:
            pending = self._issue(call, found, [args, kwargs])
        except ENDS as error:
            if not self.rose_revived(error):
                raise
            pending = self._issue(call, found, [args, kwargs])
        if self._journal is not None:
            self._journal.issued(call, found, pending)
        return pending

    def _issue(
        self, call: Call, found: list[Any], held: Any, version: int | None = None
    ) -> Pending:
        """Send a call off, by default with the version published last."""
        if self._memory.by_handle is None and (on := _device(found)) is not None:
            self._agree(on)
        if (before := self._places[self._count % PLACES]) is not None:
            before.collect()
        if not self._memory.room(call.layouts):
            self._settle()  # nobody may be using the memory that this replaces
            self._memory.grow(call.layouts)
        place = self._count % PLACES
        self._count += 1
        for made in self._memory.write(place, found, call.layouts):
            self._host.call("slot", *made)
        if version is None:
            version = self._version
        payload = self._numbers.payload(call, place, version)
        ticket: Ticket | None = None
        try:
            if isinstance(self._host, ProcessHost):
                ticket = self._host.submit_raw(payload, call.method)
            else:
                ticket = self._host.submit("raw", payload)
                ticket.what = call.method
            self._numbers.sent(call)
            pending = self._places[place] = Pending(self, ticket, place, version, held, call)
        except BaseException:
            if ticket is not None:  # Ctrl-C: it runs all the same, and its place is taken
                self._places[place] = Pending(self, ticket, place, version, held, call)
            raise
        return pending

    def _answer(self, of: Pending, ticket: Ticket, place: int, timeout: float | None) -> Any:
        answer = self._host.wait(ticket, self.timeout if timeout is None else timeout)
        flag, version, start, end, cpu, needed = served.ANSWER.unpack_from(answer)
        if version != of.version:
            what = f"{ticket.what}() of {self.name!r} was issued with version {of.version}"
            raise fail("host-version", what, found=version)
        of.times = (start, end, cpu)
        at = served.ANSWER.size
        length = int.from_bytes(answer[at : at + 8], "little")
        body = pickle.loads(answer[at + 8 : at + 8 + length])
        blob, layouts, of.phases, by_handle, made = body
        self._replied = version
        if not layouts:
            return arrays.load(blob, ())
        if self._memory.by_handle is None and (
            on := next((x.device for x in layouts if x.device), "")
        ):
            self._agree(on)  # for the answers to come; this one says how it travels
        apart = None
        if flag != served.SHARED:
            self._memory.want(needed)
            apart = answer[at + 8 + length :]
        return arrays.load(blob, self._memory.read(place, layouts, by_handle, made, apart))

    def _agree(self, device: Any) -> None:
        """Settle whether this process and the component's hand CUDA tensors over by handle."""
        self._memory.by_handle = False
        if not isinstance(self._host, ProcessHost):
            return  # a process can't open its own handles
        why = ipc.refusal(device, partial(self._host.call, "opens"))
        self._memory.by_handle = why is None
        if why is not None:
            self._memory.pin()
            why = f"CUDA tensors for {self.name!r} travel through memory of the host: {why}"
            self.rose_remarks.append(Remark.from_blocker("hosts", Blocker("not-available", why)))

    def _share(self, method: str, size: int, *args: Any) -> Any:
        if isinstance(self._host, ProcessHost):
            return self._host.share(method, size, *args)[0]
        memory = mmap.mmap(-1, max(size, 1))
        self._host.call(method, memory, *args)
        return memory

    def _settle(self) -> None:
        for pending in self._places:
            if pending is not None:
                pending.collect()

    @property
    def until(self) -> float | None:
        """When every wait ends, by ``time.monotonic``, also in a host that takes over; None where
        their own limits hold."""
        return self._until

    @until.setter
    def until(self, until: float | None) -> None:
        self._until = self._host.until = until

    # -- its end, and another process ------------------------------------------------------------

    def rose_guard(self, stateless: bool) -> None:
        """Have a new process take over from one that dies or hangs. ``stateless``: the component
        keeps nothing between calls; else its state is taken between iterations."""
        self.rose_stateless = stateless
        self._journal = Journal(self, stateful=not stateless)

    def rose_now(self, method: str, *args: Any) -> Any:
        """Call a method and wait for the result, whoever calls."""
        return self._begin(method, args, {}).result()

    def rose_boundary(self) -> None:
        """An iteration begins: what a component that dies in it goes back to."""
        if self._journal is not None and isinstance(self._host, ProcessHost):
            self._settle()
            self._journal.boundary()

    def rose_released(self) -> None:
        """No iteration follows for now: what would bring the component back is let go."""
        if self._journal is not None:
            self._journal.released()

    def rose_revived(self, error: BaseException, limit: float | None = None) -> bool:
        """Whether a new process has taken over from one that died or hung, its open calls answered
        within ``limit`` seconds each, or within the component's own limit."""
        if self._journal is None:
            return False
        try:
            self._journal.revive(error, limit)
        except ENDS:
            return False
        return True

    def rose_offers(self, *methods: str) -> bool:
        """Whether the component has these methods."""
        return bool(self._host.call("offers", *methods))

    # -- parameters ------------------------------------------------------------------------------

    def publish(self, source: Any) -> int:
        """Hand over parameters: every call from now on runs with them. Returns their version.

        ``source`` is a module, or a dict of tensors or arrays by name. They are copied into shared
        memory now; the component takes them, by ``load_state_dict``, as its next call begins, so
        that calls issued before run with the version they were issued with.

        Raises ``RuntimeFault`` (``host-parameters``) if the component can't take them.
        """
        state = parameters.state_of(source)
        values = list(state.values())
        names, layouts = tuple(state), tuple(map(arrays.layout_of, values))
        if self._published is None or self._published[:2] != (names, layouts):
            self._settle()
            given = parameters.PLACES * parameters.place_size(layouts), names, layouts
            try:
                memory = self._share("parameters", *given)
            except ENDS as error:  # since the last call
                if not self.rose_revived(error):
                    raise
                memory = self._share("parameters", *given)
            self._published = names, layouts, memory
        version = self._version + 1
        for pending in self._places:
            # who was issued with the version in this place may not have taken it yet
            if pending is not None and pending.version <= version - parameters.PLACES:
                pending.collect()
        parameters.store(self._published[2], version, values, layouts)
        self._version = version
        if self._journal is not None:
            self._journal.published(state, version, arrays.room(layouts))
        return version

    publish.__rose_hosted__ = True  # type: ignore[attr-defined]

    @property
    def version(self) -> int:
        """The version published last; 0 before the first."""
        return self._version

    @property
    def replied(self) -> int:
        """The version with which the answer was made that arrived last."""
        return self._replied

    # -- the host --------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process that the component lives in."""
        return self._host.pid if isinstance(self._host, ProcessHost) else os.getpid()

    @property
    def hosts(self) -> str:
        """The kind of host: ``"process"``, ``"thread"`` or ``"inline"``."""
        if isinstance(self._host, ProcessHost):
            return "process"
        return "thread" if isinstance(self._host, ThreadHost) else "inline"

    def ready(self) -> None:
        """Wait until the component is built.

        Raises ``FactoryError`` if its factory raised, ``RuntimeFault`` if no process started.
        """
        self._host.ready()

    def restart(self) -> None:
        """Build the component anew, in a new host, with the version published last.

        For a component that has no state of its own, after its host died or ran out of time. What
        calls under way would have answered is lost: their results raise ``HostDied``.
        """
        if self._journal is not None:
            self._journal.forget()
        self._end()
        for pending in self._places:
            if pending is not None:
                pending.drop()
        self.rose_replace()

    def rose_replace(self) -> None:
        """Build the component in a new process, with the parameters that this one was given."""
        published = self._published
        self._end()
        self._open()
        if published is None:
            return
        try:
            self._published = self._given(published)
        except BaseException:
            self._end()  # it may not answer without them
            raise

    def _given(self, published: parameters.Published) -> parameters.Published:
        """Hand this host's component the parameters that another one was given."""
        names, layouts, old = published
        size = parameters.place_size(layouts)
        memory = self._share("parameters", parameters.PLACES * size, names, layouts)
        memory[:] = old[:]
        return names, layouts, memory

    def _end(self) -> None:
        if isinstance(self._host, ProcessHost):
            self._host.kill()
        else:
            self._host.close()

    def close(self) -> None:
        """Run what was issued, close the component, end its host. Again: does nothing."""
        try:
            self._host.close()
        finally:
            self._memory = Places(self._share)
            self._published = None
            planned, self.rose_planned = self.rose_planned, None
            if planned is not None:
                planned.leave()

    def rose_limit(self, cores: Collection[int] | None, threads: int | None) -> bool:
        """Bind the process to these cores, and torch's operations in it to so many threads; what
        is None stays. So is a process that takes over. For quotas; between calls only, and without
        effect on other kinds of hosts. Whether the threads are as many now: other libraries count
        theirs as they are loaded.

        Raises ``OSError`` if the system refuses.
        """
        if not isinstance(self._host, ProcessHost):
            return True
        if cores is not None:
            self._start = partial(self._start, cores=frozenset(cores))
        self._threads = self._threads if threads is None else threads
        self._host.ready()
        if cores is not None:
            bind_process(self.pid, cores)
        if threads is None:
            return True
        return bool(self._host.call("limit_threads", threads)) or threads == self.rose_threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<component {self.name!r} in a host, {self.hosts}>"


def _device(found: list[Any]) -> Any:
    """The device of the first array that is not in memory of the host, or None."""
    return next((a.device for a in found if getattr(a, "is_cuda", False)), None)


@functools.cache
def _remote(name: str) -> types.FunctionType:
    """The function behind a method of a hosted component."""

    def method(self: Hosted, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, args, kwargs)

    method.__name__, method.__qualname__ = name, f"Hosted.{name}"
    method.__rose_hosted__ = True  # type: ignore[attr-defined]
    return cast(types.FunctionType, method)
