"""Copies of tensors and arrays with the strides of what they are copies of.

``clone()`` and ``copy()`` close the gaps of a part of something larger, such as ``x[:, :3]``, and
give memory to what an ``expand`` shows again and again. What is computed from the copy would then
differ: ``view`` raises for the one and not for the other, and sums are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def like(copy: Any, value: Any) -> Any:
    """``copy``, a plain copy of ``value``, or one with its strides if it has others. Tensors with a
    graph behind them, arrays of objects, those of other classes or with negative strides keep the
    plain copy."""
    array, strides = hasattr(value, "strides"), strides_of(value)
    if strides == strides_of(copy) or 0 in value.shape:
        return copy
    if array:
        kept = value.dtype.hasobject or type(value).__name__ != "ndarray" or min(strides) < 0
    else:
        kept = value.requires_grad
    return copy if kept else with_strides(value, strides)


def strides_of(value: Any) -> tuple[int, ...]:
    """The strides of a tensor or array; none where it has none, as sparse tensors."""
    try:
        return tuple(value.strides if hasattr(value, "strides") else value.stride())
    except RuntimeError:
        return ()


def with_strides(value: Any, strides: tuple[int, ...]) -> Any:
    """A copy with memory of its own, which has gaps where the strides leave some."""
    last = sum((n - 1) * s for n, s in zip(value.shape, strides, strict=True))
    if hasattr(value, "strides"):
        room = bytearray(last + value.itemsize)
        made = type(value)(value.shape, value.dtype, room, 0, strides)
    else:
        made = value.new_empty(last + 1).as_strided(value.shape, strides)
    # along an axis without a stride there is one entry, which is shown again and again
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
    made[once] = value[once]
    return made


def shown_again(parts: Sequence[Any]) -> Any | None:
    """The parts of one batch as one tensor, where all of them show the same row again and again, as
    an ``expand`` does, which the whole would then do too; None where they don't."""
    if any(p.stride(0) or p.requires_grad or not p.shape[0] for p in parts):
        return None
    row = parts[0][:1]
    if not all(p[:1].equal(row) for p in parts[1:]):
        return None
    return row.expand(sum(p.shape[0] for p in parts), *row.shape[1:])
