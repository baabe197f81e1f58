"""Where arguments of a recurrence lie in memory, and whether what is stored meets another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rose_compiler.base.recurrence import Recurrence

if TYPE_CHECKING:
    from rose_compiler.kernels.scan_fit import Fit


def apart(of: Recurrence, found: Fit, inputs: tuple[Any, ...], handed: tuple[Any, ...]) -> bool:
    """Whether what is stored or changed lies in memory that nothing else is read from.

    A row that is read where it is stored, and only there, is nothing else.
    """
    targets = {s.source: s.offset for s in of.stores}
    memory = list(map(extent, inputs, found.reach))
    for k in targets:
        low, high = memory[k]
        if any(a < high and low < b for j, (a, b) in enumerate(memory) if j != k):
            return False
    own = [extent(c, reach) for c, reach in zip(handed[: of.handed], found.handed, strict=False)]
    for store in of.stores if own else ():
        # a first value that a store changes is another one behind it
        low, high = stored(of, inputs[store.source], store.offset)
        if any(a < high and low < b for a, b in own):
            return False
    for k in of.inplace if own else ():
        low, high = own[k]
        others = (*memory, *own[:k], *own[k + 1 :])
        if any(a < high and low < b for a, b in others):
            return False
    return all(
        i.offset == targets[i.source] for i in of.items if i.kind == "row" and i.source in targets
    )


def stored(of: Recurrence, target: torch.Tensor, offset: int) -> tuple[int, int]:
    """The addresses of the rows that are stored to."""
    low, high = min(of.trips) + offset, max(of.trips) + offset
    row = target.stride(0) * target.element_size()
    start = target.data_ptr() + low * row
    inside = sum((n - 1) * s for n, s in zip(target.shape[1:], target.stride()[1:], strict=True))
    return start, start + (high - low) * row + (inside + 1) * target.element_size()


def extent(value: Any, reach: int) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    if not reach:
        return 0, 0
    start = value.data_ptr()
    return start, start + reach


def reach_of(value: Any) -> int:
    """Bytes from a tensor's first element to behind its last; strides are never negative."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return int((last + 1) * value.element_size())


def plain(value: torch.Tensor) -> bool:
    """Whether each element has a place of its own: each axis steps over all that axes of smaller
    steps reach. Some layouts of which that is true as well are taken for shared."""
    last = 0
    for step, n in sorted((s, n) for n, s in zip(value.shape, value.stride(), strict=True)):
        if n > 1 and step <= last:
            return False
        last += (n - 1) * step
    return True
