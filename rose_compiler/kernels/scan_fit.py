"""Whether arguments fit a recurrence, so that all of its trips can be computed at once.

What hangs on the types, shapes and strides of the arguments alone is found out once for each make
of them; where they lie in memory, and the numbers among them, are looked at each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

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
from rose_compiler.kernels import scan_arrays
from rose_compiler.kernels.functions import FUNCTIONS
from rose_compiler.kernels.scan_memory import apart, plain, reach_of

_DTYPES = (torch.float32, torch.float64)
#: Makes of arguments that are kept, of all recurrences together.
_MOST = 1024

#: What is known of one argument without looking at its elements.
_Make = tuple[Any, ...]


@dataclass(eq=False)
class Fit:
    """What holds of a recurrence for all arguments of one make.

    ``kinds`` is the type of each item. ``reach`` says for each input, and ``handed`` for each
    initial carried value, from its first to behind its last element in bytes; 0 for numbers.
    ``axes`` are the leading axes of one that each carried value has, beyond those of a row.
    ``kept`` holds what the forms of a device have made of it.
    """

    order: Arrangement
    kinds: tuple[Type, ...]
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    reach: tuple[int, ...]
    handed: tuple[int, ...]
    axes: tuple[int, ...]
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """A recurrence with live arguments that it fits.

    ``inputs`` are tensors and numbers. ``handed`` are the initial carried values, ``carried`` the
    same without leading axes of one, of shape ``shape`` like all rows; there are none of a
    recurrence that goes on where another one ends. ``fixed`` holds the value of each item that is
    the same on all trips.
    """

    of: Recurrence
    fit: Fit
    inputs: tuple[Any, ...]
    handed: tuple[Any, ...]
    carried: tuple[Any, ...]
    fixed: dict[int, Any]

    @property
    def order(self) -> Arrangement:
        """How to compute all trips at once."""
        return self.fit.order

    @property
    def kinds(self) -> tuple[Type, ...]:
        """The type of each item."""
        return self.fit.kinds

    @property
    def dtype(self) -> torch.dtype:
        """The type of carried values and stores."""
        return self.fit.dtype

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.fit.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.fit.shape

    @property
    def shape_size(self) -> int:
        """Elements of a row."""
        return math.prod(self.fit.shape)

    def finals(self, made: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """Final carried values; in place of None the row that was handed on last. Not to be called
        under ``no_grad``, unless the loop is: views that are made there can't be changed later."""
        return tuple(self._row(j) if m is None else m for j, m in enumerate(made))

    def is_row(self, j: int) -> bool:
        """Whether a carried value is a row in the end, which is then handed on itself."""
        return self.of.items[self.of.following[j]].kind == "row"

    def _row(self, j: int) -> torch.Tensor:
        item = self.of.items[self.of.following[j]]
        row: torch.Tensor = self.inputs[item.source][self.of.trips[-1] + item.offset]
        return row

    def made_shape(self, j: int) -> tuple[int, ...]:
        """The shape of a carried value behind all trips."""
        return (1,) * self.fit.axes[j] + self.fit.shape


_arranged = lru_cache(maxsize=256)(arrange)
_typed = lru_cache(maxsize=1024)(types)
_fits: dict[tuple[Any, ...], Fit | None] = {}


