"""The caller's memory of a host: one place for each call under way, arguments and results."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rose_compiler.runtime.hosts import arrays, ipc, slots

#: Calls that may be under way in one host at a time; one more waits for the oldest.
PLACES = 2


class Places:
    """Memory shared with one host: allocated when it is first needed, used again by later calls.

    ``share(method, size, *args)`` makes memory of that size that the other side's ``method`` is
    told of. ``by_handle``: whether tensors of devices stay there; None before the first of them.
    """

    def __init__(self, share: Callable[..., Any]) -> None:
        self._share = share
        self.arguments: tuple[Any, int] = (None, 0)
        self.results: tuple[Any, int] = (None, 0)
        self.by_handle: bool | None = None
        self._wanted = 0  # bytes of the largest result that had no room
        self._sent = slots.Slots()
        self._got = slots.Slots()
        self._pinned: dict[str, ipc.Pinned | None] | None = None

    def shared_by(self, share: Callable[..., Any]) -> None:
        """From now on memory is made like that: another component has the host."""
        self._share = share

    def room(self, layouts: Sequence[arrays.Layout]) -> bool:
        """Whether there is room for such arguments, and for the largest result seen."""
        wanted = arrays.room(slots.split(layouts, bool(self.by_handle))[0])
        return wanted <= self.arguments[1] and self._wanted <= self.results[1]

    def grow(self, layouts: Sequence[arrays.Layout]) -> None:
        """Make that room. Nobody may be using the memory that this replaces."""
        wanted = arrays.room(slots.split(layouts, bool(self.by_handle))[0])
        # none for the time being: after Ctrl-C the other side may have the new memory already
        if wanted > self.arguments[1]:
            old, self.arguments = self.arguments, (None, 0)
            self.arguments = self._new("arguments", wanted, *old)
        if self._wanted > self.results[1]:
            old, self.results = self.results, (None, 0)
            self.results = self._new("results", self._wanted, *old)

    def pin(self) -> None:
        """Have the host's memory pinned, since tensors of a device are copied there and back."""
        if self._pinned is None:
            self._pinned = {
                "arguments": ipc.pinned(self.arguments[0]),
                "results": ipc.pinned(self.results[0]),
            }

    def write(
        self, place: int, found: Sequence[Any], layouts: Sequence[arrays.Layout]
    ) -> list[slots.Made]:
        """Copy arguments into a place; buffers that the other side has to open before the call."""
        by_handle = bool(self.by_handle)
        near, far = slots.apart(found, layouts, by_handle)
        like = slots.split(layouts, by_handle)
        memory, size = self.arguments
        arrays.write(memory, place * size, near, like[0])
        return self._sent.write(place, far, like[1])

    def written(self, place: int, layouts: Sequence[arrays.Layout]) -> list[Any]:
        """Copies of the arguments in a place, which stay there until it is written anew."""
        memory, size = self.arguments
        by_handle = bool(self.by_handle)
        near, far = slots.split(layouts, by_handle)
        here = arrays.read(memory, place * size, near)
        return slots.together(layouts, by_handle, here, self._sent.read(place, far))

    def read(
        self,
        place: int,
        layouts: Sequence[arrays.Layout],
        by_handle: bool,
        made: Sequence[slots.Made],
        apart: bytes | None,
    ) -> list[Any]:
        """Copies of the arrays of a result: of a place, or of bytes that came ``apart``."""
        for one in made:
            self._got.open(*one)
        near, far = slots.split(layouts, by_handle)
        if apart is None:
            memory, size = self.results
            here = arrays.read(memory, place * size, near)
        else:
            here = arrays.read(bytearray(apart), 0, near)
        return slots.together(layouts, by_handle, here, self._got.read(place, far))

    def want(self, size: int) -> None:
        """A result of that size had no room."""
        self._wanted = max(self._wanted, size)

    def _new(self, name: str, size: int, old: Any, before: int) -> tuple[Any, int]:
        # more than is needed where it grows: a value may do so with every call. What is not
        # written takes no memory
        size = max(size, before + before // 2 // arrays.ALIGNMENT * arrays.ALIGNMENT)
        if self._pinned is not None:
            self._pinned[name] = None  # let go of first
        memory = self._share(name, PLACES * size, size)
        if self._pinned is not None:
            self._pinned[name] = ipc.pinned(memory)
        if old is not None:
            # its file lives as long as the host, and would keep the pages
            with suppress(AttributeError, OSError, ValueError):
                old.madvise(mmap.MADV_REMOVE)
        return memory, size
