"""Device streams as lanes: work is queued on a stream, an event stands where it crosses to another.

:class:`TorchStreams` drives the streams of one torch device. On the CPU, where torch runs
everything at once and has no events, it has streams in name only and waiting is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch

from rose_compiler.base.profile import Span
from rose_compiler.runtime.lanes import Item, Task, whole_step


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

    def synchronize(self, stream: torch.Stream) -> None:
        stream.synchronize()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or inside tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


class StreamLane:
    """A stream of a device, fed by the coordinator.

    What is submitted starts after all that the coordinator's own stream was given before, so its
    arguments are there; ``wait`` lets the coordinator's stream, not the coordinator, wait.
    """

    def __init__(self, name: str, streams: Streams, *, priority: int = 0) -> None:
        self.name = name
        self.streams = streams
        self.stream = streams.stream(priority)
        self.failed: list[Task] = []
        self.skipped: list[Task] = []
        self.spans: list[Span] | None = None

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        task = StreamTask(self, site)
        streams, stream = self.streams, self.stream
        start = perf_counter()
        streams.wait(stream, streams.record(streams.current()))
        given = tuple(a.value if isinstance(a, Task | Item) else a for a in args)
        with streams.use(stream):
            task.value = fn(*given)
        for tensor in tensors(given):
            streams.keep(tensor, stream)
        task.event = streams.record(stream)
        if self.spans is not None:  # the time to issue it; the device's own is the profiler's
            name = getattr(fn, "__name__", None) or type(fn).__name__
            self.spans.append(Span(name, self.name, start, perf_counter(), site=site))
        return task

    def step(self, site: int, shard: Any, action: Any, packed: bool = False) -> Task:
        return self.submit(site, whole_step(shard), action)

    def settle(self, grace: float | None) -> bool:
        self.streams.synchronize(self.stream)
        return True

    def close(self) -> None:
        self.streams.synchronize(self.stream)


class StreamTask(Task):
    """Work queued on a stream. Its result exists at once, to be read after the event."""

    __slots__ = ("event",)

    event: Any

    def wait(self) -> Any:
        lane = self.lane
        assert isinstance(lane, StreamLane)
        current = lane.streams.current()
        if not self.done:
            lane.streams.wait(current, self.event)
            for tensor in tensors(self.value):
                lane.streams.keep(tensor, current)
            self.done = True
        return self.value
