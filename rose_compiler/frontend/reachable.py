"""Objects that a program can reach: their types, and the functions that they hold."""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as module_file
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

MAX_OBJECTS = 20_000
MAX_ITEMS = 200  # of one container: more of them have the same few types

_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic, np.ndarray, torch.Tensor)
#: What torch calls for every module or optimizer, by tables that no object leads to.
HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    module_file._global_forward_hooks,
    module_file._global_forward_pre_hooks,
    module_file._global_backward_hooks,
    module_file._global_backward_pre_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)
_LEAVES = (*_PLAIN, torch.dtype, torch.device, types.ModuleType, range)


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes stored in an object itself: its ``__dict__`` and its slots. Of a compiled
    function, which changes with each call, none but the function that it stands for."""
    if "rose_compiled" in vars(type(value)):
        yield "__wrapped__", value.__wrapped__
        return
    found = getattr(value, "__dict__", None)
    if isinstance(found, dict):
        yield from list(found.items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            try:
                yield name, object.__getattribute__(value, name)
            except AttributeError:
                continue


def field_names(value: Any) -> tuple[str, ...]:
    """The names of the attributes stored in an object itself, and of the parts of a module."""
    names = [name for name, _ in fields_of(value)]
    if isinstance(value, torch.nn.Module):
        names += [*value._parameters, *value._buffers, *value._modules]
    return tuple(dict.fromkeys(names))


def hooks_of(tensor: torch.Tensor) -> list[Any]:
    """What is called when the gradient of a tensor is there."""
    tables = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return [hook for table in tables if table for hook in table.values()]


class Reachable:
    """Everything below some objects, walked once; ``attributes`` has the types seen below each."""

    def __init__(self) -> None:
        self.types: dict[type, None] = {}
        self.functions: dict[types.FunctionType, None] = {}
        self.attributes: dict[tuple[type, str], set[type]] = {}
        self._seen: dict[int, Any] = {}

    def add(self, values: Iterable[Any]) -> None:
        """Walk everything below the values."""
        queue = collections.deque(values)
        while queue and len(self._seen) < MAX_OBJECTS:
            value = queue.popleft()
            if isinstance(value, torch.Tensor):
                queue.extend(hooks_of(value))
                continue
            if isinstance(value, _LEAVES) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            queue.extend(self._below(value))

    def holds(self, *values: Any) -> bool:
        """Whether one of these very objects was met."""
        return any(id(value) in self._seen for value in values)

    def _below(self, value: Any) -> list[Any]:
        if isinstance(value, types.FunctionType):
            self.functions.setdefault(value)
            return []
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, type):
            self.types.setdefault(value)
            return []
        if isinstance(value, dict):
            return list(value.values())[:MAX_ITEMS]
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            items = list(value) if len(value) <= MAX_ITEMS else _first(value)
            if type(value) in (list, tuple, set, frozenset, collections.deque):
                return items
        else:
            items = []
        kind = type(value)
        self.types.setdefault(kind)
        for name, inner in fields_of(value):
            self.attributes.setdefault((kind, name), set()).add(type(inner))
            items.append(inner)
        return items


def _first(values: Iterable[Any]) -> list[Any]:
    # in one piece: another thread, a logger's say, may take items out meanwhile
    return list(itertools.islice(values, MAX_ITEMS))
