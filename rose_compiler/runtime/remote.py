"""Lanes whose work runs elsewhere by itself: shards of a simulator, and components in hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter
from typing import Any

from rose_compiler.base import phases
from rose_compiler.base.errors import HostTimeout
from rose_compiler.base.spanlog import SpanLog
from rose_compiler.runtime.hosts.host import within
from rose_compiler.runtime.hosts.pending import Pending, begin
from rose_compiler.runtime.lanes import Task, ThreadLane, late, whole_step

#: Seconds that a step gets at least once somebody waits for it: its result may be there already.
LEAST_S = 0.5


class ShardLane:
    """A shard of a simulator that steps by itself: ``step_async`` at submit, ``step_wait`` at wait.

    A shard that can't (``native_async`` is false) is stepped by a thread lane. Anything else than
    steps runs on that thread too, in order with the steps. ``timeout`` bounds each wait in seconds,
    where the shard lives in a host.
    """

    def __init__(
        self, name: str, *, threads: int | None = None, timeout: float | None = None
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self._spans: SpanLog | None = None
        self._timed: Any = None  # the shard that has been told to time its steps
        self._running: ShardTask | None = None
        self._thread = ThreadLane(name, threads=threads, timeout=timeout)
        self._thread.failed = self.failed
        self._thread.skipped = self.skipped

    @property
    def spans(self) -> SpanLog | None:
        return self._spans

    @spans.setter
    def spans(self, spans: SpanLog | None) -> None:
        self._spans = self._thread.spans = spans
        if spans is None and self._timed is not None:
            self._timed.timed(False)
            self._timed = None

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        self._collect()
        return self._thread.submit(site, fn, *args)

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        """Begin a step. ``packed``: of its infos, only the simulator's ``merge`` will know."""
        if not getattr(shard, "native_async", False):
            return self._thread.submit(site, whole_step(shard), action)
        self._collect()
        if self._spans is not None and self._timed is None and hasattr(shard, "timed"):
            self._timed = shard
            shard.timed(True)
        start = perf_counter()  # the shard may have begun before the next line runs
        shard.step_async(action)
        packed = packed and hasattr(shard, "step_wait_packed")
        self._running = task = ShardTask(self, site, shard, packed, start)
        return task

    def _collect(self) -> None:
        """Bring in a step that nobody has waited for; a shard runs one step at a time."""
        if self._running is not None:
            self._running.receive()

    @property
    def busy(self) -> bool:
        """Whether a step, or its thread, is under way."""
        return (self._running is not None and not self._running.done) or self._thread.busy

    def settle(self, grace: float | None) -> bool:
        running, until = self._running, _until(grace)
        if running is not None and grace is None:
            running.receive()
        elif running is not None:
            # a shard can't be asked to wait for so long and no longer
            waiting = threading.Thread(
                target=running.settle, name=f"rose {self.name} settling", daemon=True
            )
            waiting.start()
            waiting.join(grace)
            if waiting.is_alive():
                return False
        return self._thread.settle(_left(until))

    def close(self) -> None:
        self._collect()
        self._thread.close()

    def abandon(self) -> None:
        """Leave behind a step, or a thread, that does not come to an end. A shard that can be told
        so refuses further steps: whoever waits for this one may still do."""
        running, self._running = self._running, None
        if running is not None and hasattr(running.shard, "give_up"):
            running.shard.give_up(late(self.name, perf_counter() - running.start))
        self._thread.abandon()


def _until(grace: float | None) -> float | None:
    return None if grace is None else perf_counter() + grace


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - perf_counter())


