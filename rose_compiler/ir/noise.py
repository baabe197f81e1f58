"""Random draws as functions, for graphs: new tensors filled from torch's default generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rose_compiler.ir import functions


def normal(
    shape: Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Normal numbers, as ``Tensor.normal_`` makes them."""
    return torch.empty(tuple(shape), dtype=dtype, device=device).normal_(mean, std)


def uniform(
    shape: Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Numbers uniform on [low, high), as ``Tensor.uniform_`` makes them."""
    return torch.empty(tuple(shape), dtype=dtype, device=device).uniform_(low, high)


def exponential(
    shape: Sequence[int],
    rate: float = 1.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Exponential numbers of this rate, as ``Tensor.exponential_`` makes them."""
    return torch.empty(tuple(shape), dtype=dtype, device=device).exponential_(rate)


for _draw in (normal, uniform, exponential):
    functions.register(f"rose_compiler.noise.{_draw.__name__}", _draw)
