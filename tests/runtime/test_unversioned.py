"""Views with versions of their own: nothing else of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

from rose_compiler.ir import contexts
from rose_compiler.runtime import modes


def cubes(x: Tensor) -> Tensor:
    return (x[:, :2] ** 3).sum() + (x.chunk(2, -1)[1] ** 2).sum()


def directional(x: Tensor) -> Tensor:
    return jvp(cubes, (x,), (torch.ones_like(x),))[1]


def dual(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        made = cubes(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(made).tangent


def rows(x: Tensor) -> Tensor:
    return vmap(lambda row: (row[1:] ** 2).sum())(x)


CASES: list[Callable[[Tensor], Any]] = [directional, dual, rows, grad(cubes), grad(directional)]


@pytest.mark.parametrize("mode", [contexts.Unversioned, modes.Unversioned])
def test_derivatives_go_through_views(mode: Any) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    for case in CASES:
        expected = case(x)
        with mode():
            assert torch.equal(case(x), expected)
