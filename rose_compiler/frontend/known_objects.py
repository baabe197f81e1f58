"""Known methods and constructors of torch: optimizers, distributions, generators, modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from rose_compiler.frontend.known_base import (
    PURE,
    Answer,
    CallShape,
    KnownEffects,
    aliases_arguments,
    defined_in,
    register_callable,
    register_callable_rule,
    register_method_rule,
)
from rose_compiler.frontend.known_modules import module_effects

_OPTIM = ("torch.optim",)
_DISTRIBUTIONS = ("torch.distributions",)


def _generator_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if owner is not torch.Generator:
        return None
    if name in ("manual_seed", "seed", "set_state"):
        return KnownEffects(reads=("self",), writes=("self",), alias=("self",))
    if name in ("get_state", "initial_seed"):
        return KnownEffects(reads=("self",))
    return None


_OPTIMIZER_METHODS: dict[str, KnownEffects] = {
    "step": KnownEffects(
        reads=("self", "self#params", "self#grads"),
        writes=("self", "self#params"),
        kind="optimizer",
    ),
    "zero_grad": KnownEffects(
        reads=("self",), writes=("self#grads",), kind="optimizer", may_raise=False
    ),
    "state_dict": KnownEffects(reads=("self",), alias=("self",)),
    "load_state_dict": KnownEffects(reads=("arg0", "self"), writes=("self",)),
    "add_param_group": KnownEffects(reads=("self",), writes=("self",), retains=("arg0",)),
}


def _has_step_hooks(receiver: Any) -> bool:
    pools = [
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        getattr(receiver, "_optimizer_step_pre_hooks", {}),
        getattr(receiver, "_optimizer_step_post_hooks", {}),
    ]
    return any(len(p) > 0 for p in pools)


def _optimizer_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if not issubclass(owner, torch.optim.Optimizer) or name not in _OPTIMIZER_METHODS:
        return None
    # a schedule replaces the instance's step by a counting wrapper of its own
    if not defined_in(function, _OPTIM) or not defined_in(getattr(owner, name), _OPTIM):
        return None
    if name == "step" and (call.positional or call.keywords or _has_step_hooks(call.receiver)):
        return None
    return _OPTIMIZER_METHODS[name]


def _schedule_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if not issubclass(owner, torch.optim.lr_scheduler.LRScheduler):
        return None
    if not defined_in(function, _OPTIM):
        return None
    if owner.__name__ in ("LambdaLR", "MultiplicativeLR"):
        return None  # runs the user's function
    if name == "step":
        return KnownEffects(
            reads=("self", "self#optimizer"), writes=("self", "self#optimizer"), kind="optimizer"
        )
    if name in ("get_last_lr", "state_dict"):
        return KnownEffects(reads=("self",), alias=("self",))
    return None


def _distribution_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if not issubclass(owner, torch.distributions.Distribution):
        return None
    if not defined_in(owner, _DISTRIBUTIONS) or not defined_in(function, _DISTRIBUTIONS):
        return None
    if name in ("sample", "rsample", "sample_n"):
        return KnownEffects(
            reads=("self", "rng:torch"), writes=("rng:torch",), alias=("self",), kind="draw"
        )
    if name in ("log_prob", "entropy", "cdf", "icdf", "perplexity", "enumerate_support"):
        return KnownEffects(reads=("self",), alias=("self",))
    if name == "expand":
        return KnownEffects(reads=("self",), alias=("self",))
    return None


def _library_class(obj: Any, call: CallShape) -> Answer:
    """Constructors: what is built holds its arguments."""
    if not isinstance(obj, type):
        return None
    if issubclass(obj, torch.distributions.Distribution) and defined_in(obj, _DISTRIBUTIONS):
        return replace(aliases_arguments(call), host_read=True)  # validation looks at the values
    if issubclass(obj, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        if not defined_in(obj, _OPTIM):
            return None
        writes = call.args() if issubclass(obj, torch.optim.lr_scheduler.LRScheduler) else ()
        return KnownEffects(writes=writes, alias=call.args())
    if issubclass(obj, nn.Module) and defined_in(obj, ("torch.nn",)):
        return KnownEffects(
            reads=("rng:torch",), writes=("rng:torch",), alias=call.args(), kind="draw"
        )
    if obj in (nn.Parameter, nn.Buffer, torch.Tensor):
        return aliases_arguments(call)
    return None


_RULES: tuple[Callable[[type, str, Any, CallShape], Answer], ...] = (
    _generator_method,
    _optimizer_method,
    _schedule_method,
    _distribution_method,
    module_effects,
)


def register() -> None:
    """Enter this table."""
    register_callable(torch.distributions.kl_divergence, PURE)
    register_callable_rule(_library_class)
    for rule in _RULES:
        register_method_rule(rule)
