"""What stays the same of an operation's arguments from trip to trip, as long as programs hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from rose_compiler.frontend.sizes import Vary


class Make(NamedTuple):
    """All of a tensor or array but its numbers: ``rows`` is its size along the first axis, ``axes``
    counts that in, ``tail`` are the sizes of the others."""

    dtype: Any
    device: Any
    axes: int
    tail: tuple[int, ...]
    rows: int = 0


def of(value: Any) -> Any:
    """The make of a tensor or array, or of those in a dict or tuple; ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        rows = value.shape[0] if value.ndim else 0
        return Make(value.dtype, value.device, value.ndim, tuple(value.shape[1:]), rows)
    if isinstance(value, np.ndarray):
        rows = value.shape[0] if value.ndim else 0
        return Make(value.dtype, None, value.ndim, value.shape[1:], rows)
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
    return two(combinations, dtypes=dtypes, tails=tails) is not None


def two(
    combinations: Iterable[tuple[Any, ...]], *, dtypes: bool = True, tails: bool = True
) -> tuple[int, Any, Any] | None:
    """The first argument that :func:`differ` means, by its position, and two of its makes."""
    left: dict[str, Any] = {"rows": 0}
    if not dtypes:
        left |= {"dtype": None, "device": None}
    if not tails:
        left["tail"] = ()
    for position, column in enumerate(zip(*combinations, strict=True)):
        # by what is left of them, as they were seen first
        seen: dict[Any, Any] = {}
        for make in column:
            if make is not None:
                seen.setdefault(_without(make, left), make)
        if len(seen) > 1:
            first, second, *_ = seen.values()
            return position, first, second
    return None


def resized(combinations: Iterable[tuple[Any, ...]]) -> Vary:
    """Which sizes of an argument were seen to differ."""
    seen = list(combinations)
    if differ(seen, dtypes=False):
        return "all"
    columns = zip(*seen, strict=True)
    return "rows" if any(len({m for m in c if m is not None}) > 1 for c in columns) else "none"


def told(make: Any) -> str:
    """A make in words, rows left out: ``float32 (rows, 3)``, ``{far: float32 (rows, 1)}``."""
    if isinstance(make, Make):
        dtype = str(make.dtype).removeprefix("torch.")
        sizes = ", ".join(map(str, ("rows", *make.tail))) if make.axes else ""
        device = (
            f" on {make.device}" if make.device is not None and str(make.device) != "cpu" else ""
        )
        return f"{dtype} ({sizes}){device}"
    if isinstance(make, tuple):
        pairs = all(isinstance(m, tuple) and len(m) == 2 and isinstance(m[0], str) for m in make)
        if make and pairs:
            return "{" + ", ".join(f"{k}: {told(m)}" for k, m in make) + "}"
        return "(" + ", ".join(map(told, make)) + ")"
    return "something else"


def _without(make: Any, left: dict[str, Any]) -> Any:
    if isinstance(make, Make):
        return make._replace(**left)
    return tuple(_without(m, left) for m in make) if isinstance(make, tuple) else make
