"""A hosted component's other side: calls by number, arrays in shared memory, versions picked up."""

from __future__ import annotations

import pickle
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rose_compiler.base import phases
from rose_compiler.runtime.hosts import arrays, ipc, slots
from rose_compiler.runtime.hosts.parameters import Reader
from rose_compiler.runtime.hosts.transport import unpicklable_result

#: What a call says: number of its description, place, flags, whether phases are wanted, version of
#: the parameters.
CALL = struct.Struct("<IBB?xQ")
#: What an answer says: flags, version, when it ran (start and end by ``perf_counter``), its CPU
#: time in seconds, and how much room its arrays take.
ANSWER = struct.Struct("<BxxxxxxxQdddQ")

KNOWN = 0  # the description was sent before
FULL = 1  # the description follows; it is kept under its number
ONCE = 2  # the description follows; it is not kept

SHARED = 0  # the arrays of an answer lie in their place
INLINE = 1  # they follow, since there was no room

Description = tuple[str, bytes, tuple[arrays.Layout, ...]]


class Served:
    """Holds the component and runs its methods.

    ``arguments`` and ``results`` are shared memory with one place for each call under way.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.component = factory()
        self.version = 0
        self._arguments: tuple[Any, int] = (None, 0)
        self._results: tuple[Any, int] = (None, 0)
        self._reader: Reader | None = None
        self._known: dict[int, Description] = {}
        self._by_handle = False
        self._got = slots.Slots()
        self._sent = slots.Slots()
        self._pinned: dict[str, ipc.Pinned | None] = {}

    def arguments(self, memory: Any, size: int) -> None:
        """Memory for arguments, ``size`` bytes a place."""
        self._pinned["arguments"] = None
        self._arguments = memory, size
        self._pinned["arguments"] = ipc.pinned(memory)

    def results(self, memory: Any, size: int) -> None:
        """Memory for results, ``size`` bytes a place."""
        self._pinned["results"] = None
        self._results = memory, size
        self._pinned["results"] = ipc.pinned(memory)

    def slot(self, place: int, device: str, handle: Any) -> None:
        """A buffer on a device for arguments in a place."""
        self._got.open(place, device, handle)

    def offers(self, *names: str) -> bool:
        """Whether the component has all of these methods."""
        return all(callable(getattr(self.component, name, None)) for name in names)

    def opens(self, offer: ipc.Offer) -> str | None:
        """Have CUDA tensors of answers travel by handle, or say why that can't be."""
        why = ipc.why_not(offer)
        self._by_handle = why is None
        return why

    def parameters(
        self, memory: Any, names: Sequence[str], layouts: Sequence[arrays.Layout]
    ) -> None:
        """Memory for versions of the parameters. Raises if the component takes none."""
        self._reader = Reader(memory, names, layouts, self.component)

    def limit_threads(self, count: int) -> bool:
        """Let torch's operations use so many threads; False if torch is not loaded."""
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(count)
        return torch is not None

    def raw(self, payload: bytes) -> bytes:
        """Run one call and answer it."""
        number, place, how, watched, version = CALL.unpack_from(payload)
        if how == KNOWN:
            method, blob, layouts = self._known[number]
        else:
            method, blob, layouts = pickle.loads(payload[CALL.size :])
            if how == FULL:
                self._known[number] = method, blob, layouts
        if version != self.version:
            assert self._reader is not None
            self._reader.take(version)
            self.version = version
        args, kwargs = arrays.load(blob, self._given(place, layouts))
        run = getattr(self.component, method)
        watching: AbstractContextManager[list[phases.Ended]]
        watching = phases.collecting() if watched else nullcontext([])
        with watching as ended:
            cpu, start = time.thread_time(), time.perf_counter()
            value = run(*args, **kwargs)
            end, cpu = time.perf_counter(), time.thread_time() - cpu
        return self._answer(method, value, place, (start, end, cpu), ended)

    def _given(self, place: int, layouts: Sequence[arrays.Layout]) -> list[Any]:
        """Copies of the arguments in a place."""
        memory, size = self._arguments
        near, far = slots.split(layouts, self._by_handle)
        here = arrays.read(memory, place * size, near)
        return slots.together(layouts, self._by_handle, here, self._got.read(place, far))

    def _answer(
        self,
        method: str,
        value: Any,
        place: int,
        times: tuple[float, float, float],
        ended: list[phases.Ended],
    ) -> bytes:
        try:
            blob, found = arrays.dump(value, detach=True)
        except Exception as error:
            raise unpicklable_result(method, value, error) from error
        layouts = [arrays.layout_of(array) for array in found]
        near, far = slots.apart(found, layouts, self._by_handle)
        here, there = slots.split(layouts, self._by_handle)
        made = self._sent.write(place, far, there)
        memory, size = self._results
        needed = arrays.room(here)
        flag, rest = SHARED, b""
        if needed <= size:
            arrays.write(memory, place * size, near, here)
        else:
            block = bytearray(needed)
            arrays.write(block, 0, near, here)
            flag, rest = INLINE, bytes(block)
        head = ANSWER.pack(flag, self.version, *times, needed)
        body = pickle.dumps((blob, layouts if found else None, ended, self._by_handle, made))
        return head + len(body).to_bytes(8, "little") + body + rest

    def close(self) -> None:
        """Close the component, if it has ``close``."""
        component, self.component = self.component, None
        if hasattr(component, "close"):
            component.close()
