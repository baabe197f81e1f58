"""All trips of a pointwise recurrence at once, where its arguments allow that.

:func:`run` is what emitted code calls. It looks at what it is given, hands it to the form for its
device, and answers ``None`` where none fits: the caller then runs the trips one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from rose_compiler.base.recurrence import (
    Arrangement,
    Input,
    NotScan,
    Recurrence,
    Type,
    arrange,
    types,
)
from rose_compiler.kernels import scan_cuda, scan_native
from rose_compiler.kernels.functions import FUNCTIONS

_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Given:
    """A recurrence with live arguments that it fits.

    ``inputs`` are tensors and numbers. ``handed`` are the initial carried values, ``carried`` the
    same without leading axes of one, of shape ``shape`` like all rows. ``kinds`` is the type of
    each item, ``fixed`` the value of each that is the same on all trips.
    """

    of: Recurrence
    order: Arrangement
    inputs: tuple[Any, ...]
    handed: tuple[torch.Tensor, ...]
    carried: tuple[torch.Tensor, ...]
    kinds: tuple[Type, ...]
    fixed: dict[int, Any]
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]

    @property
    def shape_size(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape)


_arranged = lru_cache(maxsize=256)(arrange)
_typed = lru_cache(maxsize=1024)(types)


def run(
    of: Recurrence, args: Sequence[Any], name: str = "", tell: scan_native.Tell | None = None
) -> tuple[torch.Tensor, ...] | None:
    """Compute every trip, store what it stores; the final carried values. ``tell`` hears of what
    is compiled for that, under the operation's ``name``.

    ``None``, with nothing changed, where types, shapes, devices, overlapping memory or gradients
    ask for one trip after the other.
    """
    given = fit(of, args)
    if given is None:
        return None
    if given.device.type == "cpu":
        return scan_native.run(given, name, tell)
    if given.device.type == "cuda" and not of.bitwise:
        return scan_cuda.run(given)
    return None


class Trips(Protocol):
    """The trips of a loop as they stand."""

    @property
    def indices(self) -> range | None:
        """The loop variable's values, where they are always the same."""

    def over(self, indices: range, args: Sequence[Any]) -> tuple[Any, ...]:
        """Run some of them on carried and captured values; the carried values behind them."""


def whole(
    of: Recurrence, trips: Trips, args: Sequence[Any], tell: scan_native.Tell | None = None
) -> tuple[Any, ...]:
    """A loop: its recurrence at once where that fits, the other trips as they stand. ``tell`` as
    for :func:`run`.

    Returns the final carried values.
    """
    indices = trips.indices
    if indices is None:
        bounds, args = tuple(args[-3:]), args[:-3]
        indices = range(*bounds)
        if bounds != of.bounds:
            return trips.over(indices, args)
    carried, captured = tuple(args[: of.handed]), args[of.handed :]
    first, last = of.ends[0], len(indices) - of.ends[1]
    if first:
        carried = trips.over(indices[:first], (*carried, *captured))
    made = run(of, (*carried, *captured), getattr(trips, "__name__", ""), tell)
    if made is None:
        return trips.over(indices[first:], (*carried, *captured))
    if last < len(indices):
        return trips.over(indices[last:], (*made, *captured))
    return made


def fit(of: Recurrence, args: Sequence[Any]) -> Given | None:
    """The recurrence on these arguments, if it can be computed at once on them."""
    inputs = tuple(resolve(i, args) for i in of.inputs)
    if any(type(inputs[k]) is not int or inputs[k] != number for k, number in of.assumed):
        return None
    if any(space.get(name) is not number for space, name, number in of.named):
        return None
    handed = (*args[: of.handed], *(_seed(inputs[k], of.start + at) for k, at in of.seeds))
    rows = next((v for v, r in zip(inputs, _rows(of), strict=True) if r is not None), None)
    if not all(type(c) is torch.Tensor for c in handed) or not isinstance(rows, torch.Tensor):
        return None
    shape, dtype, device = rows.shape[1:], handed[0].dtype, handed[0].device
    if dtype not in _DTYPES or not shape.numel():
        return None
    kinds = _kinds(of, inputs, handed, dtype, device, shape)
    if kinds is None:
        return None
    order = _arranged(of)
    fixed: dict[int, Any] = {}
    for k in order.invariant:
        item = of.items[k]
        if item.kind == "call":
            fixed[k] = FUNCTIONS[item.function](*(fixed[a] for a in item.args))
        else:
            fixed[k] = item.number if item.kind == "number" else inputs[item.source]
    if not _keeps_axes(of, handed, fixed, len(shape)):
        return None
    for k, value in fixed.items():
        if isinstance(value, torch.Tensor):
            fixed[k] = value = _last_axes(value, len(shape))
            if not _spreads(value.shape, shape):
                return None
    carried = tuple(_last_axes(c, len(shape)) for c in handed)
    if any(c.shape != shape for c in carried):
        return None
    return Given(of, order, inputs, handed, carried, kinds, fixed, dtype, device, tuple(shape))


def _last_axes(value: torch.Tensor, rank: int) -> torch.Tensor:
    """A tensor without leading axes of one, a view, of ``rank`` axes at most."""
    while value.ndim > rank and value.shape[0] == 1:
        value = value[0]
    return value


