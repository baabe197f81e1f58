"""Lanes: in-order queues of work with one owner each.

``submit`` hands an operation to a lane and returns a task; ``task.wait()`` gives its result, or
raises the very exception that it raised. The coordinator, the thread that calls the compiled
function, submits and waits; nobody else does. After a failure a lane runs nothing more until it is
settled: what was queued behind is skipped.
"""

from __future__ import annotations

import threading
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from time import perf_counter, thread_time
from typing import Any, Protocol

import torch

from rose_compiler.base.errors import RoseError, fail
from rose_compiler.base.spanlog import SpanLog
from rose_compiler.runtime.modes import Modes, current, entered
from rose_compiler.runtime.openmp import next_of


class Skipped(Exception):
    """A task did not run, because one before it on its lane had failed."""


class Task:
    """One operation handed to a lane."""

    __slots__ = ("done", "error", "lane", "site", "value")

    def __init__(self, lane: Lane, site: int) -> None:
        self.lane = lane
        self.site = site
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        """The result, once it is there. Raises what the operation raised, ``HostTimeout`` when
        the lane's time limit has passed."""
        if self.error is not None:
            raise self.error
        return self.value

    def __getitem__(self, index: int) -> Item:
        return Item(self, index)


class Item:
    """One part of the result of a task that may not have run yet, for later tasks of its lane."""

    __slots__ = ("index", "task")

    def __init__(self, task: Task | Item, index: int) -> None:
        self.task = task
        self.index = index

    def __getitem__(self, index: int) -> Item:
        return Item(self, index)

    @property
    def value(self) -> Any:
        return self.task.value[self.index]


class Lane(Protocol):
    """What every lane can do."""

    name: str
    failed: list[Task]
    skipped: list[Task]
    spans: SpanLog | None

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        """Hand over ``fn(*args)``; tasks among the arguments stand for their results."""

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        """Hand over ``shard.step(action)``."""

    def settle(self, grace: float | None) -> bool:
        """Wait until nothing runs any more, at most ``grace`` seconds; whether that is so."""

    def close(self) -> None:
        """Run what was submitted and end the lane. Closing again does nothing."""


def whole_step(shard: Any) -> Callable[[Any], Any]:
    """``shard.step``, or its two halves one after the other for a shard that has no whole."""
    step: Callable[[Any], Any] | None = getattr(shard, "step", None)
    if step is not None:
        return step

    def step_and_wait(action: Any) -> Any:
        shard.step_async(action)
        return shard.step_wait()

    return step_and_wait


