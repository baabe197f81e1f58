"""A GPU that is not there, in real time: streams, events and kernels that last as they would.

:class:`VirtualDevice` drives the model of :mod:`rose_compiler.base.gpu` by the clock. It offers the
streams that a stream lane asks for, so the executor runs against it as against a device::

    with VirtualDevice(plan.virtual_gpu()) as device:
        runtime = Runtime(streams=device)
        runtime.lane("stream:sim").submit(0, device.launch, Work(2e-3, demand=40))

Kernels compute nothing: what a component returns is there at once, and is late only for those who
wait for the event behind it, as on a device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Self

import torch

from rose_compiler.base.errors import fail
from rose_compiler.base.gpu import GpuRun, Interval, Kernel, Progress, VirtualGpu, rates

#: The stream that a thread issues to unless it says otherwise.
DEFAULT = "stream0"


@dataclass(frozen=True)
class Work:
    """What one launch asks of the device; as the fields of :class:`rose_compiler.base.gpu.Kernel`.

    ``name`` is for the record that :attr:`VirtualDevice.record_of_run` keeps; the second of a name
    is called ``name 2`` there, and so on.
    """

    work_s: float
    demand: float
    serial: float = 0.0
    bandwidth: float = 0.0
    grain: float = 1.0
    name: str = ""


class VirtualEvent:
    """Happens when the stream that it was recorded on has come so far."""

    def __init__(self) -> None:
        self.happened = False
        self.at = 0.0  # device time


#: What stands in a stream's queue: a kernel, an event that is recorded, or one that is waited for.
_Entry = tuple[str, Any]


class VirtualDevice:
    """A virtual GPU driven by the clock, and its streams.

    ``gpu`` says how it is divided; streams are called ``stream0``, ``stream1``, … in the order in
    which they are made, ``stream0`` being the one that every thread issues to at first.

    The device has a time of its own: kernels that were launched before their stream was free follow
    upon each other without a gap, however late this process wakes up to see it.
    """

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Entry]] = {DEFAULT: deque()}
        self._left: dict[str, float] = {}  # stream -> work left of the kernel that runs there
        self._kernels: dict[str, Kernel] = {}  # stream -> that kernel
        self._progress: dict[str, Progress] = {}
        self._now = 0.0
        self._began = perf_counter()
        self._closed = False
        self._stuck: list[str] = []  # kernels that will never get an SM
        self._counts: dict[str, int] = {}  # of kernels by name
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._intervals: list[Interval] = []
        self._issuing = threading.local()
        self._thread = threading.Thread(target=self._drive, name="virtual-gpu", daemon=True)
        self._thread.start()

    # -- streams, as a lane asks for them --------------------------------------------------------

    def stream(self, priority: int = 0) -> str:
        """A new stream; a lower number is served first. What ``gpu`` says of it goes before."""
        with self._changed:
            name = f"stream{len(self._queues)}"
            self._queues[name] = deque()
            self.gpu = replace(self.gpu, priority={name: priority, **self.gpu.priority})
            return name

    def current(self) -> str:
        """The stream that this thread issues to."""
        return getattr(self._issuing, "stream", DEFAULT)

    @contextmanager
    def use(self, stream: str) -> Iterator[None]:
        """Issue to another stream inside a ``with`` block."""
        before = self.current()
        self._issuing.stream = stream
        try:
            yield
        finally:
            self._issuing.stream = before

    def record(self, stream: str) -> VirtualEvent:
        """An event that happens when all that was issued to the stream so far is done."""
        event = VirtualEvent()
        self._issue(stream, ("record", event))
        return event

    def wait(self, stream: str, event: VirtualEvent) -> None:
        """Hold what is issued to the stream from now on until the event has happened."""
        self._issue(stream, ("wait", event))

    def keep(self, tensor: torch.Tensor, stream: str) -> None:
        """Nothing: kernels touch no memory."""

    def happened(self, event: VirtualEvent) -> bool:
        """Whether an event has happened."""
        return event.happened

    def synchronize(self, stream: str) -> None:
        """Block until the stream is idle."""
        self.reach(self.record(stream))

    # -- work ------------------------------------------------------------------------------------

    def launch(self, work: Work) -> None:
        """Issue a kernel to the current stream and return at once."""
        with self._changed:
            name = work.name or "kernel"
            count = self._counts[name] = self._counts.get(name, 0) + 1
            if count > 1 or not work.name:
                name = f"{name} {count}"
        stream = self.current()
        kernel = Kernel(
            name,
            stream,
            work.work_s,
            work.demand,
            (),
            work.serial,
            work.bandwidth,
            grain=work.grain,
        )
        self._issue(stream, ("kernel", kernel))

    def reach(self, event: VirtualEvent) -> None:
        """Block this thread until an event has happened. Raises ``QuotaError`` (``quota-minimum``)
        where no kernel that runs has an SM, as other groups own them all."""
        with self._changed:
            self._changed.wait_for(lambda: event.happened or self._closed or self._stuck)
            if not event.happened and self._stuck and not self._closed:
                raise fail(
                    "quota-minimum",
                    f"{', '.join(self._stuck)} can't run: other groups own every SM",
                    expected="a quota for each lane, or SMs left over",
                )
            if not event.happened:
                raise fail("fault-closed", "the virtual device was closed while it was waited for")

    @property
    def record_of_run(self) -> GpuRun:
        """What ran so far: starts and ends in device time, and how active the device was."""
        with self._changed:
            self._advance(self._clock())
            ended = max(self._end.values(), default=0.0)
            return GpuRun(ended, dict(self._start), dict(self._end), tuple(self._intervals))

    def close(self) -> None:
        """Stop the device, whatever is queued. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- the device itself -----------------------------------------------------------------------

    def _clock(self) -> float:
        return perf_counter() - self._began

    def _issue(self, stream: str, entry: _Entry) -> None:
        with self._changed:
            if self._closed:
                raise fail("fault-closed", "work was issued to a virtual device that is closed")
            self._advance(self._clock())  # it reaches the device now, not when that last woke up
            self._queues[stream].append(entry)
            if self._take_heads():
                self._changed.notify_all()

    def _drive(self) -> None:
        with self._changed:
            while not self._closed:
                due = self._advance(self._clock())
                self._changed.wait(None if due is None else max(0.0, due - self._clock()))

    def _advance(self, until: float) -> float | None:
        """Bring the device's time to ``until``; when the next kernel ends, None if none runs."""
        while True:
            ends = {
                stream: self._now + left / self._progress[stream].rate
                for stream, left in self._left.items()
                if self._progress[stream].rate > 0
            }
            due = min(ends.values(), default=None)
            if due is None or due > until:
                self._pass_time(max(self._now, until))
                return due
            self._pass_time(due)
            for stream in [s for s, end in ends.items() if end <= due]:
                self._end[self._kernels.pop(stream).name] = due
                del self._left[stream]
            if self._take_heads():
                self._changed.notify_all()

    def _pass_time(self, until: float) -> None:
        step = until - self._now
        if step <= 0:
            return
        active = sum(p.active for p in self._progress.values()) / max(1, self.gpu.machine.sms)
        self._intervals.append(Interval(self._now, until, active))
        for stream in self._left:
            self._left[stream] = max(0.0, self._left[stream] - step * self._progress[stream].rate)
        self._now = until

    def _take_heads(self) -> bool:
        """Start what can start now; whether a kernel did or an event happened."""
        changed, moved = False, True
        while moved:
            moved = False
            for stream, queue in self._queues.items():
                while queue and stream not in self._left:
                    kind, what = queue[0]
                    if kind == "wait" and not what.happened:
                        break
                    queue.popleft()
                    moved = changed = True
                    if kind == "record":
                        what.happened, what.at = True, self._now
                    elif kind == "kernel":
                        self._kernels[stream] = what
                        self._left[stream] = what.work_s
                        self._start[what.name] = self._now
        found = rates(list(self._kernels.values()), self.gpu)
        self._progress = {stream: found[k.name] for stream, k in self._kernels.items()}
        stuck = bool(self._progress) and not any(p.rate > 0 for p in self._progress.values())
        self._stuck = [k.name for k in self._kernels.values()] if stuck else []
        return changed


def component(device: VirtualDevice, work: Work, result: Any = None) -> Callable[..., Any]:
    """A component's method that is one kernel on the device: takes anything, returns ``result``."""

    def method(*args: Any, **kwargs: Any) -> Any:
        device.launch(work)
        return result

    return method
