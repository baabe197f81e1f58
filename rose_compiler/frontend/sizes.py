"""Sizes of tensors that traced code reads: a graph holds them, or takes them from its operands."""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from rose_compiler.base import gaps
from rose_compiler.ir.sizes import Items, Known, Laid, Shape

#: Sizes that may be others when a graph runs: none, those of first axes, or any.
Vary = Literal["none", "rows", "all"]
#: What code may read of an array besides its numbers.
Read = Literal["size", "type", "layout"]
ALL: tuple[Read, ...] = ("size", "type", "layout")
#: What attributes of an array tell; any other may be all of that.
_READ: dict[str, tuple[Read, ...]] = {
    **dict.fromkeys(("shape", "size", "ndim"), ("size",)),
    **dict.fromkeys(("dtype", "itemsize", "astype"), ("type",)),
    "nbytes": ("size", "type"),
    **dict.fromkeys(("strides", "flags"), ("layout",)),
}
_OWN = frozenset(("told", "_tell", "__class__", "__array_finalize__"))
#: What reads them, of a tensor.
NAMES = frozenset(("shape", "size", "numel", "nelement", "__len__"))
#: What hangs on the number of axes alone.
AXES = frozenset(("dim", "ndim", "ndimension", "is_same_size"))
#: What hangs on sizes, and stays as it is in the graph.
LAYOUT = frozenset(("nbytes", "stride", "is_contiguous", "dim_order"))
#: What reads how a tensor lies in memory: in which order, or with which strides.
LAID: dict[str, Laid] = {"is_contiguous": "order", "stride": "strides", "dim_order": "strides"}
#: What takes a tensor apart into a number of parts that its sizes give.
PARTS = frozenset(
    ("split", "chunk", "unsafe_split", "unsafe_chunk", "unbind", "unsafe_unbind", "gradient")
)
#: Those of which one row more or less may change nothing, and many rows do.
APART = frozenset(("split", "chunk", "unsafe_split", "unsafe_chunk"))
#: What reads a dtype or device, of a tensor.
TYPED = frozenset(
    (
        *("dtype", "device", "layout", "itemsize", "nbytes", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_sparse", "is_quantized"),
        *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "result_type", "can_cast"),
    )
)
_TORCH = os.path.dirname(str(torch.__file__)) + os.sep
_NUMPY = os.path.dirname(np.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


class TracedShape(tuple[Any, ...]):
    """The shape of a tensor, some of it numbers that stand for nodes."""

    def numel(self) -> Any:
        """How many elements there are."""
        return math.prod(self)


def read_by_torch(frame: types.FrameType) -> bool:
    """Whether torch's own Python code reads a size: for checks and for sizes of its own, which
    only other sizes put to the test."""
    return frame.f_code.co_filename.startswith(_TORCH)


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """The axis along which a call of :data:`APART` takes a tensor apart, and its size."""
    tensor = args[0] if args else next(iter(kwargs.values()))
    axis = kwargs.get("dim", args[2] if len(args) > 2 else 0) % tensor.dim()
    return axis, tensor.shape[axis]


def sizes_read(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    vary: Vary,
    number: Callable[[int, Callable[..., Any], tuple[Any, ...]], Any],
) -> Any:
    """What a read of sizes gives where some may vary; ``number`` makes the number that stands for a
    call. ``None`` where it can't stand for one: Python makes a plain number of ``len(x)``."""
    tensor = args[0]
    if name == "__len__":
        return None
    if name in ("numel", "nelement"):
        return number(result, torch.numel, (tensor,))

    def one(axis: int, size: int) -> Any:
        if axis and vary == "rows":
            return size
        return number(size, torch.Tensor.size, (tensor, axis))

    if isinstance(result, int):
        axis = args[1] if len(args) > 1 else kwargs["dim"]
        return one(axis % tensor.dim(), result)
    return TracedShape(one(k, size) for k, size in enumerate(result))


class WatchedArray(np.ndarray):
    """An array that tells when other code than torch's reads something of it: a size, its dtype,
    how it lies in memory, or what may be any of these. Built-in functions don't ask it."""

    told: Callable[[Read], object] | None = None

    def __array_finalize__(self, of: Any) -> None:
        self.told = getattr(of, "told", None)

    def __getattribute__(self, name: str) -> Any:
        if name not in _OWN:
            object.__getattribute__(self, "_tell")(sys._getframe(1), *_READ.get(name, ALL))
        return super().__getattribute__(name)

    def __len__(self) -> int:
        self._tell(sys._getframe(1), "size")
        return super().__len__()

    def __iter__(self) -> Any:
        self._tell(sys._getframe(1), "size")
        return super().__iter__()

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._tell(sys._getframe(1), *ALL)
        return super().__array_function__(func, types, args, kwargs)

    def _tell(self, frame: types.FrameType | None, *what: Read) -> None:
        # numpy's own code reads for who called it
        while frame is not None and frame.f_code.co_filename.startswith(_NUMPY):
            frame = frame.f_back
        ours = frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE))
        if (told := self.told) is None or ours:
            return
        for one in what:
            told(one)


def watched(array: Any, told: Callable[[Read], object]) -> Any:
    """A copy of an array that calls ``told`` with what Python code of the user's reads of it."""
    if type(array) is not np.ndarray:
        return array.copy()
    made = gaps.like(array.copy(order="K"), array).view(WatchedArray)
    made.told = told
    return made


def known_of(
    value: Any, free: Vary, *, read: bool, typed: bool, kinds: bool, laid: Laid = "any"
) -> Known | None:
    """What a graph is right for, as it was traced with ``value``, if ``free`` sizes may be others;
    ``None`` where there is nothing to be known.

    ``read``: whether a size was read at all, ``typed``: whether a dtype or device was, ``kinds``:
    whether the code asks what is None or of which type, ``laid``: what of layouts. How much a tuple
    holds counts always.
    """
    asked: dict[str, Any] = {"read": read, "typed": typed, "kinds": kinds, "laid": laid}
    if isinstance(value, torch.Tensor | np.ndarray):
        sizes: list[int | None] = list(value.shape)
        if free == "all":
            sizes = [None] * len(sizes)
        elif free == "rows" and sizes:
            sizes[0] = None
        if not (read or free != "all" or typed or kinds or laid != "any"):
            return None
        kept = tuple(sizes) if read or free != "all" else None
        return Shape.of(value, kept, typed=typed, laid=laid)
    below: list[tuple[Any, Any]] = []
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        below = list(enumerate(value))
    elif type(value) is dict:
        below = list(value.items())
    else:
        return None
    known = ((k, known_of(v, free, **asked)) for k, v in below)
    kind = next(t for t in (tuple, list, dict) if isinstance(value, t))
    return Items(tuple(known), kind)
