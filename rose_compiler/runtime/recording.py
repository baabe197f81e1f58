"""Streams that only keep books: a stand-in for a device that finds missing waits.

Inside ``with RecordingStreams() as streams:`` torch runs on the CPU as always, and every operation
counts as issued to the stream in use. Two accesses to the same memory of which one writes must be
ordered by events, as happens-before of vector clocks. Memory allocated inside the block belongs to
a stream, whose later work may be given it as soon as it is let go: all work of other streams on it
must have been recorded (``record_stream``), or be ordered before what its own stream does next.
:meth:`RecordingStreams.check` raises :class:`RaceFound` for the first access that was not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RaceFound(Exception):
    """Two streams touch the same memory and nothing orders them, or it may be freed too early."""


Clock = dict[int, int]


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


Range = tuple[int, int]


@dataclass
class _Part:
    """Bytes that were accessed together: their last write and the reads since, by stream."""

    write: tuple[int, int, str] | None = None  # stream, time, operation
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass
class _Memory:
    """One storage: the stream it came from, and its parts by their first and last byte."""

    allocated: int | None
    storage: weakref.ref[torch.UntypedStorage]
    parts: dict[Range, _Part] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    used: dict[int, tuple[int, str]] = field(default_factory=dict)  # the last use on each stream


class RecordingStreams(TorchDispatchMode):
    """A device's streams (see :class:`~rose_compiler.runtime.events.Streams`) as books only.

    Streams are numbers, 0 is the coordinator's; events are copies of clocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names = ["the coordinator's stream"]
        self.issued: list[tuple[int, str]] = []  # (stream, operation), in issue order
        self._clocks: list[Clock] = [{0: 0}]
        self._host: Clock = {}
        self._issuing = threading.local()
        self._memory: dict[int, _Memory] = {}
        self._free: dict[int, list[_Memory]] = {}  # by the stream that may use it again
        self._faults: list[str] = []

    def stream(self, priority: int = 0) -> int:
        self._clocks.append({})
        self.names.append(f"stream {len(self.names)}")
        return len(self._clocks) - 1

    def current(self) -> int:
        return getattr(self._issuing, "stream", 0)

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self._issuing.stream = self.current(), stream
        try:
            yield
        finally:
            self._issuing.stream = before

    def record(self, stream: int) -> Clock:
        return dict(self._clocks[stream])

    def wait(self, stream: int, event: Clock) -> None:
        _merge(self._clocks[stream], event)

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        self._of(tensor).kept.add(stream)

    def happened(self, event: Clock) -> bool:
        return all(self._host.get(stream, 0) >= then for stream, then in event.items())

    def synchronize(self, stream: int) -> None:
        _merge(self._host, self._clocks[stream])

    def check(self) -> None:
        """Raise :class:`RaceFound` if an access was unordered so far, or memory let go early."""
        for stream in list(self._free):
            self._use_again(stream)
        if self._faults:
            raise RaceFound(self._faults[0])

    def _of(self, tensor: torch.Tensor, allocated: int | None = None) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memory.get(key)
        if found is None:
            # as long as memory is in use, so is the object that stands for it
            end = weakref.ref(storage, lambda _: self._let_go(key))
            found = self._memory[key] = _Memory(allocated, end)
        return found

    def _let_go(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.allocated is not None:
            self._free.setdefault(memory.allocated, []).append(memory)

    def _use_again(self, stream: int) -> None:
        """What this stream does next may be given the memory that it has let go."""
        clock = self._clocks[stream]
        for memory in self._free.pop(stream, ()):
            for other, (then, name) in memory.used.items():
                if other not in (stream, *memory.kept) and clock.get(other, 0) < then:
                    self._faults.append(
                        f"{name} on {self.names[other]} uses memory of "
                        f"{self.names[stream]} without record_stream"
                    )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        stream, name = self.current(), str(func)
        clock = self._clocks[stream]
        _merge(clock, self._host)
        self._use_again(stream)
        clock[stream] = time = clock.get(stream, 0) + 1
        self.issued.append((stream, name))
        touched: dict[tuple[int, Range], tuple[_Memory, bool]] = {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._touch(touched, argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._touch(touched, argument, kwargs[argument.name])
        if not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            for (_, span), (memory, writes) in touched.items():  # a view touches no memory
                self._access(memory, span, stream, time, name, writes)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            new = isinstance(leaf, torch.Tensor)
            if new and leaf.untyped_storage()._cdata not in self._memory:
                memory = self._of(leaf, stream)
                self._access(memory, _range(leaf), stream, time, name, True)
        return result

    def _touch(
        self, touched: dict[tuple[int, Range], tuple[_Memory, bool]], argument: Any, value: Any
    ) -> None:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                memory, span = self._of(leaf), _range(leaf)
                before = touched.get((id(memory), span), (memory, False))[1]
                touched[id(memory), span] = memory, before or writes

    def _access(
        self, memory: _Memory, span: Range, stream: int, time: int, name: str, writes: bool
    ) -> None:
        clock = self._clocks[stream]
        for (low, high), part in memory.parts.items():
            if span[1] < low or high < span[0]:
                continue
            before = [part.write] if part.write is not None else []
            if writes:
                before += [(s, t, n) for s, (t, n) in part.reads.items()]
            for other, then, what in before:
                if other != stream and clock.get(other, 0) < then:
                    self._faults.append(
                        f"{name} on {self.names[stream]} does not wait for {what} on "
                        f"{self.names[other]}"
                    )
        memory.used[stream] = time, name
        part = memory.parts.setdefault(span, _Part())
        if writes:
            part.write = (stream, time, name)
            part.reads.clear()
        else:
            part.reads[stream] = (time, name)


def _range(tensor: torch.Tensor) -> Range:
    """The first and the last byte of a tensor's storage that it may reach."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(sum((size - 1) * step for size, step in pairs)) if tensor.numel() else 0
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize - 1
