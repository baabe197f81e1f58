"""Streams that only keep books: a stand-in for a device that finds missing waits.

Inside ``with RecordingStreams() as streams:`` torch runs on the CPU as always, and every operation
counts as issued to the stream in use. Two accesses to the same memory of which one writes must be
ordered by events, as happens-before of vector clocks; memory allocated inside the block and used
on another stream than its own must be recorded there. :meth:`RecordingStreams.check` raises
:class:`RaceFound` for the first access that was not.
"""

from __future__ import annotations

from collections import defaultdict
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


@dataclass
class _Memory:
    """One storage: where it came from, its last write and the reads since, as (stream, time)."""

    storage: torch.UntypedStorage  # held, so that its address stays its own
    allocated: int | None
    write: tuple[int, int, str] | None = None
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    used: dict[int, str] = field(default_factory=dict)


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
        self._current = 0
        self._memory: dict[int, _Memory] = {}
        self._faults: list[str] = []

    def stream(self, priority: int = 0) -> int:
        self._clocks.append({})
        self.names.append(f"stream {len(self.names)}")
        return len(self._clocks) - 1

    def current(self) -> int:
        return self._current

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: int) -> Clock:
        return dict(self._clocks[stream])

    def wait(self, stream: int, event: Clock) -> None:
        _merge(self._clocks[stream], event)

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        self._of(tensor).kept.add(stream)

    def synchronize(self, stream: int) -> None:
        _merge(self._host, self._clocks[stream])

    def check(self) -> None:
        """Raise :class:`RaceFound` if any access so far was unordered or unrecorded."""
        for memory in self._memory.values():
            if memory.allocated is None:
                continue
            for stream, name in memory.used.items():
                if stream != memory.allocated and stream not in memory.kept:
                    self._faults.append(
                        f"{name} on {self.names[stream]} uses memory of "
                        f"{self.names[memory.allocated]} without record_stream"
                    )
        if self._faults:
            raise RaceFound(self._faults[0])

    def _of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        return self._memory.setdefault(storage._cdata, _Memory(storage, None))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        stream, name = self._current, str(func)
        clock = self._clocks[stream]
        _merge(clock, self._host)
        clock[stream] = time = clock.get(stream, 0) + 1
        self.issued.append((stream, name))
        touched: dict[int, bool] = defaultdict(bool)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._touch(touched, argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._touch(touched, argument, kwargs[argument.name])
        for key, writes in touched.items():
            self._access(self._memory[key], stream, time, name, writes)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._memory:
                    fresh = _Memory(storage, stream, write=(stream, time, name))
                    self._memory[storage._cdata] = fresh
        return result

    def _touch(self, touched: dict[int, bool], argument: Any, value: Any) -> None:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                memory = self._of(leaf)
                touched[memory.storage._cdata] |= writes

    def _access(self, memory: _Memory, stream: int, time: int, name: str, writes: bool) -> None:
        clock = self._clocks[stream]
        before = [memory.write] if memory.write is not None else []
        if writes:
            before += [(s, t, n) for s, (t, n) in memory.reads.items()]
        for other, then, what in before:
            if other != stream and clock.get(other, 0) < then:
                self._faults.append(
                    f"{name} on {self.names[stream]} does not wait for {what} on "
                    f"{self.names[other]}"
                )
        memory.used.setdefault(stream, name)
        if writes:
            memory.write = (stream, time, name)
            memory.reads.clear()
        else:
            memory.reads[stream] = (time, name)