class InlineLane:
    """The coordinator itself: ``submit`` runs the operation to its end, raising what it raises."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self.spans: SpanLog | None = None

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        task = Task(self, site)
        start = perf_counter()
        task.value = fn(*map(_resolved, args))
        task.done = True
        if self.spans is not None:
            noted = _name(fn), self.name, start, perf_counter(), site, None, None, None
            self.spans.note(noted)
        return task

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        return self.submit(site, whole_step(shard), action)

    def settle(self, grace: float | None) -> bool:
        return True

    def close(self) -> None:
        pass


def _resolved(value: Any) -> Any:
    return value.value if isinstance(value, Task | Item) else value


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


class ThreadTask(Task):
    """A task of a thread lane, with all that its worker needs to run it."""

    __slots__ = ("args", "context", "fn", "gate", "issued", "modes")

    def __init__(
        self, lane: ThreadLane, site: int, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        super().__init__(lane, site)
        self.fn: Callable[..., Any] | None = fn
        self.args = args
        self.modes: Modes | None = None
        self.issued = perf_counter() if lane.spans is not None else None
        self.context: Context | None = None
        self.gate: LockType = allocate_lock()
        self.gate.acquire()

    def wait(self) -> Any:
        if not self.done and not self.arrived(self.lane.timeout):  # type: ignore[attr-defined]
            raise late(self.lane.name, self.lane.timeout)  # type: ignore[attr-defined]
        if self.error is not None:
            raise self.error
        return self.value

    def arrived(self, timeout: float | None) -> bool:
        """Wait until the task has run or was skipped; false when the time is over first."""
        if not self.gate.acquire(timeout=-1 if timeout is None else timeout):
            return False
        self.gate.release()
        return True


def late(lane: str, seconds: float) -> RoseError:
    """The error of a task that did not end within these seconds."""
    return fail("host-timeout", f"lane {lane!r} did not finish its task within {seconds:.3g} s")


class ThreadLane:
    """A daemon thread that runs tasks in order, each under the modes of its submitter.

    Grad mode, inference mode, autocast, the default device, torch's thread count and context
    variables are taken when a task is submitted. ``threads`` is a thread count of the worker's own.
    ``timeout`` bounds each ``wait`` in seconds. The thread starts with the first task.
    """

    def __init__(
        self, name: str, *, threads: int | None = None, timeout: float | None = None
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.threads = threads
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self.spans: SpanLog | None = None
        self._queue: SimpleQueue[ThreadTask | None] = SimpleQueue()
        self._last: ThreadTask | None = None
        self._thread: threading.Thread | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        task = self.task(site, fn, args)
        task.modes = current()
        task.context = copy_context()
        if self._thread is None:
            self._start()
        self._last = task
        self._queue.put(task)
        return task

    def task(self, site: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> ThreadTask:
        """A task of this lane, not yet handed over."""
        return ThreadTask(self, site, fn, args)

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        return self.submit(site, whole_step(shard), action)

    @property
    def busy(self) -> bool:
        """Whether its thread has something left to run."""
        return self._last is not None and not self._last.done

    def settle(self, grace: float | None) -> bool:
        last = self._last
        if last is not None and not last.done and not last.arrived(grace):
            return False
        self._last = None
        return True

    def close(self) -> None:
        if self._thread is None or self._end is None:
            return
        self._end()
        thread, self._thread = self._thread, None
        thread.join(self.timeout)

    def abandon(self) -> None:
        """Leave a thread behind that does not come to an end; it runs nothing more after that."""
        if self._last is not None and not self._last.done:
            self.failed.append(self._last)  # what was queued behind it is skipped
        if self._end is not None:
            self._end()
        self._thread = None

    def _start(self) -> None:
        # a new queue: one that was closed may still hold its end mark
        self._queue = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._queue, self.threads), name=f"rose {self.name}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)


def _work(queue: SimpleQueue[ThreadTask | None], threads: int | None) -> None:
    """The worker. It knows its lane through tasks only, so that a forgotten lane ends it."""
    if threads is not None:
        _use_threads(threads)
    while True:
        task = next_of(queue)
        if task is None:
            return
        lane = task.lane
        if lane.failed:
            task.error = Skipped(f"a task before it on lane {lane.name!r} failed")
            lane.skipped.append(task)
        else:
            if threads is None and task.modes is not None:
                _use_threads(task.modes.threads)
            _run(task, lane)
        # what a task was given must not outlive it: its memory may be large
        task.fn = task.context = None
        task.args = ()
        task.done = True
        task.gate.release()
        del task, lane


def _use_threads(count: int) -> None:
    # each thread has a count of its own: another thread's later change does not reach it
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _run(task: ThreadTask, lane: Lane) -> None:
    spans = lane.spans
    start, cpu = (perf_counter(), thread_time()) if spans is not None else (0.0, 0.0)
    fn, modes = task.fn, task.modes
    assert fn is not None
    assert modes is not None
    assert task.context is not None
    args = tuple(map(_resolved, task.args))
    try:
        other = modes.grad is not torch.is_grad_enabled()
        if other or modes.inference or modes.autocast or modes.device is not None:
            with entered(modes):
                task.value = task.context.run(fn, *args)
        else:
            task.value = task.context.run(fn, *args)
    except BaseException as error:
        task.error = error
        lane.failed.append(task)
    if spans is not None:
        end, cpu = perf_counter(), thread_time() - cpu
        spans.note((_name(fn), lane.name, start, end, task.site, cpu, task.issued, None))
