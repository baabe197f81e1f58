"""Reading attributes of live objects at capture, without running the user's code."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import numpy as np

from rose_compiler.frontend.source import is_user_type


class Missing:
    """What stands for something that is not known at capture."""


NOT_STATIC = Missing()


def callable_only(value: Any) -> bool:
    """Whether an object is only good for being called: a method, a ufunc, a torch operator."""
    return isinstance(value, (types.MethodType, np.ufunc, types.MethodDescriptorType)) or (
        callable(value) and type(value).__module__.startswith(("torch._ops", "functools"))
    )


def read_attribute(owner: Any, name: str) -> Any:
    """An attribute that reading can't change: instance data, methods, properties of libraries.
    ``NOT_STATIC`` for what the user's own code computes."""
    try:
        raw = inspect.getattr_static(owner, name)
    except AttributeError:
        raw = None
    if raw is None and is_user_type(type(owner)) and _computes_attributes(type(owner)):
        return NOT_STATIC
    if isinstance(raw, property):
        module = getattr(raw.fget, "__module__", "") or ""
        if not module.startswith(("gymnasium", "torch", "numpy", "rose_compiler", "envpool")):
            return NOT_STATIC
    elif raw is not None and _computes(raw) and name not in getattr(owner, "__dict__", {}):
        return NOT_STATIC
    try:
        return getattr(owner, name)
    except Exception:  # whatever a user's __getattr__ raises, the path is not known
        return NOT_STATIC


def _computes(raw: Any) -> bool:
    """Whether an entry of a class is a descriptor of the user's own, or a cached property."""
    return isinstance(raw, functools.cached_property) or (
        hasattr(type(raw), "__get__") and is_user_type(type(raw))
    )


def _computes_attributes(cls: type) -> bool:
    return any("__getattr__" in base.__dict__ and is_user_type(base) for base in cls.__mro__)
