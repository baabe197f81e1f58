"""Results that look as if they had a graph that was gone backward through."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class _Freed(torch.autograd.Function):
    """A graph that has been gone backward through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:
        ctx.mark_dirty(value)  # what is returned is no view, and may be written in place
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors "
            "after they have already been freed). Saved intermediate values of the graph are freed "
            "when you call .backward() or autograd.grad(). Specify retain_graph=True if you need "
            "to backward through the graph a second time or if you need to access saved tensors "
            "after calling backward."
        )


@functools.cache
def gone_through(name: str) -> Any:
    """The same, under the name of the node of the graph that it stands for: tensors print it."""
    made: Any = type("_Freed", (_Freed,), {})
    made._backward_cls.__name__ = name
    return made


def leaf() -> Tensor:
    """What such a graph ends in."""
    return torch.empty(0, requires_grad=True)
