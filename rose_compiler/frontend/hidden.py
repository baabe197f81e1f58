"""State that a function reaches by no argument: globals of its module, attributes of its class."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.source import is_user_type

#: What the names of such states start with; nothing that can be declared does.
OUTSIDE = "outside "
MAX_FUNCTIONS = 50
_MUTABLE = (list, dict, set, collections.deque, np.ndarray, torch.Tensor, np.random.Generator)


def outside_of(function: Any, owner: Any = None) -> Iterator[tuple[str, Any]]:
    """Live objects that a function of the user's, and those that it calls by a global name, can
    change without being handed them; ``owner`` is the object that it is called on.

    Their names say where they are held: ``outside module.NAME`` or ``outside Class.name``.
    """
    for cls in type(owner).__mro__ if owner is not None and is_user_type(type(owner)) else ():
        if is_user_type(cls):
            yield from ((f"{OUTSIDE}{cls.__name__}.{k}", v) for k, v in _changing(vars(cls)))
    queue, seen = [function], set[int]()
    while queue and len(seen) < MAX_FUNCTIONS:
        code = getattr(inspected(queue.pop()), "__code__", None)
        if code is None:
            continue
        held = inspected_globals(function)
        for name in _names(code):
            value = held.get(name)
            if isinstance(value, types.FunctionType) and value.__globals__ is held:
                if id(value) not in seen:
                    seen.add(id(value))
                    queue.append(value)
            elif _changes(value):
                yield f"{OUTSIDE}{held.get('__name__')}.{name}", value


def inspected(function: Any) -> Any:
    """The plain function below what wraps it."""
    while True:
        if isinstance(function, types.MethodType | functools.partial):
            function = getattr(function, "__func__", None) or function.func  # type: ignore[union-attr]
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def inspected_globals(function: Any) -> dict[str, Any]:
    """The globals of the plain function."""
    return getattr(inspected(function), "__globals__", {})


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _changing(held: Any) -> Iterator[tuple[str, Any]]:
    yield from ((k, v) for k, v in list(held.items()) if not k.startswith("__") and _changes(v))


def _changes(value: Any) -> bool:
    return isinstance(value, _MUTABLE) or (
        is_user_type(type(value)) and isinstance(getattr(value, "__dict__", None), dict)
    )
