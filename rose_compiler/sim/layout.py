"""A batch of samples of a space as a list of arrays, and where they lie in shared memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import create_empty_array

#: Arrays begin at a cache line of their own, so that two processes don't share one.
_ALIGN = 64


def flatten(space: Space, value: Any) -> list[Any]:
    """The leaves of a batch of samples, in the order of the space's own keys."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in flatten(sub, value[key])]
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, value, strict=True)
        return [leaf for sub, part in pairs for leaf in flatten(sub, part)]
    return [value]


def unflatten(space: Space, leaves: Sequence[Any]) -> Any:
    """The batch of samples with these leaves."""
    rest = iter(leaves)

    def build(space: Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: build(sub) for key, sub in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(build(sub) for sub in space.spaces)
        return next(rest)

    return build(space)


def copy(value: Any) -> Any:
    """The value with its arrays copied; dicts, lists and tuples are rebuilt."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy(item) for item in value)
    return value.clone() if hasattr(value, "clone") else value


def concatenate(space: Space, batches: Sequence[Any]) -> Any:
    """One batch of samples from several, in fresh arrays."""
    leaves = zip(*(flatten(space, batch) for batch in batches), strict=True)
    return unflatten(space, [_concatenated(parts) for parts in leaves])


def _concatenated(parts: tuple[Any, ...]) -> Any:
    if all(isinstance(part, tuple | list) for part in parts):
        return tuple(item for part in parts for item in part)
    if all(hasattr(part, "new_empty") for part in parts):
        return sys.modules["torch"].cat(parts)
    return np.concatenate([np.asarray(part) for part in parts])


def rows(space: Space, batch: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of a batch of samples, as views where they are arrays."""
    if isinstance(space, spaces.Dict):
        return {key: rows(sub, batch[key], start, stop) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, batch, strict=True)
        return tuple(rows(sub, part, start, stop) for sub, part in pairs)
    return batch[start:stop]


@dataclass(frozen=True)
class Slot:
    """Where one array lies. ``dtype`` is the string that numpy reads."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, memory: Any) -> np.ndarray:
        """The array in mapped memory."""
        return np.ndarray(self.shape, self.dtype, buffer=memory, offset=self.offset)


@dataclass(frozen=True)
class Layout:
    """Shared memory of one shard of ``count`` environments.

    ``obs`` has a slot for each leaf of the observation, None where it is no plain array and is
    sent by message. ``reward`` has room for eight bytes an environment, whatever its type.
    ``actions`` is plain room; the arrays put there say their type when it changes.
    """

    count: int
    obs: tuple[Slot | None, ...]
    reward: Slot
    reward_type: Slot
    terminated: Slot
    truncated: Slot
    actions: Slot
    size: int

    @classmethod
    def of(cls, observation: Space, action: Space, count: int) -> Layout:
        """The layout for ``count`` environments with these single spaces."""
        end = 0

        def place(dtype: Any, *shape: int) -> Slot:
            nonlocal end
            slot = Slot(np.dtype(dtype).str, shape, end)
            end += -(-max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize) // _ALIGN) * _ALIGN
            return slot

        leaves = flatten(observation, create_empty_array(observation, n=count))
        obs = tuple(
            place(leaf.dtype, *leaf.shape)
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
            else None
            for leaf in leaves
        )
        room = 0
        if action.shape is not None and action.dtype is not None:
            room = count * int(np.prod(action.shape)) * max(8, action.dtype.itemsize)
        return cls(
            count,
            obs,
            place(np.uint8, count * 8),
            place(np.uint8, 1),
            place(np.bool_, count),
            place(np.bool_, count),
            place(np.uint8, room),
            end,
        )
