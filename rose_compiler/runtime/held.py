"""Memory that a stream still uses, in values that cross from one stream to another.

The allocator of a device gives memory back to the stream that it was allocated on as soon as nobody
holds it any more, whatever other streams still do with it. A tensor can be told of them
(``record_stream``). An object can't: what an operation was given is held until its stream is
through with it. So are the items of a long container: it would take long to tell of each. What it
made is looked into for its tensors, or held until its lane has come to rest, where that does not
show all: work that was queued there before could be given that memory.
"""

from __future__ import annotations

import enum
import gc
import types
from collections import deque
from typing import Any, Protocol

import numpy as np
import torch

#: What holds no tensor.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type),
    *(np.generic, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)
#: What holds no tensor either, unless it holds objects.
_ARRAYS = (np.ndarray, np.void)
_CONTAINERS = (tuple, list, dict, deque, set, frozenset)
_FIXED = (tuple, frozenset)
#: What leads to far more than it stands for, or holds what can't be seen from outside.
_CLOSED = (
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(types.GeneratorType, types.FrameType, types.CodeType, torch.nn.Module, *_ARRAYS),
)
#: Things that are looked at in a value, at most: what has more is held.
_MOST = 1000


class Happens(Protocol):
    """What is asked of a device's streams here."""

    def happened(self, event: Any) -> bool:
        """Whether an event has happened, as far as the host can tell without waiting."""


def looked(value: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors in a value: itself, or inside tuples, lists, sets, deques and dicts. And what may
    hold others: objects of other types, and the items of containers that are too long.

    No code of the user's runs: a mapping that computes its items is an object like any other.
    """
    found: list[torch.Tensor] = []
    rest: list[Any] = []
    todo, seen, left = [value], set[int](), _MOST
    for at in todo:  # which grows meanwhile
        kind = type(at)
        if issubclass(kind, torch.Tensor):
            found.append(at)
        elif not _plain(at) and id(at) not in seen:
            seen.add(id(at))
            base = next((b for b in _CONTAINERS if issubclass(kind, b)), None)
            if base is not kind:
                rest.append(at)
            if base is None:
                continue
            if base in _FIXED and base.__len__(at) > left:
                if base is kind:
                    rest.append(at)  # nothing is ever taken out of it
                continue
            # copied at once: what is taken out of it later must stay as well
            items = list(dict.values(at) if base is dict else base.__iter__(at))
            if len(items) > left:
                rest.append(items)
            else:
                left -= len(items)
                todo += items
    return found, rest


def tensors(value: Any) -> list[torch.Tensor]:
    """Those of a value that :func:`looked` finds."""
    return looked(value)[0]


def inside(value: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors in a value and in whatever objects in it refer to, and whether these are all."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    todo, whole, left = [value], True, _MOST
    while todo:
        at = todo.pop()
        kind = type(at)
        if not left or (kind in _CONTAINERS and len(at) > left):
            return list(found.values()), False
        left -= 1
        if issubclass(kind, torch.Tensor):
            found[id(at)] = at
        elif not _plain(at) and id(at) not in seen:
            seen[id(at)] = at
            if issubclass(kind, _CLOSED):
                whole = False
                continue
            # one that tells nothing of what it refers to, unless it is empty or of plain values
            whole = whole and (gc.is_tracked(at) or issubclass(kind, _CONTAINERS))
            todo += gc.get_referents(at)
    return list(found.values()), whole


def _plain(value: Any) -> bool:
    """Whether a value holds no tensor."""
    kind = type(value)
    if issubclass(kind, _ARRAYS):
        return kind in _ARRAYS and not value.dtype.hasobject
    return issubclass(kind, _PLAIN)


class Held:
    """What one lane holds until nobody needs it any more."""

    def __init__(self) -> None:
        self._given: deque[tuple[Any, list[Any]]] = deque()
        self._made: list[Any] = []

    def given(self, values: list[Any], event: Any, streams: Happens) -> None:
        """Hold what a stream can't be told of, the rest of what an operation was given, until
        ``event``, which stands behind the operation, has happened."""
        while self._given and streams.happened(self._given[0][0]):
            self._given.popleft()
        if values:
            self._given.append((event, values))

    def made(self, value: Any) -> None:
        """Hold a result until the lane has come to rest, and what is in it now."""
        self._made.append((value, looked(value)))

    def release(self) -> None:
        """The lane has come to rest: whatever is issued from now on waits for all that was."""
        self._given.clear()
        self._made.clear()