def _keeps_axes(
    of: Recurrence, handed: Sequence[torch.Tensor], fixed: dict[int, Any], rank: int
) -> bool:
    """Whether each carried value goes on with the axes that it has, leading ones included.

    A row of shape (n,) and a value of shape (1, n) make one of shape (1, n).
    """
    tensors = (*handed, *(v for v in fixed.values() if isinstance(v, torch.Tensor)))
    if all(v.ndim <= rank for v in tensors):
        return True
    more: list[int] = []
    for k, item in enumerate(of.items):
        if item.kind == "carried":
            more.append(max(0, handed[item.source].ndim - rank))
        elif item.kind == "call" and k not in fixed:
            more.append(max(more[a] for a in item.args))
        else:
            value = fixed.get(k)
            more.append(max(0, value.ndim - rank) if isinstance(value, torch.Tensor) else 0)
    return all(
        more[last] == max(0, c.ndim - rank) for last, c in zip(of.following, handed, strict=True)
    )


def _seed(value: Any, row: int) -> Any:
    inside = isinstance(value, torch.Tensor) and value.ndim > 0 and 0 <= row < value.shape[0]
    return value[row] if inside else None


def resolve(one: Input, args: Sequence[Any]) -> Any:
    """The live object that an input stands for."""
    found = args[one.argument]
    for name in one.path:
        found = getattr(found, name)
    return found


def _kinds(
    of: Recurrence,
    inputs: tuple[Any, ...],
    carried: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    device: torch.device,
    shape: torch.Size,
) -> tuple[Type, ...] | None:
    """The type of each item, or None where something does not fit."""
    needed = _rows(of)
    told: list[Type] = []
    grad = False
    for value, reach in zip(inputs, needed, strict=True):
        if not isinstance(value, torch.Tensor):
            if type(value) not in (int, float) or reach is not None:
                return None
            told.append("number")
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device != device:
            return None
        if value.layout != torch.strided or value.is_neg():
            return None
        if reach is not None:
            low, high = reach
            if value.ndim < 1 or value.shape[1:] != shape or low < 0 or high >= value.shape[0]:
                return None
        grad |= value.requires_grad
        told.append(_type(value.dtype, dtype))
    for each in carried:
        if each.dtype != dtype or each.device != device or each.is_neg():
            return None
        grad |= each.requires_grad
    if (grad and torch.is_grad_enabled()) or not _apart(of, inputs, carried):
        return None
    if dtype != torch.float32 and any(i.function == "float" for i in of.items):
        return None
    try:
        return _typed(of, tuple(told))
    except NotScan:
        return None


def _plain(value: torch.Tensor) -> bool:
    """Whether each element has a place of its own."""
    shared = any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True))
    return not shared


def _type(found: torch.dtype, own: torch.dtype) -> Type:
    if found == own:
        return "value"
    return "bool" if found == torch.bool else "other"


@lru_cache(maxsize=256)
def _rows(of: Recurrence) -> tuple[tuple[int, int] | None, ...]:
    """For each input the first and the last row that is touched; None if none is."""
    low, high = min(of.trips), max(of.trips)
    offsets: dict[int, list[int]] = {}
    for item in of.items:
        if item.kind == "row":
            offsets.setdefault(item.source, []).append(item.offset)
    for store in of.stores:
        offsets.setdefault(store.source, []).append(store.offset)
    return tuple(
        (low + min(offsets[k]), high + max(offsets[k])) if k in offsets else None
        for k in range(len(of.inputs))
    )


def _apart(of: Recurrence, inputs: tuple[Any, ...], carried: tuple[torch.Tensor, ...]) -> bool:
    """Whether what is stored or changed lies in memory that nothing else is read from.

    A row that is read where it is stored, and only there, is nothing else.
    """
    targets = {s.source: s.offset for s in of.stores}
    changed = [*(inputs[k] for k in targets), *(carried[j] for j in of.inplace)]
    if not all(map(_plain, changed)):
        return False
    memory = [_extent(v) if isinstance(v, torch.Tensor) else (0, 0) for v in inputs]
    for k in targets:
        low, high = memory[k]
        if any(a < high and low < b for j, (a, b) in enumerate(memory) if j != k):
            return False
    handed = [_extent(c) for c in carried[: of.handed]]
    for store in of.stores:  # a first value that a store changes is another one behind it
        low, high = _stored(of, inputs[store.source], store.offset)
        if any(a < high and low < b for a, b in handed):
            return False
    for k in of.inplace:
        low, high = handed[k]
        others = (*memory, *handed[:k], *handed[k + 1 :])
        if any(a < high and low < b for a, b in others):
            return False
    return all(
        i.offset == targets[i.source] for i in of.items if i.kind == "row" and i.source in targets
    )


def _stored(of: Recurrence, target: torch.Tensor, offset: int) -> tuple[int, int]:
    """The addresses of the rows that are stored to."""
    low, high = min(of.trips) + offset, max(of.trips) + offset
    return _extent(target[low : high + 1])


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie; strides are never negative."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _spreads(shape: torch.Size, over: torch.Size) -> bool:
    """Whether values of one shape can meet rows of another without changing theirs."""
    return len(shape) <= len(over) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(over), strict=False)
    )
