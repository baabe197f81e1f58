"""Recurrences over numpy's arrays: seen as tensors of the same memory, and back.

With numpy 2 a number of Python's takes the type of the array or scalar that it meets, as with
torch, and sums, products and quotients have one right result. What differs: dividing a number by
an array is a division, rows of an array of one axis are scalars, and ``where`` makes arrays of
those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rose_compiler.base.recurrence import Recurrence
from rose_compiler.kernels.functions import FUNCTIONS

#: Types whose bits mean the same to both.
_KINDS = frozenset(map(np.dtype, ("f4", "f8", "?", "u1", "i1", "i2", "i4", "i8")))
_NUMPY: dict[str, Callable[..., Any]] = {"where": np.where, "clone": np.copy}
#: Before that a scalar of single precision and a number make one of double precision.
SUPPORTED = int(np.__version__.partition(".")[0]) >= 2


def seen(value: Any) -> Any:
    """An array or a scalar of numpy's as a tensor in the same memory; anything else, and what has
    no such tensor, as it is."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if type(value) is not np.ndarray or value.dtype not in _KINDS or not value.flags.writeable:
        return value
    if any(s < 0 or s % value.itemsize for s in value.strides):
        return value
    return torch.from_numpy(value)


def allowed(of: Recurrence, rank: int) -> bool:
    """Whether numpy's own rules are those that the forms keep; ``rank`` is that of a row."""
    if not SUPPORTED or not of.exact:
        return False
    return rank > 0 or not (of.inplace or any(i.function == "where" for i in of.items))


def meets_tensors(values: Sequence[Any]) -> bool:
    """Whether there are tensors among values that were arrays when the loop was captured."""
    return any(isinstance(v, torch.Tensor) for v in values)


def strict() -> bool:
    """Whether numpy is to raise at overflow and the like, or to call somebody."""
    does = np.geterr().values()
    if any(d not in ("warn", "ignore") for d in does):
        return True
    return "warn" in does and _warning_raises()


def _warning_raises() -> bool:
    """Whether a filter may turn numpy's warnings into errors."""
    for action, message, category, module, line in warnings.filters:
        if issubclass(RuntimeWarning, category):
            if action == "error":
                return True
            if message is None and module is None and not line:
                return False  # it comes before all others
    return False


def call(function: str, args: Sequence[Any]) -> Any:
    """A function of values that are the same on all trips, as numpy computes it."""
    if not any(isinstance(a, torch.Tensor) for a in args):
        return FUNCTIONS[function](*args)
    given = [a.numpy() if isinstance(a, torch.Tensor) else a for a in args]
    with np.errstate(all="ignore"):
        if function == "float":
            made: Any = given[0].astype(np.float32)
        else:
            computed: Callable[..., Any] = _NUMPY.get(function, FUNCTIONS[function])
            made = computed(*given)
    return torch.from_numpy(np.asarray(made))


def back(of: Recurrence, made: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Final carried values as the loop hands them on."""
    if not of.arrays:
        return tuple(made)
    found: list[Any] = []
    for j, value in enumerate(made):
        if j in of.inplace:
            found.append(args[j])
        elif isinstance(value, torch.Tensor):
            array = value.numpy()
            found.append(array if array.ndim else array[()])
        else:
            found.append(value)
    return tuple(found)
