"""How far results and gradients move when what they are computed from is rounded otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., Any]

_TRIALS = 3


def reference(
    forward: Forward, args: tuple[Any, ...], wanted: tuple[int, ...]
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """The loss, the further results, and the gradients, by torch's own operations."""
    copies = [a.detach() if isinstance(a, Tensor) else a for a in args]
    for k in wanted:
        copies[k].requires_grad_()
    loss, *others = forward(*copies)
    gradients = torch.autograd.grad(loss, [copies[k] for k in wanted], allow_unused=True)
    return loss, [o.detach() for o in others], list(gradients)


def moved(
    compute: Callable[[tuple[Any, ...]], list[Tensor]],
    args: tuple[Any, ...],
    expected: list[Tensor],
) -> list[float]:
    """How far each result of ``compute(args)`` moves when its arguments are rounded otherwise.

    A difference of nearly equal numbers (a KL divergence of two policies that hardly differ) keeps
    the rounding errors of its terms; no tolerance relative to its own size would hold for it.
    """
    generator = torch.Generator().manual_seed(0)
    found = [0.0] * len(expected)
    for _ in range(_TRIALS):
        others = tuple(
            _nudged(a, generator) if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in args
        )
        made = compute(others)
        found = [max(m, difference(a, b)) for m, a, b in zip(found, expected, made, strict=True)]
    return found


def rounding(
    forward: Forward, args: tuple[Any, ...], wanted: tuple[int, ...], expected: list[Tensor]
) -> list[float]:
    """The same of the further results and the gradients of a loss."""

    def compute(others: tuple[Any, ...]) -> list[Tensor]:
        _, results, gradients = reference(forward, others, wanted)
        return [*results, *(g for g in gradients if g is not None)]

    return moved(compute, args, expected)


def _nudged(value: Tensor, generator: torch.Generator) -> Tensor:
    """The neighbours of numbers, up or down at random."""
    up = torch.rand(value.shape, generator=generator, device="cpu").to(value.device) < 0.5
    ends = torch.tensor([-torch.inf, torch.inf], dtype=value.dtype, device=value.device)
    return torch.nextafter(value.detach(), torch.where(up, ends[1], ends[0]))


def difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference of two tensors; NaN where there is nothing to compare."""
    return float((a - b).abs().max()) if a.shape == b.shape and a.numel() else float("nan")
