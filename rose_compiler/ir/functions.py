"""Plain functions that a program may call besides operations, by their public names.

Bodies of graph operations call torch functions, ``torch.ops.aten`` overloads, operators and tensor
methods. A dump prints them by name, and parsing looks names up here: this is an allow list, so that
no text can reach a function that touches files, processes or the interpreter.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import get_overridable_functions

# Factories and queries that torch can't override for tensors, hence not in its own list.
_TORCH_EXTRA = (
    *("arange", "as_strided", "as_tensor", "asarray", "bartlett_window", "blackman_window"),
    *("broadcast_shapes", "can_cast", "empty", "empty_permuted", "empty_strided", "eye", "fill"),
    *("from_numpy", "full", "hamming_window", "hann_window", "is_tensor", "kaiser_window"),
    *("linspace", "logspace", "normal", "ones", "promote_types", "rand", "rand_like", "randint"),
    *("randint_like", "randn", "randn_like", "randperm", "result_type", "scalar_tensor"),
    *("_is_all_true", "tensor", "tril_indices", "triu_indices", "vander", "zeros"),
)
# Methods that hand memory or hooks to somebody else, take functions, or call them.
_REFUSED_METHODS = frozenset(
    ("apply_", "const_data_ptr", "data_ptr", "map_", "map2_", "module_load", "register_hook")
) | {
    *("register_post_accumulate_grad_hook", "reinforce", "set_", "share_memory_"),
    *("storage", "storage_type", "untyped_storage"),
}
# Not functions of values: they build callables, or call whatever they are given.
_REFUSED_OPERATORS = frozenset(("attrgetter", "itemgetter", "methodcaller", "call"))
#: Attributes of tensors that a graph may read.
ATTRIBUTES = frozenset(
    ("T", "data", "device", "dtype", "grad", "H", "imag", "is_leaf", "mH", "mT", "ndim", "real")
) | {"requires_grad", "shape"}

# Values with these names would hide the roots of qualified names in a dump.
ROOTS = ("torch", "operator", "math", "rose_compiler")

_registered: dict[str, Callable[..., Any]] = {}
_registered_names: dict[Any, str] = {}


def register(name: str, function: Callable[..., Any]) -> None:
    """Let programs call ``function`` under a dotted name below ``rose_compiler``.

    Raises:
        ValueError: when the name is taken by another function, or lies elsewhere.
    """
    parts = name.split(".")
    if parts[0] != "rose_compiler" or not all(p.isidentifier() for p in parts):
        raise ValueError(f"not a dotted name below rose_compiler: {name!r}")
    if _registered.setdefault(name, function) is not function:
        raise ValueError(f"{name!r} is another function already")
    _registered_names[function] = name


@functools.cache
def _by_name() -> dict[str, Callable[..., Any]]:
    """The allow list, aten apart; where a function has several names, the first one wins."""
    overridable = {id(f) for functions in get_overridable_functions().values() for f in functions}
    table: dict[str, Callable[..., Any]] = {}
    places = (
        ("torch.nn.functional", torch.nn.functional),
        ("torch", torch),
        ("torch.linalg", torch.linalg),
        ("torch.special", torch.special),
        ("torch.fft", torch.fft),
        ("torch.Tensor", torch.Tensor),
    )
    for prefix, place in places:
        for name in dir(place):
            found = inspect.getattr_static(place, name)
            found = getattr(place, name) if isinstance(found, staticmethod) else found
            found = getattr(place, name) if prefix == "torch.Tensor" and callable(found) else found
            if name.startswith("_") or not callable(found) or inspect.isclass(found):
                continue
            if prefix == "torch.Tensor" and name in _REFUSED_METHODS:
                continue
            if id(found) in overridable:
                table[f"{prefix}.{name}"] = found
    for name in _TORCH_EXTRA:
        table[f"torch.{name}"] = getattr(torch, name)
    for name in ("sigmoid", "tanh"):
        table[f"torch.nn.functional.{name}"] = getattr(torch.nn.functional, name)
    for prefix, module in (("operator", operator), ("math", math)):
        for name in dir(module):
            found = getattr(module, name)
            if name.startswith("_") or not callable(found) or name in _REFUSED_OPERATORS:
                continue
            table[f"{prefix}.{name}"] = found
    return table


@functools.cache
def _names() -> dict[Any, str]:
    names: dict[Any, str] = {}
    for name, function in _by_name().items():
        names.setdefault(function, name)
    return names


def _aten_allowed(overload: torch._ops.OpOverload) -> bool:
    """Only what computes on tensors: aten also holds printing, saving and string functions."""
    schema = overload._schema
    if any("file" in a.name or "path" in a.name for a in schema.arguments):
        return False
    return any("Tensor" in str(a.type) for a in (*schema.arguments, *schema.returns))


def _aten(path: list[str]) -> torch._ops.OpOverload | None:
    if len(path) != 2 or path[0].startswith("__") or path[1].startswith("__"):
        return None
    packet = getattr(torch.ops.aten, path[0], None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or path[1] not in packet.overloads():
        return None
    overload = getattr(packet, path[1])
    return overload if _aten_allowed(overload) else None


def resolve(name: str) -> Callable[..., Any] | None:
    """The function of this qualified name, or None when there is none that a program may call."""
    if name in _registered:
        return _registered[name]
    found = _by_name().get(name)
    if found is None and name.startswith("torch.ops.aten."):
        found = _aten(name.split(".")[3:])
    return found


def name_of(function: Any) -> str | None:
    """The qualified name under which :func:`resolve` finds the function, if it does."""
    if isinstance(function, torch._ops.OpOverload):
        namespace, _, name = function._schema.name.partition("::")
        if namespace != "aten" or name.startswith("__") or not _aten_allowed(function):
            return None
        return f"torch.ops.aten.{name}.{function._overloadname}"
    try:
        return _registered_names.get(function) or _names().get(function)
    except TypeError:  # unhashable
        return None


@functools.cache
def methods() -> frozenset[str]:
    """Names of the tensor methods that a graph may call."""
    return frozenset(
        name.rpartition(".")[2] for name in _by_name() if name.startswith("torch.Tensor.")
    )
