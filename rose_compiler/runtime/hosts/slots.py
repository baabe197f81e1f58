"""Memory on devices for the arrays of calls: a buffer for each place and device, made once.

The side that writes owns the buffers; the other opens the handle of each once and keeps it open, so
that a call carries no handle. A place is written anew only when the call in it has been answered,
and whoever reads waits for its copies before it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose_compiler.runtime.hosts import arrays, ipc

#: A place, a device and the handle of the buffer there, for the side that reads.
Made = tuple[int, str, Any]


class Slots:
    """One side's buffers of one direction: those that it made, or those that it has opened."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], Any] = {}

    def write(
        self, place: int, values: Sequence[Any], layouts: Sequence[arrays.Layout]
    ) -> list[Made]:
        """Copy tensors into a place, and wait for that; what the other side has to open first.

        A buffer that is too small is replaced.
        """
        made: list[Made] = []
        for device in dict.fromkeys(layout.device for layout in layouts):
            mine = [layout for layout in layouts if layout.device == device]
            buffer = self._buffers.get((place, device))
            if buffer is None or buffer.numel() < arrays.room(mine):
                buffer = ipc.allocate(arrays.room(mine), device)
                self._buffers[place, device] = buffer
                made.append((place, device, ipc.handle(buffer)))
        for value, view in zip(values, self._views(place, layouts), strict=True):
            view.copy_(value.detach())
        self._settle(layouts)
        return made

    def open(self, place: int, device: str, handle: Any) -> None:
        """Open a buffer of the other side's, in place of the one opened before."""
        self._buffers[place, device] = ipc.opened(handle)

    def read(self, place: int, layouts: Sequence[arrays.Layout]) -> list[Any]:
        """Copies of the tensors in a place, complete when this returns."""
        found = [view.clone() for view in self._views(place, layouts)]
        self._settle(layouts)
        return found

    def _views(self, place: int, layouts: Sequence[arrays.Layout]) -> list[Any]:
        offsets: dict[str, int] = {}
        found = []
        for layout in layouts:
            at = offsets.get(layout.device, 0)
            offsets[layout.device] = at + arrays.room((layout,))
            found.append(arrays.typed(self._buffers[place, layout.device], at, layout))
        return found

    def _settle(self, layouts: Sequence[arrays.Layout]) -> None:
        for device in dict.fromkeys(layout.device for layout in layouts):
            ipc.settle(device)


def split(
    layouts: Sequence[arrays.Layout], by_handle: bool
) -> tuple[list[arrays.Layout], list[arrays.Layout]]:
    """Layouts of arrays that travel through memory of the host, and of those that stay on their
    device."""
    near = [one for one in layouts if not (by_handle and one.device)]
    far = [one for one in layouts if by_handle and one.device]
    return near, far


def apart(
    values: Sequence[Any], layouts: Sequence[arrays.Layout], by_handle: bool
) -> tuple[list[Any], list[Any]]:
    """The values of the layouts that :func:`split` takes apart."""
    pairs = list(zip(values, layouts, strict=True))
    near = [value for value, one in pairs if not (by_handle and one.device)]
    far = [value for value, one in pairs if by_handle and one.device]
    return near, far


def together(
    layouts: Sequence[arrays.Layout], by_handle: bool, near: Sequence[Any], far: Sequence[Any]
) -> list[Any]:
    """What :func:`apart` took apart, in the order of the layouts."""
    here, there = iter(near), iter(far)
    return [next(there if by_handle and one.device else here) for one in layouts]
