"""Device streams as lanes: work is queued on a stream, an event stands where it crosses to another.

:class:`TorchStreams` drives the streams of one torch device. On the CPU, where torch runs
everything at once and has no events, it has streams in name only and waiting is free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch

from rose_compiler.base.spanlog import SpanLog
from rose_compiler.runtime.held import Held, inside, looked, tensors
from rose_compiler.runtime.lanes import Item, Task, ThreadLane, ThreadTask, whole_step


class Streams(Protocol):
    """What a stream lane asks of a device."""

    def stream(self, priority: int) -> Any:
        """A new stream; a lower number is served first."""

    def current(self) -> Any:
        """The stream that this thread issues to."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue to another stream inside a ``with`` block."""

    def record(self, stream: Any) -> Any:
        """An event that happens when all that was issued to the stream so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Hold what is issued to the stream from now on until the event has happened."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do not reuse the tensor's memory before what was issued to the stream so far is done."""

    def happened(self, event: Any) -> bool:
        """Whether an event has happened, as far as the host can tell without waiting."""

    def synchronize(self, stream: Any) -> None:
        """Block until the stream is idle."""


class TorchStreams:
    """The streams of one torch device."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._synchronous = self.device.type == "cpu"

    def stream(self, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=self.device, priority=priority)

    def current(self) -> torch.Stream:
        if self._synchronous:
            return torch.Stream(device=self.device)
        return torch.accelerator.current_stream(self.device)

    def use(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return nullcontext() if self._synchronous else stream

    def record(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self.device)
        if not self._synchronous:  # "cpu backend doesn't support events"
            event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        stream.wait_event(event)

    def keep(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        if tensor.device.type == self.device.type and not self._synchronous:
            tensor.record_stream(stream)

    def happened(self, event: torch.Event) -> bool:
        return self._synchronous or event.query()

    def synchronize(self, stream: torch.Stream) -> None:
        stream.synchronize()


@contextmanager
def own_casts() -> Iterator[None]:
    """Keep autocast from handing casts of weights from one stream to another: its cache knows of no
    streams."""
    if not torch.is_autocast_cache_enabled():
        yield
        return
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)


class StreamLane:
    """A stream of a device, fed by the coordinator.

    What is submitted starts after all that the coordinator's own stream was given before, so its
    arguments are there; ``wait`` lets the coordinator's stream, not the coordinator, wait.
    """

    def __init__(self, name: str, streams: Streams, *, priority: int = 0, lent: Any = None) -> None:
        self.name = name
        self.streams = streams
        self.own = streams.stream(priority)
        #: The stream that work goes to: its own, or one that it is lent while it is idle.
        self.stream = self.own if lent is None else lent
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self.spans: SpanLog | None = None
        self._held = Held()
        self.submitted = self.awaited = 0  # tasks so far, and of those up to the last awaited one

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        task = StreamTask(self, site)
        streams, stream = self.streams, self.stream
        start = perf_counter()
        streams.wait(stream, streams.record(streams.current()))
        given = tuple(a.value if isinstance(a, Task | Item) else a for a in args)
        self.submitted += 1
        task.number = self.submitted
        # before it runs: what it takes out of a container, its kernels may still read
        found, rest = looked(given)
        try:
            with streams.use(stream), own_casts():
                task.value = fn(*given)
        finally:  # of what failed, kernels may be under way all the same
            for tensor in found:
                streams.keep(tensor, stream)
            task.event = streams.record(stream)
            self._held.given(rest, task.event, streams)
        if self.spans is not None:  # the time to issue it; the device's own is the profiler's
            name = getattr(fn, "__name__", None) or type(fn).__name__
            self.spans.note((name, self.name, start, perf_counter(), site, None, None, None))
        return task

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        return self.submit(site, whole_step(shard), action)

    def settle(self, grace: float | None) -> bool:
        # a task that was waited for is over for the coordinator's stream, and so are those before
        # it: to block here would leave the device without work between iterations
        if self.awaited < self.submitted:
            self.streams.synchronize(self.stream)
            self.awaited = self.submitted
        self._held.release()
        return True

    def close(self) -> None:
        self.streams.synchronize(self.stream)
        self._held.release()


class StreamTask(Task):
    """Work queued on a stream. Its result exists at once, to be read after the event."""

    __slots__ = ("event", "number")

    event: Any
    number: int  # on its lane, from 1 on

    def wait(self) -> Any:
        lane = self.lane
        assert isinstance(lane, StreamLane)
        current = lane.streams.current()
        if not self.done:
            lane.streams.wait(current, self.event)
            # what is not seen is safe too: all that the lane runs later waits for this stream first
            for tensor in tensors(self.value):
                lane.streams.keep(tensor, current)
            self.done = True
            lane.awaited = max(lane.awaited, self.number)
        return self.value


class DeviceThreadLane(ThreadLane):
    """A thread that issues to a stream of its own: what it runs shares the device with what the
    coordinator's stream runs. (All threads would issue to the device's default stream, which is in
    order, and need not be the coordinator's.)"""

    def __init__(
        self,
        name: str,
        streams: Streams,
        *,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(name, threads=threads, timeout=timeout)
        self.streams = streams
        self.stream = streams.stream(0)
        self.held = Held()

    def task(self, site: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> ThreadTask:
        return DeviceTask(self, site, fn, args)

    def settle(self, grace: float | None) -> bool:
        last = self._last
        if not super().settle(grace):
            return False
        if isinstance(last, DeviceTask) and not last.crossed:
            self.streams.synchronize(self.stream)
        self.held.release()
        return True

    def close(self) -> None:
        super().close()
        if not self.busy:  # else its thread did not end in time, and may issue more
            self.settle(None)


class DeviceTask(ThreadTask):
    """A task of a thread with a stream: who waits for it has its own stream wait too."""

    __slots__ = ("crossed", "event")

    def __init__(
        self, lane: DeviceThreadLane, site: int, fn: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        super().__init__(lane, site, fn, args)
        streams, stream = lane.streams, lane.stream
        before = streams.record(streams.current())
        self.crossed = False
        self.event: Any = None

        @functools.wraps(fn)
        def on_stream(*given: Any) -> Any:
            streams.wait(stream, before)
            found, rest = looked(given)
            try:
                with streams.use(stream), own_casts():
                    return fn(*given)
            finally:
                for tensor in found:
                    streams.keep(tensor, stream)
                self.event = streams.record(stream)
                lane.held.given(rest, self.event, streams)

        self.fn = on_stream

    def wait(self) -> Any:
        value = super().wait()
        if not self.crossed:
            lane = self.lane
            assert isinstance(lane, DeviceThreadLane)
            current = lane.streams.current()
            lane.streams.wait(current, self.event)
            found, whole = inside(value)
            for tensor in found:
                lane.streams.keep(tensor, current)
            if not whole:
                lane.held.made(value)
            self.crossed = True
        return value
