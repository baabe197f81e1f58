"""What stays the same of an operation's arguments from trip to trip, as long as programs hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch


class Make(NamedTuple):
    """All of a tensor or array but its rows: ``axes`` counts them in, ``tail`` are the sizes of
    the others."""

    dtype: Any
    device: Any
    axes: int
    tail: tuple[int, ...]


def of(value: Any) -> Any:
    """The make of a tensor or array, or of those in a dict or tuple; ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        return Make(value.dtype, value.device, value.ndim, tuple(value.shape[1:]))
    if isinstance(value, np.ndarray):
        return Make(value.dtype, None, value.ndim, value.shape[1:])
    if type(value) is dict:
        return tuple((k, m) for k, v in value.items() if (m := of(v)) is not None) or None
    if type(value) is tuple:
        return tuple(map(of, value))
    return None


def differ(
    combinations: Iterable[tuple[Any, ...]], *, dtypes: bool = True, tails: bool = True
) -> bool:
    """Whether an argument was of two makes: in dtype and device, if ``dtypes``, in trailing sizes,
    if ``tails``, in keys or in the number of axes. What is no tensor or array differs from none."""
    left: dict[str, Any] = {} if dtypes else {"dtype": None, "device": None}
    if not tails:
        left["tail"] = ()
    columns = zip(*({_without(m, left): None for m in combinations}), strict=True)
    return any(len({make for make in column if make is not None}) > 1 for column in columns)


def _without(make: Any, left: dict[str, Any]) -> Any:
    if isinstance(make, Make):
        return make._replace(**left)
    return tuple(_without(m, left) for m in make) if isinstance(make, tuple) else make
