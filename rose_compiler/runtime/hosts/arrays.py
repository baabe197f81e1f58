"""Values whose arrays travel through shared memory: the rest is pickled, the arrays are copied.

Both sides use this module. It loads neither torch nor numpy by itself: a worker whose component
needs none of them starts without, and who handles a tensor has loaded torch already.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import cloudpickle

from rose_compiler.base.errors import RuntimeFault, fail, register

register(
    "host-graph",
    RuntimeFault,
    "a tensor with an autograd graph was handed to a component in another host",
    "hand over `tensor.detach()`, and train where the graph was made",
)

#: Arrays begin at multiples of this, so that every dtype is aligned.
ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """One array: ``kind`` is ``"numpy"`` or ``"torch"``, ``device`` where a tensor belongs."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    device: str = ""


def room(layouts: Sequence[Layout]) -> int:
    """The bytes that arrays take one behind the other."""
    return sum(-(-layout.size // ALIGNMENT) * ALIGNMENT for layout in layouts)


class _Numbers:
    """Puts the numbers of arrays where the arrays are."""

    def __init__(self, file: io.BytesIO, detach: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[call-arg]
        self.arrays: list[Any] = []
        self._detach = detach
        torch = sys.modules.get("torch")
        self._tensor = None if torch is None else torch.Tensor
        numpy = sys.modules.get("numpy")
        self._array = None if numpy is None else numpy.ndarray

    def persistent_id(self, value: Any) -> Any:
        """What stands for a value: its number for an array, None for what is pickled."""
        kind = type(value)
        if kind is self._array:
            if value.dtype.hasobject or value.dtype.names is not None:
                return None
        elif self._tensor is not None and issubclass(kind, self._tensor):
            if value.grad_fn is not None and not self._detach:
                what = f"a tensor of shape {tuple(value.shape)}"
                raise fail("host-graph", what, found=type(value.grad_fn).__name__)
            if kind is not self._tensor or value.layout is not _torch().strided:
                return None  # parameters, sparse tensors and subclasses have more to them
            if value.is_quantized:
                return None
        else:
            return None
        self.arrays.append(value)
        return len(self.arrays) - 1


class _Plain(_Numbers, pickle.Pickler):
    """By reference alone, which is several times as fast."""


class _Thorough(_Numbers, cloudpickle.Pickler):
    """Functions and classes of ``__main__`` by value."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Sequence[Any]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, number: Any) -> Any:
        return self._arrays[number]


def dump(value: Any, *, detach: bool = False) -> tuple[bytes, list[Any]]:
    """A value as bytes without its arrays, and its arrays in order.

    With ``detach`` tensors leave their graphs behind; without, one that has a graph raises
    ``RuntimeFault`` (``host-graph``).
    """
    file = io.BytesIO()
    pickler: _Plain | _Thorough = _Plain(file, detach)
    try:
        pickler.dump(value)
    except RuntimeFault:
        raise
    except Exception:
        pass  # whatever a class's `__reduce__` raises: cloudpickle is tried below, and has the word
    else:
        blob = file.getvalue()
        if b"__main__" not in blob:  # which the other side does not have
            return blob, pickler.arrays
    file = io.BytesIO()
    pickler = _Thorough(file, detach)
    pickler.dump(value)
    return file.getvalue(), pickler.arrays


def load(blob: bytes, arrays: Sequence[Any]) -> Any:
    """What ``dump`` was given, with these arrays in it."""
    return _Unpickler(io.BytesIO(blob), arrays).load()


def layout_of(array: Any) -> Layout:
    """How an array lies in shared memory."""
    if type(array) is getattr(sys.modules.get("numpy"), "ndarray", None):
        return Layout("numpy", array.dtype.str, array.shape, array.nbytes)
    size = array.numel() * array.element_size()
    device = "" if array.device.type == "cpu" else str(array.device)
    return Layout(
        "torch", str(array.dtype).removeprefix("torch."), tuple(array.shape), size, device
    )


def write(memory: Any, offset: int, arrays: Sequence[Any], layouts: Sequence[Layout]) -> None:
    """Copy arrays into memory, one behind the other, from an offset on."""
    for array, layout in zip(arrays, layouts, strict=True):
        if layout.size:
            place = _view(memory, offset, layout)
            if layout.kind == "numpy":
                place[...] = array
            else:
                place.copy_(array.detach())
        offset += room((layout,))


def read(memory: Any, offset: int, layouts: Sequence[Layout], *, copy: bool = True) -> list[Any]:
    """Arrays that lie in memory from an offset on: copies of them, or views."""
    found = []
    for layout in layouts:
        array = _view(memory, offset, layout)
        if layout.device:
            array = array.to(layout.device)  # a copy by itself
        elif copy:
            array = array.copy() if layout.kind == "numpy" else array.clone()
        found.append(array)
        offset += room((layout,))
    return found


def _view(memory: Any, offset: int, layout: Layout) -> Any:
    if layout.kind == "numpy":
        numpy = import_module("numpy")
        return numpy.ndarray(layout.shape, numpy.dtype(layout.dtype), memory, offset)
    torch = _torch()
    dtype = getattr(torch, layout.dtype)
    if not layout.size:
        return torch.empty(layout.shape, dtype=dtype, device="cpu")
    count = layout.size // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return flat.reshape(layout.shape)


def typed(buffer: Any, offset: int, layout: Layout) -> Any:
    """A tensor as a part of a buffer of bytes on a device."""
    dtype = getattr(_torch(), layout.dtype)
    if not layout.size:
        return buffer.new_empty(layout.shape, dtype=dtype)
    return buffer[offset : offset + layout.size].view(dtype).view(layout.shape)


def _torch() -> Any:
    return import_module("torch")