class ShardTask(Task):
    """A step under way in its shard."""

    __slots__ = ("packed", "shard", "start")

    def __init__(self, lane: ShardLane, site: int, shard: Any, packed: bool, start: float) -> None:
        super().__init__(lane, site)
        self.shard = shard
        self.packed = packed
        self.start = start

    def wait(self) -> Any:
        if not self.done:
            self.receive()
        if self.error is not None:
            raise self.error
        return self.value

    def _limited(self) -> AbstractContextManager[None]:
        """The lane's time limit, for a shard that can be given one: a user's own can't. It counts
        from when the step began, so that shards that hang together don't add up."""
        limit = self.lane.timeout  # type: ignore[attr-defined]
        if limit is None or not hasattr(self.shard, "within"):
            return nullcontext()
        left = self.start + limit - perf_counter()
        within: AbstractContextManager[None] = self.shard.within(
            max(left, min(limit, LEAST_S)), limit
        )
        return within

    def settle(self) -> None:
        """As :meth:`receive`, of a shard that nobody goes on from."""
        settling = getattr(self.shard, "settling", nullcontext)
        with settling():
            self.receive()

    def receive(self) -> None:
        """Take the result in, or what the step raised."""
        lane = self.lane
        assert isinstance(lane, ShardLane)
        try:
            shard = self.shard
            with self._limited():
                self.value = shard.step_wait_packed() if self.packed else shard.step_wait()
        except Exception as error:
            # an interrupt is not the step's: the step is still under way then
            self.error = error
            lane.failed.append(self)
        self.done = True
        lane._running = None
        if lane._spans is not None:
            self._note(lane, lane._spans, perf_counter())

    def _note(self, lane: ShardLane, spans: SpanLog, ended: float) -> None:
        """Leave a span. All that is done here, the next step of the shard waits for."""
        start, site = self.start, self.site
        # of a step that failed nothing is known, and its host may have ended
        timed = lane._timed is self.shard and self.error is None
        told = self.shard.told() if timed else None
        if told is None:
            spans.note(("step", lane.name, start, ended, site, None, None, None))
            return
        began, over, cpu, named = told
        spans.note(("step", lane.name, start, ended, site, cpu, start, (began, over)))
        if named:
            # the step has its result, whatever became of its host since: the next one says so
            with suppress(Exception):
                phases.note(self.shard.phases(), lane.name)


class RemoteTask(Task):
    """A call under way in a host; its lane has a ``timeout``."""

    __slots__ = ("start",)

    def __init__(self, lane: HostLane | ComponentLane, site: int) -> None:
        super().__init__(lane, site)
        self.start = perf_counter()

    def wait(self) -> Any:
        if not self.done:
            self.receive(self.limit)
        if self.error is not None:
            raise self.error
        return self.value

    @property
    def limit(self) -> float | None:
        """Seconds that the call may take: its lane's limit or its host's own, the shorter one."""
        limits = (self.lane.timeout, self._own_limit())  # type: ignore[attr-defined]
        return min((limit for limit in limits if limit is not None), default=None)

    def _own_limit(self) -> float | None:
        raise NotImplementedError

    def receive(self, timeout: float | None) -> None:
        """Take the result in, or what the call raised."""
        raise NotImplementedError


def _settled(lane: HostLane | ComponentLane, grace: float | None) -> bool:
    """Take in the calls under way of a lane, all together in this many seconds. A call that takes
    longer has not failed: nobody waits for it any more. One that takes longer than it may by
    itself has."""
    lane.until = until = _until(grace)
    rests = True
    try:
        for task in tuple(lane._running):
            left, own = _left(until), task.limit
            task.receive(own if left is None else left if own is None else min(own, left))
            if left is None or not isinstance(task.error, HostTimeout):
                continue
            if own is None or left <= own or not _left(until):
                lane.failed.remove(task)
                rests = False
    finally:
        lane.until = None
    return rests


