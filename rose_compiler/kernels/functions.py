"""The functions of recurrences, of numbers and of tensors alike."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "neg", "lt", "le", "gt", "ge", "eq", "ne"),
    *("and_", "or_", "invert"),
)
_TORCH = (
    *("where", "maximum", "minimum", "exp", "log", "sqrt", "sigmoid", "tanh", "clone", "detach"),
)

#: By name, as :data:`rose_compiler.base.recurrence.FUNCTIONS` lists them.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    **{name: getattr(torch, name) for name in _TORCH},
    "clamp_min": lambda x, least: torch.clamp(x, min=least),
    "clamp_max": lambda x, most: torch.clamp(x, max=most),
    "float": torch.Tensor.float,
}
