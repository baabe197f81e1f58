"""A batch of samples of a space as a list of arrays, and where they lie in shared memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import create_empty_array

#: Arrays begin at a cache line of their own, so that two processes don't share one.
_ALIGN = 64


class Tree:
    """The shape of a batch of samples of a space: nested dicts and tuples with leaves."""

    __slots__ = ("keys", "parts")

    def __init__(self, space: Space) -> None:
        self.keys: tuple[str, ...] | None = None
        self.parts: tuple[Tree, ...] | None = None
        if isinstance(space, spaces.Dict):
            self.keys = tuple(space.spaces)
            self.parts = tuple(Tree(sub) for sub in space.spaces.values())
        elif isinstance(space, spaces.Tuple):
            self.parts = tuple(Tree(sub) for sub in space.spaces)

    def flatten(self, batch: Any) -> list[Any]:
        """The leaves of a batch, in the order of the space's own keys."""
        if self.parts is None:
            return [batch]
        pairs = zip(self.parts, self._children(batch), strict=True)
        return [leaf for part, child in pairs for leaf in part.flatten(child)]

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """The batch with these leaves."""
        return self._build(iter(leaves))

    def rows(self, batch: Any, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` of a batch, as views where they are arrays."""
        if self.parts is None:
            return batch[start:stop]
        return self.unflatten(leaf[start:stop] for leaf in self.flatten(batch))

    def concatenate(self, batches: Sequence[Any]) -> Any:
        """One batch from several, in fresh arrays."""
        if self.parts is None:
            return _concatenated(batches)
        leaves = zip(*(self.flatten(batch) for batch in batches), strict=True)
        return self.unflatten(_concatenated(parts) for parts in leaves)

    def _children(self, batch: Any) -> Iterable[Any]:
        return batch if self.keys is None else [batch[key] for key in self.keys]

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.parts is None:
            return next(leaves)
        children = [part._build(leaves) for part in self.parts]
        return tuple(children) if self.keys is None else dict(zip(self.keys, children, strict=True))


def _concatenated(parts: Sequence[Any]) -> Any:
    if type(parts[0]) is np.ndarray:
        return np.concatenate(parts)
    if all(isinstance(part, tuple | list) for part in parts):
        return tuple(item for part in parts for item in part)
    if all(hasattr(part, "new_empty") for part in parts):
        return sys.modules["torch"].cat(parts)
    return np.concatenate([np.asarray(part) for part in parts])


def copy(value: Any) -> Any:
    """The value with its arrays copied; dicts, lists and tuples are rebuilt."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy(item) for item in value)
    return value.clone() if hasattr(value, "clone") else value


@dataclass(frozen=True)
class Slot:
    """Where one array lies. ``dtype`` is the string that numpy reads."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, memory: Any) -> np.ndarray:
        """The array in mapped memory."""
        return np.ndarray(self.shape, self.dtype, buffer=memory, offset=self.offset)

    def numbers(self, memory: Any) -> memoryview[float]:
        """The numbers of a list of doubles in mapped memory; taken one by one, that is several
        times as fast as by an array."""
        size = 8 * self.shape[0]
        return memoryview(memory)[self.offset : self.offset + size].cast("d")


@dataclass(frozen=True)
class Layout:
    """Shared memory of one shard of ``count`` environments.

    ``obs`` has a slot for each leaf of the observation, None where it is no plain array and is
    sent by message. ``reward`` has room for eight bytes an environment, whatever its type.
    ``actions`` is plain room; the arrays put there say their type when it changes. ``clock`` has
    whether steps are timed, and of the last one that was: begin, end, CPU seconds, and how many
    named phases it had. ``at_once`` has whether wrappers advance at once.
    """

    count: int
    obs: tuple[Slot | None, ...]
    reward: Slot
    reward_type: Slot
    terminated: Slot
    truncated: Slot
    actions: Slot
    clock: Slot
    at_once: Slot
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

        leaves = Tree(observation).flatten(create_empty_array(observation, n=count))
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
            place(np.float64, 5),
            place(np.bool_, 1),
            end,
        )
