"""Calls that may raise for values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.raising import raising


def names(fn: Callable[..., Tensor], dtype: str = "float32") -> list[str]:
    gm = fx.symbolic_trace(fn)
    for node in gm.graph.nodes:
        facts.put(node, spec=Spec("tensor", "Tensor", (4, 4), dtype, "cpu"))
    return [n.name for n in raising(gm)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: F.embedding(x, y),
        lambda x, y: x.gather(0, y),
        lambda x, y: x[y],
        lambda x, y: x[:, y],
        lambda x, y: x.index_select(0, y),
        lambda x, y: torch.linalg.cholesky(x @ y),
        lambda x, y: F.binary_cross_entropy(x, y),
        lambda x, y: F.one_hot(x) + y,
        lambda x, y: F.cross_entropy(x, y),
    ],
)
def test_what_may_raise(fn: Callable[..., Tensor]) -> None:
    assert names(fn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: F.gelu(F.linear(x, y)) * 2 + x[:, 0] - x[None, 1:2],
        lambda x, y: torch.cat([x.to(torch.float64), y.expand_as(x)], 1).softmax(-1),
        lambda x, y: F.layer_norm(x / y, (4,)).transpose(0, 1).mean(1),
        lambda x, y: F.scaled_dot_product_attention(x, y, y).clamp(0, 1),
    ],
)
def test_what_types_and_shapes_decide(fn: Callable[..., Tensor]) -> None:
    assert not names(fn)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.fmod(x, y),
    ],
)
def test_integers_have_no_infinity(fn: Callable[..., Tensor]) -> None:
    assert names(fn, "int64")
    assert not names(fn, "float32")
