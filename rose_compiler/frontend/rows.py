"""Values of a small Python block as the separability proof sees them: rows, constants, the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.facts import Spec

#: What ``resolve`` answers for an expression that stands for no object known at capture.
NOT_STATIC: Any = type("NotStatic", (), {"__repr__": lambda self: "NOT_STATIC"})()


class NotRows(Exception):
    """The proof fails here."""

    def __init__(
        self, why: str, code: str = "not-proven-separable", allow: str | None = None
    ) -> None:
        super().__init__(why)
        self.blocker = Blocker(code, why, allow)


@dataclass(frozen=True)
class RowsValue:
    """An array or tensor with the batch along axis 0; ``tail`` are its other sizes, if known."""

    tail: tuple[int, ...] | None


@dataclass(frozen=True)
class Items:
    """A tuple, item by item."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Entries:
    """A dict, entry by entry."""

    items: dict[str, Any]


@dataclass(frozen=True)
class Count:
    """The number of rows. Only sizes may be it: another number of rows, another value."""


@dataclass(frozen=True)
class Shape:
    """The shape of a rows value."""

    tail: tuple[int, ...] | None


@dataclass(frozen=True)
class Coupled:
    """Something made from all rows at once, like the infos of a step. Nothing may be made of it."""


@dataclass(frozen=True)
class Same:
    """The same for all rows: ``value`` if it is known, and the shape if it is an array or tensor;
    ``shape`` is () for a number and ``None`` if nothing is known."""

    value: Any = NOT_STATIC
    shape: tuple[int, ...] | None = None


def same(value: Any) -> Same:
    """A live object, as a value that is the same for all rows."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return Same(value, tuple(value.shape))
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic):
        return Same(value, ())
    return Same(value)


def of_spec(spec: Spec | None, axis: int | None) -> Any:
    """An input of the block, by its recorded type; ``axis`` is where its batch lies."""
    if axis is not None and axis != 0:
        raise NotRows("a batch along another axis than the first", "unsupported-shape")
    if axis is None:
        if spec is None:
            return Same()
        return Same(shape=spec.shape if spec.kind in ("tensor", "array", "scalar") else None)
    if spec is None:
        return RowsValue(None)
    if spec.kind == "tuple":
        # a step's result: the observation comes first, what it says of the whole batch last
        return Items(
            tuple(of_spec(s, 0) if s.keys and not k else _item(s) for k, s in enumerate(spec.items))
        )
    if spec.keys:
        found = {k: of_spec(s, 0) for k, s in zip(spec.keys, spec.items, strict=True)}
        return Entries(found)
    if spec.kind in ("tensor", "array") and spec.shape:
        return RowsValue(spec.shape[1:])
    return Coupled()


def _item(spec: Spec) -> Any:
    """One item of a step's result: arrays are rows, infos are about the whole batch."""
    return of_spec(spec, 0) if spec.kind in ("tensor", "array") and spec.shape else Coupled()


def elementwise(values: list[Any]) -> Any:
    """The value of an operation that works element by element, with broadcasting."""
    rows = [v for v in values if isinstance(v, RowsValue)]
    for value in values:
        if not isinstance(value, RowsValue | Same):
            raise NotRows("it uses what is about the whole batch", "batch-coupling")
    if not rows:
        shapes = [v.shape for v in values]
        return Same(
            shape=None if None in shapes else _broadcast([s for s in shapes if s is not None])
        )
    tails = [v.tail for v in rows]
    known = [t for t in tails if t is not None]
    if len(rows) > 1 and (len(known) < len(tails) or len({len(t) for t in known}) > 1):
        raise NotRows("arrays with different or unknown numbers of axes meet")
    for value in values:
        if isinstance(value, Same) and value.shape != ():
            _fits(value, known[0] if known else None)
            known.append(tuple(value.shape or ())[-len(known[0]) :] if known and known[0] else ())
    if len(known) < len(values_with_axes(values)):
        return RowsValue(None)
    tail = _broadcast(known)
    if tail is None:
        raise NotRows("shapes that can't be broadcast meet")
    return RowsValue(tail)


def is_rows(value: Any) -> bool:
    """Whether a value is a batch, or a dict of batches."""
    if isinstance(value, Entries):
        return bool(value.items) and all(isinstance(v, RowsValue) for v in value.items.values())
    return isinstance(value, RowsValue)


def values_with_axes(values: list[Any]) -> list[Any]:
    """Those that are no single number."""
    return [v for v in values if not (isinstance(v, Same) and v.shape == ())]


def _fits(value: Same, tail: tuple[int, ...] | None) -> None:
    """Whether an array that is the same for all rows meets no row by its own first axis."""
    if value.shape is None or tail is None:
        raise NotRows("the shape of an array that is no batch is not known")
    rank = len(value.shape)
    if rank > len(tail) + 1 or (rank == len(tail) + 1 and value.shape[0] != 1):
        raise NotRows(f"an array of shape {value.shape} that is no batch has rows of its own")


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        return None


def reshaped(value: RowsValue, sizes: list[Any]) -> RowsValue:
    """``x.reshape(sizes)``: the number of rows must come first, as -1 or from a shape."""
    if not sizes:
        raise NotRows("it is reshaped without sizes")
    rest = [s.value if isinstance(s, Same) else None for s in sizes[1:]]
    first = sizes[0]
    from_rows = isinstance(first, Count)
    if not from_rows and not (isinstance(first, Same) and first.value == -1):
        raise NotRows(
            "it is reshaped to sizes that may hold the number of rows",
            allow="write -1, or x.shape[0], for the number of rows",
        )
    if value.tail is None or any(type(s) is not int for s in rest):
        raise NotRows("it is reshaped to or from sizes that are not known")
    sizes_known = [s for s in rest if isinstance(s, int)]
    total = math.prod(value.tail)
    if from_rows and sizes_known.count(-1) == 1:
        others = math.prod(s for s in sizes_known if s != -1)
        if others == 0 or total % others:
            raise NotRows("it is reshaped across rows", "batch-coupling")
        sizes_known[sizes_known.index(-1)] = total // others
    if -1 in sizes_known or math.prod(sizes_known) != total:
        raise NotRows("it is reshaped across rows", "batch-coupling")
    return RowsValue(tuple(sizes_known))


def without_axes(value: RowsValue, axes: Any, keep: bool) -> RowsValue:
    """The value after a reduction over axes other than the first."""
    if value.tail is None:
        raise NotRows("the number of its axes is not known")
    rank = len(value.tail) + 1
    given = axes if isinstance(axes, tuple | list) else (axes,)
    if any(type(a) is not int for a in given):
        raise NotRows("it is reduced over all axes, or over unknown ones", "batch-coupling")
    dims = {a + rank if a < 0 else a for a in given}
    if 0 in dims:
        raise NotRows("it is reduced over the rows", "batch-coupling")
    kept = [1 if d in dims else s for d, s in enumerate(value.tail, 1) if keep or d not in dims]
    return RowsValue(tuple(kept))
