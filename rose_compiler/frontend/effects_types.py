"""Types of what calls give, and calls that are known by name alone."""

# ruff: noqa: SIM905 (tables of names read better as words than as quoted lists)

from __future__ import annotations

import builtins
import collections
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rose_compiler.frontend import known
from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.effects_val import Val

if TYPE_CHECKING:
    from rose_compiler.frontend.known_base import KnownEffects

_PURE_BUILTINS = frozenset(
    """
    abs all any ascii bin bool bytes chr complex divmod float format getattr hasattr hash hex id
    int isinstance issubclass len list max min oct ord pow range repr reversed round set sorted
    str sum tuple type zip enumerate dict frozenset slice
    """.split()
)


def pure_builtin(target: Any) -> bool:
    """Whether a builtin, or a function of a module of mathematics, only reads its arguments: what
    special methods of the user's do is not seen."""
    name = getattr(target, "__name__", "")
    if getattr(target, "__module__", None) in ("statistics", "math", "cmath"):
        return True
    return name in _PURE_BUILTINS and getattr(builtins, name, None) is target


#: The types that a value of unknown type is taken to be one of, if no class of the user's has a
#: method of the name that is called.
_CANDIDATES: tuple[type, ...] = (
    torch.Tensor,
    np.ndarray,
    dict,
    list,
    str,
    set,
    collections.deque,
    float,
    tuple,
)


def by_name(
    changes: Changes,
    name: str,
    kinds: tuple[type | None, ...],
    keyword_kinds: Mapping[str, type | None],
) -> KnownEffects | None:
    """Effects of a method of which only the name is known: those of all library types together."""
    if name in changes.methods:
        return None
    found: KnownEffects | None = None
    for candidate in _CANDIDATES:
        if not hasattr(candidate, name):
            continue
        effects = known.effects_of_method(candidate, name, kinds, keyword_kinds)
        if effects is None:
            return None
        if found is None:
            found = effects
        else:
            found = replace(
                found,
                reads=tuple(dict.fromkeys((*found.reads, *effects.reads))),
                writes=tuple(dict.fromkeys((*found.writes, *effects.writes))),
                alias=tuple(dict.fromkeys((*found.alias, *effects.alias))),
                retains=tuple(dict.fromkeys((*found.retains, *effects.retains))),
                may_raise=found.may_raise or effects.may_raise,
            )
    return found


def result_type(target: Any, effects: KnownEffects | None) -> type | None:
    """The type of what a callable gives, where it is always the same."""
    if isinstance(target, type):
        return torch.Tensor if issubclass(target, torch.Tensor) else target
    if target in (len, round, hash, ord):
        return int
    if target in (isinstance, issubclass, callable, hasattr, any, all):
        return bool
    if target in (repr, str, format):
        return str
    owner = getattr(target, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return None
    module = getattr(target, "__module__", "") or ""
    if module.startswith("numpy") or isinstance(target, np.ufunc):
        return None
    name = getattr(target, "__name__", "")
    function = (
        getattr(torch, name, None) is target or getattr(torch.nn.functional, name, None) is target
    )
    if function and name not in _NOT_TENSORS:
        return torch.Tensor
    return None


def elementwise(target: Any, kinds: tuple[type | None, ...]) -> type | None:
    """A tensor, where functions with several meanings are handed what makes them element by
    element: ``torch.max(a, b)``, ``torch.where(c, a, b)``."""
    wanted = 2 if target in (torch.max, torch.min) else 3 if target is torch.where else 0
    given = len(kinds) == wanted > 0
    tensors = all(k is not None and issubclass(k, torch.Tensor) for k in kinds[:2])
    return torch.Tensor if given and tensors else None


_NOT_TENSORS = frozenset(
    """
    max min sort topk split chunk unbind meshgrid broadcast_tensors var_mean std_mean median
    mode kthvalue cummax cummin svd qr eig eigh is_tensor is_grad_enabled get_rng_state
    tensor_split equal allclose is_nonzero numel result_type promote_types can_cast finfo iinfo
    unique unique_consecutive nonzero where slogdet lu frexp aminmax histogram get_num_threads
    is_inference_mode_enabled get_default_dtype typename is_storage broadcast_shapes hsplit
    vsplit dsplit atleast_1d atleast_2d atleast_3d
    """.split()
)

_SAME_TYPE = frozenset(
    """
    view reshape flatten squeeze unsqueeze float double to cpu cuda detach clone mean sum std
    exp log tanh abs clamp pow mul add sub div expand expand_as contiguous transpose permute t
    copy astype mul_ add_ sub_ div_ zero_ copy_ fill_ clamp_ normal_ uniform_ long int bool half
    any all argmax gather sigmoid relu softmax log_softmax cumsum view_as repeat roll flip
    index_select masked_fill masked_fill_ lerp_ lerp addcmul_ addcdiv_ requires_grad_ prod norm
    sqrt square neg ravel round clip swapaxes type_as new_zeros new_ones new_tensor new_empty
    new_full scatter_ index_copy_ index_add_ index_fill_ detach_ unfold argsort matmul mm bmm
    triu tril sign eq ne gt lt ge le logical_and logical_or logical_not isnan isinf isfinite
    """.split()
)


def method_type(receiver: Val, name: str) -> type | None:
    """The type of what a method of a tensor, array or distribution gives."""
    kind = receiver.type
    if kind is None:
        return None
    if issubclass(kind, (torch.Tensor, np.ndarray)) and name in ("item", "tolist"):
        return float if name == "item" else list  # some number
    if issubclass(kind, torch.Tensor):
        if name == "numpy":
            return np.ndarray
        if name in ("dim", "size", "numel", "ndimension", "nelement", "element_size"):
            return int if name != "size" else None
        return torch.Tensor if name in _SAME_TYPE else None
    if issubclass(kind, np.ndarray):
        reduced = name in ("mean", "sum", "std", "any", "all", "argmax", "prod", "norm", "max")
        return np.ndarray if name in _SAME_TYPE and not reduced else None
    if issubclass(kind, torch.distributions.Distribution):
        return torch.Tensor
    if kind is str and name in ("join", "format", "strip", "upper", "lower", "replace"):
        return str
    return kind if name == "copy" else None
