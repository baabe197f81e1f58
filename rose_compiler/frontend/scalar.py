"""Values that are folded into a program."""

from __future__ import annotations

from typing import Any

import torch

SCALARS = (int, float, bool, str, bytes, type(None), complex)


def is_scalar(value: Any) -> bool:
    """Whether a value is folded into the program: a number, text, ``None``, dtype, device or a
    tuple of such."""
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return True
    if type(value) in SCALARS:
        return True
    return type(value) is tuple and all(is_scalar(v) for v in value)