def fit(
    of: Recurrence, args: Sequence[Any], behind: Given | None = None, *, alone: bool = True
) -> Given | None:
    """The recurrence on these arguments, if it can be computed at once on them.

    ``behind`` is what it goes on from: the initial carried values are then those that this hands
    on, and lie in memory of their own. Of a single trip that is not ``alone``, nothing but numbers
    is computed beforehand.
    """
    inputs = tuple(resolve(i, args) for i in of.inputs)
    began = tuple(args[: of.handed])
    if of.arrays:
        if scan_arrays.strict() or scan_arrays.meets_tensors((*inputs, *began)):
            return None
        inputs, began = (tuple(map(scan_arrays.seen, v)) for v in (inputs, began))
    if any(type(inputs[k]) is not int or inputs[k] != number for k, number in of.assumed):
        return None
    if any(space.get(name) is not number for space, name, number in of.named):
        return None
    seeds = tuple(_seed(inputs[k], of.start + at) for k, at in of.seeds)
    if any(s is None for s in seeds):
        return None
    handed = seeds if behind is not None else (*began, *seeds)
    makes = tuple(map(make_of, inputs)), tuple(map(make_of, handed))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (of, *makes, modes, behind and (behind.dtype, behind.fit.axes))
    if key in _fits:
        found = _fits[key]
    else:
        if len(_fits) >= _MOST:
            _fits.clear()
        found = _fits[key] = _found(of, inputs, handed, behind)
    if found is None or not apart(of, found, inputs, handed if behind is None else ()):
        return None
    fixed: dict[int, Any] = {}
    rank = len(found.shape)
    for k in found.order.invariant:
        item = of.items[k]
        if item.kind == "call":
            if not alone and len(of.trips) == 1 and found.kinds[k] != "number":
                continue
            given = [fixed[a] for a in item.args]
            computed = scan_arrays.call if of.arrays else _computed
            fixed[k] = computed(item.function, given)
        else:
            fixed[k] = item.number if item.kind == "number" else inputs[item.source]
    for k, value in fixed.items():
        if isinstance(value, torch.Tensor) and value.ndim > rank:
            fixed[k] = _last_axes(value, rank)
    carried: tuple[Any, ...] = ()
    if behind is None:
        carried = tuple(
            _last_axes(c, rank) if isinstance(c, torch.Tensor) and c.ndim > rank else c
            for c in handed
        )
    return Given(of, found, inputs, handed, carried, fixed)


def _computed(function: str, args: Sequence[Any]) -> Any:
    return FUNCTIONS[function](*args)


def make_of(value: Any) -> _Make:
    """What is known of an argument without looking at its elements or where they lie."""
    if not isinstance(value, torch.Tensor):
        return (type(value),)
    if value.layout != torch.strided:
        return (type(value), value.layout)
    return (
        *(type(value), value.dtype, value.device, value.shape, value.stride()),
        *(value.requires_grad, value.is_neg(), value.is_inference()),
    )


def _found(
    of: Recurrence, inputs: tuple[Any, ...], handed: tuple[Any, ...], behind: Given | None
) -> Fit | None:
    """What holds for arguments of this make; None where they don't fit."""
    rows = next((v for v, r in zip(inputs, _rows(of), strict=True) if r is not None), None)
    if not isinstance(rows, torch.Tensor) or not rows.ndim or not _tensors(of, inputs, handed):
        return None
    # a value that no trip asks for may be anything
    asked = {i.source for i in of.items if i.kind == "carried"} | {*of.inplace}
    asked |= {*range(of.handed, len(of.following))}
    if behind is None:
        needed = {j: handed[j] for j in asked}
    else:
        needed = {of.handed + n: seed for n, seed in enumerate(handed)}
    if any(type(c) is not torch.Tensor for c in needed.values()):
        return None
    shape, device = rows.shape[1:], rows.device
    if of.arrays and not scan_arrays.allowed(of, len(shape)):
        return None
    dtype = behind.dtype if behind is not None else _own(of, inputs, needed)
    if dtype not in _DTYPES or not shape.numel():
        return None
    grad = any(isinstance(v, torch.Tensor) and v.requires_grad for v in (*inputs, *handed))
    if grad and torch.is_grad_enabled():
        return None
    if any(c.dtype != dtype or c.device != device or c.is_neg() for c in needed.values()):
        return None
    kinds = _kinds(of, inputs, dtype, device, shape)
    axes = None if kinds is None else _axes(of, inputs, needed, behind, len(shape))
    if kinds is None or axes is None:
        return None
    for c in needed.values():
        if _without(c.shape, len(shape)) != shape:
            return None
    changed = [inputs[s.source] for s in of.stores]
    changed += [handed[j] for j in of.inplace if behind is None]
    if not all(map(plain, changed)):
        return None
    if not torch.is_inference_mode_enabled() and any(c.is_inference() for c in changed):
        return None  # torch refuses, as soon as the first trip does
    order = _arranged(of)
    for k in order.invariant:
        item = of.items[k]
        value = inputs[item.source] if item.kind == "input" else None
        if isinstance(value, torch.Tensor) and not _spreads(
            _without(value.shape, len(shape)), shape
        ):
            return None
    return Fit(
        *(order, kinds, dtype, device, tuple(shape)),
        tuple(map(reach_of, inputs)),
        tuple(map(reach_of, handed)),
        axes,
    )


