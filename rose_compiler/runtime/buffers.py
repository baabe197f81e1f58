"""Copies of borrowed values: what a simulator hands out may be overwritten by its next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rose_compiler.base import gaps
from rose_compiler.base.apart import Apart, alike, rows_in
from rose_compiler.base.gaps import shown_again


def snapshot(value: Any) -> Any:
    """A copy that owns its memory: of arrays and tensors, also inside tuples, lists and dicts.

    Tensors keep their place in the autograd graph. Objects of other types are handed on as they
    are. A value that occurs twice is copied once, so that what was shared inside stays shared.
    """
    return _copied(value, {})


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    found = seen.get(id(value))
    if found is not None:
        return found
    copy: Any
    if isinstance(value, torch.Tensor):
        copy = gaps.like(value.clone(), value)
    elif isinstance(value, np.ndarray):
        # arrays of objects, as in infos, hold arrays that may be borrowed too
        boxes = value.dtype.hasobject
        copy = _objects(value, seen) if boxes else gaps.like(value.copy(order="K"), value)
    elif isinstance(value, dict):
        copy = {key: _copied(item, seen) for key, item in value.items()}
        if type(value) is not dict:
            copy = _like(value, copy)
    elif isinstance(value, list):
        copy = [_copied(item, seen) for item in value]
    elif isinstance(value, tuple):
        items = [_copied(item, seen) for item in value]
        copy = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    else:
        return value
    seen[id(value)] = copy
    return copy


def _objects(value: np.ndarray, seen: dict[int, Any]) -> np.ndarray:
    if value.dtype != object:
        return value.copy(order="K")
    copy = np.empty_like(value)
    for index, item in np.ndenumerate(value):
        copy[index] = _copied(item, seen)
    return copy


def _like(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    copy = value.copy()  # keeps a defaultdict's factory and a subclass's attributes
    copy.update(items)
    return copy


def rows(value: Any, low: int, high: int) -> Any:
    """Some rows of a batch: views of a tensor or array, or of each entry of a dict of them."""
    if isinstance(value, dict):
        return {key: item[low:high] for key, item in value.items()}
    return value[low:high]


def concat(*parts: Any) -> Any:
    """Parts of a batch, tensors or arrays of equal trailing shape, joined along the first axis, or
    dicts of them.

    Raises:
        ValueError: for dicts with other keys than the first one has.
    """
    first = parts[0]
    if isinstance(first, dict):
        if any(not isinstance(p, dict) or p.keys() != first.keys() for p in parts):
            raise ValueError("dicts with different keys are no parts of one batch")
        return {key: concat(*(part[key] for part in parts)) for key in first}
    if isinstance(first, torch.Tensor):
        again = shown_again(parts)
        return torch.cat(parts) if again is None else again
    return np.concatenate(parts)


def join_rows(items: Sequence[Any], proven: Callable[[Sequence[Any]], bool] | None = None) -> Any:
    """Batches of several trips behind each other; :class:`~rose_compiler.base.apart.Apart` if they
    are not of one kind, so that nothing is promoted, dropped or cut that is no row, or not
    ``proven`` to be what the graphs that take them stand for."""
    return concat(*items) if alike(items) and (proven is None or proven(items)) else Apart(items)


def split_rows(value: Any, items: Sequence[Any]) -> tuple[Any, ...]:
    """Views of consecutive rows of ``value``, as many in each as the entry of ``items`` has; of
    what is apart, copies of each trip's own, as joining would have made."""
    if isinstance(value, Apart):
        return tuple(snapshot(part) for part in value.parts)
    parts, low = [], 0
    for item in items:
        count = rows_in(item)
        parts.append(rows(value, low, low + count))
        low += count
    return tuple(parts)
