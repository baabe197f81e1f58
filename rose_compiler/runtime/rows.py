"""Values as batches: how many rows they have, some of their rows, several batches joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def rows_of(value: Any) -> int | None:
    """Rows of the first tensor or array in a value, which may be a nest of containers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return next((n for v in value if (n := rows_of(v)) is not None), None)
    return None


def cut(value: Any, low: int, high: int, rows: int) -> Any:
    """Rows ``low`` to ``high`` of what has ``rows`` of them; the rest of the value as it is."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim and value.shape[0] == rows:
        return value[low:high]
    if type(value) is dict:
        return {key: cut(item, low, high, rows) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(cut(v, low, high, rows) for v in value)
    return value


def join(parts: list[Any]) -> Any:
    """Batches behind each other; of what is no batch, the first.

    Raises:
        ValueError: for parts that are dicts with other keys, or tuples of another length, than the
            first one: they are no parts of one batch.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor) and first.ndim:
        return torch.cat(parts)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(parts)
    if type(first) is dict:
        if any(type(p) is not dict or p.keys() != first.keys() for p in parts):
            raise ValueError("dicts with different keys are no parts of one batch")
        return {key: join([p[key] for p in parts]) for key in first}
    if isinstance(first, tuple | list):
        if any(not isinstance(p, tuple | list) or len(p) != len(first) for p in parts):
            raise ValueError("tuples of different lengths are no parts of one batch")
        return type(first)(join([p[i] for p in parts]) for i in range(len(first)))
    return first


def span(batches: list[Any], rows: int, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of batches of ``rows`` each; ``None`` if there are none."""
    parts, position = [], start
    while position < stop and position // rows < len(batches):
        number, low = divmod(position, rows)
        high = min(rows, low + stop - position)
        whole = low == 0 and high == rows
        parts.append(batches[number] if whole else cut(batches[number], low, high, rows))
        position += high - low
    return join(parts) if parts else None


def kept(value: Any) -> Any:
    """A value with tensors and arrays copied: what holds them may be written again."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (tuple, list):
        return type(value)(kept(v) for v in value)
    if type(value) is dict:
        return {k: kept(v) for k, v in value.items()}
    return value