def _tensors(of: Recurrence, inputs: tuple[Any, ...], handed: tuple[Any, ...]) -> bool:
    """Whether inputs are numbers and tensors as they come, and all that has rows is a tensor."""
    for value, reach in zip(inputs, _rows(of), strict=True):
        if not isinstance(value, torch.Tensor):
            if type(value) not in (int, float) or reach is not None:
                return False
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if value.layout != torch.strided or value.is_neg():
            return False
    return not any(isinstance(h, torch.Tensor) and h.layout != torch.strided for h in handed)


def _own(of: Recurrence, inputs: tuple[Any, ...], needed: dict[int, Any]) -> torch.dtype | None:
    """The type that a recurrence computes in: of what it is handed, or of what it stores."""
    if needed:
        found: torch.dtype = next(iter(needed.values())).dtype
        return found
    return inputs[of.stores[0].source].dtype if of.stores else None


def _kinds(
    of: Recurrence,
    inputs: tuple[Any, ...],
    dtype: torch.dtype,
    device: torch.device,
    shape: torch.Size,
) -> tuple[Type, ...] | None:
    """The type of each item, or None where something does not fit."""
    told: list[Type] = []
    for value, reach in zip(inputs, _rows(of), strict=True):
        if not isinstance(value, torch.Tensor):
            told.append("number")
            continue
        if value.device != device:
            return None
        if reach is not None:
            low, high = reach
            if value.ndim < 1 or value.shape[1:] != shape or low < 0 or high >= value.shape[0]:
                return None
        told.append(_type(value.dtype, dtype))
    if dtype != torch.float32 and any(i.function == "float" for i in of.items):
        return None
    try:
        return _typed(of, tuple(told))
    except NotScan:
        return None


def _axes(
    of: Recurrence,
    inputs: tuple[Any, ...],
    needed: dict[int, Any],
    behind: Given | None,
    rank: int,
) -> tuple[int, ...] | None:
    """The leading axes of one that carried values have: a row of shape (n,) and a value of shape
    (1, n) make one of shape (1, n). None where they are not those that it began with."""
    before = {j: max(0, c.ndim - rank) for j, c in needed.items()}
    if behind is not None:
        before.update(enumerate(behind.fit.axes))
    more: list[int] = []
    for item in of.items:
        if item.kind == "carried":
            more.append(before[item.source])
        elif item.kind == "call":
            more.append(max(more[a] for a in item.args))
        else:
            value = inputs[item.source] if item.kind == "input" else None
            more.append(max(0, value.ndim - rank) if isinstance(value, torch.Tensor) else 0)
    after = tuple(more[last] for last in of.following)
    changed = any(before.get(j, after[j]) != after[j] for j in range(len(after)))
    if changed and len(of.trips) > 1:
        return None
    return after[: of.handed]


def _seed(value: Any, row: int) -> Any:
    inside = isinstance(value, torch.Tensor) and value.ndim > 0 and 0 <= row < value.shape[0]
    return value[row] if inside else None


def resolve(one: Input, args: Sequence[Any]) -> Any:
    """The live object that an input stands for."""
    found = args[one.argument]
    for name in one.path:
        found = getattr(found, name)
    return found


def _last_axes(value: torch.Tensor, rank: int) -> torch.Tensor:
    """A tensor without leading axes of one, a view, of ``rank`` axes at most."""
    while value.ndim > rank and value.shape[0] == 1:
        value = value[0]
    return value


def _without(shape: torch.Size, rank: int) -> torch.Size:
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return shape


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


def _spreads(shape: torch.Size, over: torch.Size) -> bool:
    """Whether values of one shape can meet rows of another without changing theirs."""
    return len(shape) <= len(over) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(over), strict=False)
    )
