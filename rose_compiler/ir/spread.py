"""What is the same for all rows of a batch, beside a batch: as many copies as that has rows."""

from __future__ import annotations

from typing import Any

import torch

from rose_compiler.ir import functions


def spread(value: torch.Tensor, axis: int, like: torch.Tensor, like_axis: int) -> torch.Tensor:
    """``value``, of size 1 along ``axis``, as often as ``like`` is long along ``like_axis``."""
    sizes: list[Any] = [-1] * value.dim()
    sizes[axis] = like.shape[like_axis]
    return value.expand(sizes)


functions.register("rose_compiler.rows.spread", spread)
