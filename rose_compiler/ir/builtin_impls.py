"""What built-in operations compute, as the reference executor runs it.

numpy and torch are imported where they are used: a program is read and rewritten without them.
"""

from __future__ import annotations

from typing import Any

from rose_compiler.base.apart import Apart, alike, rows_in
from rose_compiler.base.gaps import shown_again
from rose_compiler.ir import noise

#: Draws of noise by name.
DRAWS = {f.__name__: f for f in (noise.normal, noise.uniform, noise.exponential)}


def rows(value: Any, lo: int, hi: int) -> Any:
    """A view of rows ``lo`` to ``hi`` of a batch, of each entry where it is a dict."""
    if isinstance(value, dict):
        return {key: item[lo:hi] for key, item in value.items()}
    return value[lo:hi]


def concat(*parts: Any) -> Any:
    """Parts joined along the batch axis. Raises ``ValueError`` for dicts with different keys."""
    import numpy as np
    import torch

    first = parts[0]
    if isinstance(first, dict):
        if any(not isinstance(p, dict) or p.keys() != first.keys() for p in parts):
            raise ValueError("dicts with different keys are no parts of one batch")
        return {key: concat(*(p[key] for p in parts)) for key in first}
    if isinstance(parts[0], torch.Tensor):
        again = shown_again(parts)
        return torch.cat(parts) if again is None else again
    return np.concatenate(parts)


def randn(*args: Any) -> Any:
    """A standard normal draw: the sizes, then dtype and device."""
    import torch

    *shape, dtype, device = args
    return torch.randn(tuple(shape), dtype=dtype, device=device)


def draw(kind: str, shape: Any, parameters: Any, dtype: Any, device: Any) -> Any:
    """A draw by a function of :data:`DRAWS`."""
    made: Any = DRAWS[kind]
    return made(shape, *parameters, dtype=dtype, device=device)


def merge(env: Any, *results: Any) -> Any:
    """The whole batch's result out of its shards' results."""
    return env.merge(list(results))


def snapshot(value: Any) -> Any:
    """A copy that owns the memory of its arrays and tensors."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        copy = value.copy(order="K")
        if value.dtype == object:
            for index, item in np.ndenumerate(value):
                copy[index] = snapshot(item)
        return copy
    if isinstance(value, tuple):
        items = [snapshot(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [snapshot(item) for item in value]
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return value


def append(items: Any, value: Any) -> None:
    """One more entry at the end of a list."""
    items.append(value)


def join_rows(items: Any, proven: Any = None) -> Any:
    """Entries joined along the batch axis, or apart where they are not of one kind, or not
    ``proven`` to be what those who take them stand for."""
    return concat(*items) if alike(items) and (proven is None or proven(items)) else Apart(items)


def split_rows(value: Any, items: Any) -> Any:
    """Rows cut into views, as many each as the entries of ``items`` have."""
    if isinstance(value, Apart):
        return tuple(map(snapshot, value.parts))
    parts, start = [], 0
    for item in items:
        count = rows_in(item)
        parts.append(rows(value, start, start + count))
        start += count
    return tuple(parts)


def piece(parts: Any, index: Any, start: Any, step: Any) -> Any:
    """The part that belongs to the trip ``index`` of a range."""
    return parts[(index - start) // step]


def fuse(optimizer: Any) -> None:
    """How a step rounds is no part of a program's meaning."""


def batch_wrappers(env: Any) -> None:
    """How wrappers get at their results is no part of a program's meaning."""