class HostLane:
    """A component in a host (:mod:`rose_compiler.runtime.hosts`): tasks call its methods by name.

    ``submit`` takes the name of a method in place of a function. The host keeps the order.
    """

    def __init__(self, name: str, host: Any, *, timeout: float | None = None) -> None:
        self.name = name
        self.host = host
        self.timeout = timeout
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self.spans: SpanLog | None = None
        self.until: float | None = None  # while it settles
        self._running: list[HostTask] = []

    def submit(self, site: int, fn: Any, *args: Any) -> Task:
        ticket = self.host.submit(fn, *(a.wait() if isinstance(a, Task) else a for a in args))
        task = HostTask(self, site, ticket)
        self._running.append(task)
        return task

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        return self.submit(site, "step", action)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._running)

    def settle(self, grace: float | None) -> bool:
        return _settled(self, grace)

    def close(self) -> None:
        self.settle(self.timeout)


class ComponentLane:
    """A component that is used through :func:`rose_compiler.runtime.hosts.hosted`.

    ``submit`` runs a function that calls it once, which begins the call and comes back; ``wait``
    takes the answer in. The host keeps the order.
    """

    def __init__(self, name: str, *, timeout: float | None = None) -> None:
        self.name = name
        self.timeout = timeout
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self.spans: SpanLog | None = None
        self.until: float | None = None  # while it settles
        self._running: list[ComponentTask] = []

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        task = ComponentTask(self, site)
        values = tuple(a.wait() if isinstance(a, Task) else a for a in args)
        try:
            begun = begin(fn, values)
        except Exception as error:
            task.error, task.done = error, True
            self.failed.append(task)
            return task
        if isinstance(begun, Pending):
            task.pending = begun
            self._running.append(task)
        else:
            task.value, task.done = begun, True
            task.span("publish")
        return task

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        return self.submit(site, shard.step, action)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._running)

    def settle(self, grace: float | None) -> bool:
        return _settled(self, grace)

    def close(self) -> None:
        self.settle(self.timeout)


class ComponentTask(RemoteTask):
    """A call under way in a component's host."""

    __slots__ = ("pending",)

    def __init__(self, lane: ComponentLane, site: int) -> None:
        super().__init__(lane, site)
        self.pending: Pending | None = None

    def _own_limit(self) -> float | None:
        return None if self.pending is None else self.pending.timeout

    def receive(self, timeout: float | None) -> None:
        lane, pending = self.lane, self.pending
        assert isinstance(lane, ComponentLane)
        assert pending is not None
        with pending.within(_left(lane.until)):
            pending.collect(timeout)
        self.value, self.error, self.done = pending.value, pending.error, True
        if self.error is not None:
            lane.failed.append(self)
        lane._running.remove(self)
        self.span(pending.what, pending.times)
        if pending.phases:
            phases.note(pending.phases, lane.name)
        self.pending = None

    def span(self, what: str, ran: tuple[float, float, float] | None = None) -> None:
        """Note when the call ran, where spans are wanted."""
        spans, name, began, site = self.lane.spans, self.lane.name, self.start, self.site
        if spans is None:
            return
        if ran is None:
            spans.note((what, name, began, perf_counter(), site, None, None, None))
            return
        start, end, cpu = ran
        spans.note((what, name, began, perf_counter(), site, cpu, began, (start, end)))


class HostTask(RemoteTask):
    """A call of a host's method under way."""

    __slots__ = ("ticket",)

    def __init__(self, lane: HostLane, site: int, ticket: Any) -> None:
        super().__init__(lane, site)
        self.ticket = ticket

    def _own_limit(self) -> float | None:
        limit: float | None = getattr(self.lane.host, "timeout", None)  # type: ignore[attr-defined]
        return limit

    def receive(self, timeout: float | None) -> None:
        lane = self.lane
        assert isinstance(lane, HostLane)
        try:
            with within(lane.host, _left(lane.until)):
                self.value = lane.host.wait(self.ticket, timeout)
        except Exception as error:
            self.error = error
            lane.failed.append(self)
        self.done = True
        lane._running.remove(self)
        if lane.spans is not None:
            about = self.ticket.what, lane.name, self.start, perf_counter(), self.site
            lane.spans.note((*about, None, None, None))
