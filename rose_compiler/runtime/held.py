"""Memory that a stream still uses, in values that cross from one stream to another.

The allocator of a device gives memory back to the stream that it was allocated on as soon as nobody
holds it any more, whatever other streams still do with it. A tensor can be told of them
(``record_stream``). An object can't: what an operation was given is held until its stream is
through with it. What it made is looked into for its tensors, or held until its lane has come to
rest, where that does not show all: work that was queued there before could be given that memory.
"""

from __future__ import annotations

import enum
import gc
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

#: What holds no tensor.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type),
    *(np.ndarray, np.generic, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator),
)
_ITEMS = (tuple, list, set, frozenset, deque)
#: What leads to far more than it stands for, or holds what can't be seen from outside.
_CLOSED = (
    *(types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(types.GeneratorType, types.FrameType, types.CodeType, torch.nn.Module),
)
#: Objects that are looked into, at most: what is larger is held.
_MOST = 1000


class Happens(Protocol):
    """What is asked of a device's streams here."""

    def happened(self, event: Any) -> bool:
        """Whether an event has happened, as far as the host can tell without waiting."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or inside tuples, lists, sets and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _ITEMS):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)


def opaque(value: Any) -> bool:
    """Whether :func:`tensors` may miss one."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return False
    if type(value) in _ITEMS:
        return any(map(opaque, value))
    return type(value) is not dict or any(map(opaque, value.values()))


def inside(value: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors in a value and in whatever objects in it refer to, and whether these are all."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    todo, whole = [value], True
    while todo:
        at = todo.pop()
        if isinstance(at, torch.Tensor):
            found[id(at)] = at
        elif not isinstance(at, _PLAIN) and id(at) not in seen:
            seen[id(at)] = at
            if isinstance(at, _CLOSED) or len(seen) > _MOST:
                whole = False
                continue
            # one that tells nothing of what it refers to, unless it is empty or of plain values
            whole = whole and (gc.is_tracked(at) or isinstance(at, (*_ITEMS, dict)))
            todo += gc.get_referents(at)
    return list(found.values()), whole


class Held:
    """What one lane holds until nobody needs it any more."""

    def __init__(self) -> None:
        self._given: deque[tuple[Any, list[Any]]] = deque()
        self._made: list[Any] = []

    def given(self, values: Iterable[Any], event: Any, streams: Happens) -> None:
        """Hold those of an operation's arguments that a stream can't be told of until ``event``,
        which stands behind it, has happened."""
        while self._given and streams.happened(self._given[0][0]):
            self._given.popleft()
        kept = [value for value in values if opaque(value)]
        if kept:
            self._given.append((event, kept))

    def made(self, value: Any) -> None:
        """Hold a result until the lane has come to rest."""
        self._made.append(value)

    def release(self) -> None:
        """The lane has come to rest: whatever is issued from now on waits for all that was."""
        self._given.clear()
        self._made.clear()
