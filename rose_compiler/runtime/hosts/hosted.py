"""``hosted(factory)``: a component in a host of its own that is used like the component itself.

Arguments and results travel as values, never as references: arrays by memory that is shared once
and used again by every call, the rest pickled. So the component can't see what the caller does to
its arrays later, in whatever host it lives.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import types
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal, Self, cast, get_args

from rose_compiler.base import phases
from rose_compiler.base.errors import RuntimeFault, fail
from rose_compiler.base.quota import THREADS
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.hosts import arrays, ipc, parameters, served
from rose_compiler.runtime.hosts.host import InlineHost, Ticket
from rose_compiler.runtime.hosts.pending import Pending, deferring
from rose_compiler.runtime.hosts.process import ProcessHost
from rose_compiler.runtime.hosts.thread import ThreadHost
from rose_compiler.runtime.hosts.transport import unpicklable_argument

Kind = Literal["process", "thread", "inline"]
#: Calls that may be under way in one host at a time; one more waits for the oldest.
PLACES = 2
_HELP = "see `help(rose_compiler.hosted)`"
#: Descriptions of calls that a worker keeps: calls like one of them are sent as a number.
_KEPT = 256


class Hosted:
    """A component in a host: its methods are called as if it were here.

    Made by :func:`hosted`. Names that begin with an underscore, and those of this class, don't
    reach the component.
    """

    #: What the compiler knows it by.
    rose_hosted = True

    def __init__(
        self, start: Callable[[], Any], name: str, timeout: float | None, threads: int = 1
    ) -> None:
        self.name = name
        self.rose_threads = threads  # of its numeric libraries, for quotas
        self.timeout = timeout
        self._start = start
        #: What could not be had, for ``explain()``.
        self.rose_remarks: list[Remark] = []
        self._version = 0
        self._replied = 0
        self._published: tuple[tuple[str, ...], tuple[arrays.Layout, ...], Any] | None = None
        self._host: Any = None
        self._open()

    def _open(self) -> None:
        self._arguments: tuple[Any, int] = (None, 0)
        self._results: tuple[Any, int] = (None, 0)
        self._wanted = 0  # bytes of the largest result that had no room
        self._known: dict[Any, int] = {}
        self._places: list[Pending | None] = [None] * PLACES
        self._count = 0
        #: Whether CUDA tensors travel by handle; None before the first of them.
        self._by_handle: bool | None = None
        self._host = self._start()

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
        pending = self._begin(method, args, kwargs)
        if deferring():
            return pending
        value = pending.result()
        if pending.phases:
            phases.note(pending.phases)
        return value

    def _begin(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        try:
            blob, found = arrays.dump((args, kwargs), by_handle=bool(self._by_handle))
            if self._by_handle is None and (on := _device(found)) is not None and self._agree(on):
                blob, found = arrays.dump((args, kwargs), by_handle=True)
        except RuntimeFault:
            raise
        except Exception as error:
            raise unpicklable_argument(method, error) from error
        layouts = tuple(arrays.layout_of(array) for array in found)
        self._make_room(arrays.room(layouts))
        place = self._count % PLACES
        self._count += 1
        if (before := self._places[place]) is not None:
            before.collect()
        memory, size = self._arguments
        arrays.write(memory, place * size, found, layouts)
        key = (method, blob, layouts)
        number = self._known.get(key)
        how, rest = served.KNOWN, b""
        if number is None:
            number = len(self._known)
            how, rest = served.ONCE, pickle.dumps(key)
            # a handle is that of one tensor, so no other call is like this one
            if number < _KEPT and ipc.MARK not in blob:
                how = served.FULL
                self._known[key] = number
        payload = served.CALL.pack(number, place, how, phases.wanted(), self._version) + rest
        if isinstance(self._host, ProcessHost):
            ticket = self._host.submit_raw(payload, method)
        else:
            ticket = self._host.submit("raw", payload)
            ticket.what = method
        pending = Pending(self, ticket, place, self._version, [args, kwargs])
        self._places[place] = pending
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
        blob, layouts, of.phases = pickle.loads(answer[at + 8 : at + 8 + length])
        self._replied = version
        if not layouts:
            return arrays.load(blob, ())
        if flag == served.SHARED:
            memory, size = self._results
            return arrays.load(blob, arrays.read(memory, place * size, layouts))
        self._wanted = max(self._wanted, needed)
        block = bytearray(answer[at + 8 + length :])
        return arrays.load(blob, arrays.read(block, 0, layouts))

    def _agree(self, device: Any) -> bool:
        """Whether this process and the component's can hand CUDA tensors over by handle."""
        self._by_handle = False
        if not isinstance(self._host, ProcessHost):
            return False  # a process can't open its own handles
        try:
            kept, made = ipc.offer(device)
        except RuntimeError as error:
            why: str | None = f"this process can't share its memory: {error}"
        else:
            why = self._host.call("opens", made)
            del kept
        self._by_handle = why is None
        if why is not None:
            why = f"CUDA tensors for {self.name!r} travel through memory of the host: {why}"
            self.rose_remarks.append(Remark.from_blocker("hosts", Blocker("not-available", why)))
        return self._by_handle

    def _make_room(self, needed: int) -> None:
        """Shared memory for arguments of that size, and for the largest result seen."""
        if needed > self._arguments[1]:
            self._arguments = self._shared("arguments", needed), needed
        if self._wanted > self._results[1]:
            self._results = self._shared("results", self._wanted), self._wanted

    def _shared(self, method: str, size: int) -> Any:
        self._settle()  # nobody may be using the memory that this replaces
        return self._share(method, PLACES * size, size)

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
            memory = self._share(
                "parameters", parameters.PLACES * parameters.place_size(layouts), names, layouts
            )
            self._published = names, layouts, memory
        version = self._version + 1
        for pending in self._places:
            # who was issued with the version in this place may not have taken it yet
            if pending is not None and pending.version <= version - parameters.PLACES:
                pending.collect()
        parameters.store(self._published[2], version, values, layouts)
        self._version = version
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
        calls under way would have answered is lost.
        """
        if isinstance(self._host, ProcessHost):
            self._host.kill()
        else:
            self._host.close()
        published = self._published
        self._open()
        if published is not None:
            names, layouts, old = published
            size = parameters.place_size(layouts)
            memory = self._share("parameters", parameters.PLACES * size, names, layouts)
            memory[:] = old[:]
            self._published = names, layouts, memory

    def close(self) -> None:
        """Run what was issued, close the component, end its host. Again: does nothing."""
        try:
            self._host.close()
        finally:
            self._arguments = self._results = (None, 0)
            self._published = None

    def rose_limit(self, cores: Collection[int] | None, threads: int | None) -> None:
        """Bind the process to these cores, and torch's operations in it to so many threads; what
        is None stays. For quotas; between calls only, and without effect on other kinds of hosts.

        Raises ``OSError`` if the system refuses.
        """
        if not isinstance(self._host, ProcessHost):
            return
        self._host.ready()
        if cores is not None:
            for task in os.listdir(f"/proc/{self.pid}/task"):
                try:
                    os.sched_setaffinity(int(task), cores)
                except ProcessLookupError:  # a thread may end meanwhile
                    continue
        if threads is not None:
            self._host.call("limit_threads", threads)

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


def hosted(
    factory: Callable[[], Any],
    *,
    host: Kind = "process",
    name: str = "",
    threads: int | None = 1,
    cores: Collection[int] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    start_timeout: float | None = 120.0,
) -> Hosted:
    """A component in a host of its own: a policy, simulator, trainer, evaluator, reward model.

    ``factory()`` builds it there; calls of its methods look like calls of the component. In a loop
    that is compiled, a call runs beside what does not need its result. The constructor returns at
    once, so that several start side by side; :meth:`Hosted.ready` or the first result waits.

    Args:
        factory: a function without parameters, sent by cloudpickle.
        host: ``"process"`` (a fresh interpreter, never a fork), ``"thread"``, or ``"inline"``.
        name: for errors; that of the factory by default.
        threads: threads of numeric libraries in the process; None for as many as cores.
        cores: numbers of the cores that the process may use; None for the caller's.
        environment: variables added to the caller's before the process starts.
        timeout: seconds that an answer may take; the process is killed then. None: no limit.
        start_timeout: seconds for starting the process and building the component.

    Raises:
        FactoryError: if the factory can't be pickled; the message names what holds it back.
        RuntimeFault: ``host-start`` if the process can't be started.
        ConfigError: for another kind of host, and for threads, cores and variables that can't be.
    """
    if host not in get_args(Kind):
        raise fail(
            "config-argument",
            "there is no such kind of host",
            expected=", ".join(map(repr, get_args(Kind))),
            found=f"host={host!r}",
            help=_HELP,
        )
    if threads is not None and (type(threads) is not int or threads < 1):
        what, wanted = "a host runs on one thread at least", "a positive whole number or None"
        raise fail(
            "config-argument", what, expected=wanted, found=f"threads={threads!r}", help=_HELP
        )
    name = name or getattr(factory, "__name__", "component")
    build = partial(served.Served, factory)
    start: Callable[[], Any]
    if threads is None:
        threads = len(os.sched_getaffinity(0) if cores is None else cores)
    if host == "process":
        start = partial(
            ProcessHost,
            build,
            name=name,
            timeout=timeout,
            environment={**dict.fromkeys(THREADS, str(threads)), **(environment or {})},
            cores=cores,
            start_timeout=start_timeout,
        )
    elif host == "thread":
        start = partial(ThreadHost, build, name=name, timeout=timeout, torch_threads=threads)
    else:
        start = partial(InlineHost, build, name=name, timeout=timeout)
    return Hosted(start, name, timeout, threads)
