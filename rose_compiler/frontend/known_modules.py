"""What calls of ``nn.Module`` objects and of their methods read and write."""

# ruff: noqa: SIM905 (tables of names read better as words than as quoted lists)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm, lazy
from torch.nn.modules import module as module_file

from rose_compiler.frontend.known_base import Answer, CallShape, KnownEffects, defined_in

_READ_OUT = KnownEffects(reads=("self",), alias=("self",))
_METHODS: dict[str, KnownEffects] = {
    "train": KnownEffects(writes=("self#mode",), alias=("self",), may_raise=False),
    "eval": KnownEffects(writes=("self#mode",), alias=("self",), may_raise=False),
    # who records from the parameters, and backward, look at it
    "requires_grad_": KnownEffects(writes=("self#params", "self#mode"), alias=("self",)),
    "zero_grad": KnownEffects(writes=("self#grads",)),
    "load_state_dict": KnownEffects(reads=("arg0",), writes=("self",)),
    "to": KnownEffects(reads=("self",), writes=("self",), alias=("self",)),
    **dict.fromkeys(
        ("float", "double", "half", "bfloat16", "cpu", "cuda", "type", "share_memory"),
        KnownEffects(reads=("self",), writes=("self",), alias=("self",)),
    ),
    **dict.fromkeys(
        """parameters named_parameters buffers named_buffers children named_children modules
        named_modules state_dict get_parameter get_buffer get_submodule extra_repr""".split(),
        _READ_OUT,
    ),
}
_CONTAINERS: dict[type, tuple[str, ...]] = {
    nn.ModuleList: ("append", "extend", "insert", "pop"),
    nn.ParameterList: ("append", "extend", "pop"),
    nn.ModuleDict: ("items", "keys", "values", "update", "pop", "clear"),
    nn.ParameterDict: ("items", "keys", "values", "get", "update", "pop", "clear"),
}
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARY = "torch.nn"
# Modules that may hand on their input, or a view of it.
_HAND_ON = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    dropout._DropoutNd,
    nn.Upsample,
    nn.ConstantPad1d,
    nn.ConstantPad2d,
    nn.ConstantPad3d,
)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module, or a module below it, runs hooks, its own or global ones."""
    if any(getattr(module_file, name, None) for name in _GLOBAL_HOOKS):
        return True
    return any(getattr(m, name, None) for m in module.modules() for name in _HOOKS)


def is_library_module(module: nn.Module) -> bool:
    """Whether this very module's forward is torch's own."""
    forward = getattr(type(module), "forward", None)
    plain = "forward" not in module.__dict__ and "__call__" not in module.__dict__
    return plain and forward is not None and defined_in(forward, (_LIBRARY,))


def stateful_below(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules at or below this one whose forward, in their present mode, writes buffers; and those
    whose forward draws random numbers."""
    writing: list[nn.Module] = []
    drawing: list[nn.Module] = []
    for m in module.modules():
        if isinstance(m, lazy.LazyModuleMixin) or torch.nn.utils.parametrize.is_parametrized(m):
            writing.append(m)
        elif isinstance(m, batchnorm._NormBase | instancenorm._InstanceNorm):
            if m.training and m.track_running_stats:
                writing.append(m)
        elif m.training and (
            (isinstance(m, dropout._DropoutNd) and m.p > 0)
            or isinstance(m, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
            or (isinstance(m, nn.RNNBase | nn.MultiheadAttention) and float(m.dropout) > 0)
        ):
            drawing.append(m)
        elif isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            writing.append(m)
    return writing, drawing


def call_effects(module: nn.Module) -> KnownEffects | None:
    """What ``module(...)`` reads and writes in its present mode; ``None`` when hooks run."""
    if type(module).__call__ is not nn.Module.__call__ or "__call__" in module.__dict__:
        return None
    if has_hooks(module):
        return None
    if any(hasattr(m, "_compiled_call_impl") and m._compiled_call_impl for m in module.modules()):
        return None
    writing, drawing = stateful_below(module)
    if any(not isinstance(m, batchnorm._NormBase) for m in writing):
        return None
    library = all(is_library_module(m) for m in module.modules())
    hands_on, in_place = _input_fate(module)
    return KnownEffects(
        reads=("self", *(("rng:torch",) if drawing else ())),
        writes=(
            *(("self#buffers",) if writing else ()),
            *(("rng:torch",) if drawing else ()),
            *(("arg0",) if in_place else ()),
        ),
        # a forward of the user's may return a weight
        alias=(("arg0",) if hands_on or in_place else ()) if library else ("self", "arg0"),
        kind="module",
        if_traced=not library,
    )


def _input_fate(module: nn.Module) -> tuple[bool, bool]:
    """Whether a library module hands on its input (or a view of it), and whether it writes it."""
    if isinstance(module, nn.Sequential):
        for child in module:
            hands_on, in_place = _input_fate(child)
            if in_place:
                return True, True
            if not hands_on:
                return False, False
        return True, False
    in_place = bool(getattr(module, "inplace", False))
    return in_place or isinstance(module, _HAND_ON), in_place


def module_effects(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    """The method rule for modules."""
    if not issubclass(owner, nn.Module):
        return None
    if name in ("__call__", "forward"):
        if not isinstance(call.receiver, nn.Module):
            return None  # mode, hooks and submodules are the instance's
        if name == "forward" and not is_library_module(call.receiver):
            return None
        effects = call_effects(call.receiver)
        if effects is not None and effects.if_traced:
            effects = replace(effects, alias=("self", *call.memory()))
        return effects
    resolved = getattr(owner, name, None)
    for container, names in _CONTAINERS.items():
        if issubclass(owner, container) and name in names:
            if resolved is not getattr(container, name):
                return None
            if name in ("items", "keys", "values", "get"):
                return _READ_OUT
            return KnownEffects(writes=("self",), alias=("self",), retains=call.args())
    if name in _METHODS and resolved is getattr(nn.Module, name) and function is resolved:
        return _METHODS[name]
    return None
