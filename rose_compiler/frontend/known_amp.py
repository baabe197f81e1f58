"""What gradient scalers of torch.amp read and write."""

from __future__ import annotations

from typing import Any

import torch

from rose_compiler.frontend.known_base import (
    Answer,
    CallShape,
    KnownEffects,
    defined_in,
    register_method_rule,
)

_CHANGE = KnownEffects(reads=("self",), writes=("self",))
_METHODS: dict[str, KnownEffects] = {
    # the first call makes the scale's tensor
    "scale": KnownEffects(reads=("self", "arg0"), writes=("self",), alias=("arg0",)),
    "unscale_": KnownEffects(
        reads=("self", "arg0", "arg0#grads"), writes=("self", "arg0#grads"), kind="optimizer"
    ),
    "step": KnownEffects(
        reads=("self", "arg0", "arg0#params", "arg0#grads"),
        writes=("self", "arg0", "arg0#params", "arg0#grads"),
        kind="optimizer",
        host_read=True,
    ),
    "update": _CHANGE,
    "get_scale": KnownEffects(reads=("self",), host_read=True),
    "is_enabled": KnownEffects(reads=("self",)),
    "state_dict": KnownEffects(reads=("self",), alias=("self",)),
    "load_state_dict": KnownEffects(reads=("arg0",), writes=("self",)),
}


def _scaler_method(owner: type, name: str, function: Any, call: CallShape) -> Answer:
    if not issubclass(owner, torch.amp.GradScaler) or not defined_in(function, ("torch",)):
        return None
    if name == "step" and (len(call.positional) != 1 or call.keywords):
        return None  # a closure is the user's code
    return _METHODS.get(name)


def register() -> None:
    """Enter this table."""
    register_method_rule(_scaler_method)
