"""More operations of generated programs: gradients, a numpy generator, and effects at random.

Parameters and what they are multiplied with are whole numbers, so that gradients add up exactly in
any order; what a wrong order changes is which parameters and gradients an operation saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rose_compiler.ir.ops import Op, Signature

_MODULUS = 1009
_MOST = 5


class Net:
    """Two parameters with gradients."""

    def __init__(self) -> None:
        self.w = torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=torch.float64, requires_grad=True)
        self.b = torch.tensor([2.0, 0.0, 1.0, -2.0], dtype=torch.float64, requires_grad=True)

    @property
    def parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.w, self.b


def _op(
    reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), results: int = 1, calls: str = ""
) -> Callable[[Callable[..., Any]], Op]:
    def register(function: Callable[..., Any]) -> Op:
        code = function.__code__
        name = function.__name__.strip("_")
        names = code.co_varnames[: code.co_argcount]
        return Op(
            Signature(name, names, reads, writes, results=results, may_raise=False),
            function,
            attributes={"calls": frozenset({calls})} if calls else {},
        )

    return register


@_op(reads=("net.w", "net.b"))
def forward(x: torch.Tensor, net: Net) -> torch.Tensor:
    """A loss. Its graph has saved the parameters themselves: backward reads them once more."""
    whole = torch.nan_to_num(x.detach()).round().fmod(_MOST)
    return (net.w * net.w * whole + net.w * net.b).sum()


@_op(reads=("net.w", "net.b", "net.grads"), writes=("net.grads",), results=0, calls="backward")
def backward(loss: torch.Tensor, net: Net) -> None:
    if loss.requires_grad:
        loss.backward()


@_op(reads=("net.w", "net.b", "net.grads"), writes=("net.w", "net.b"), results=0, calls="optimizer")
def update(net: Net) -> None:
    """In place and behind autograd's back, as optimizers do: who reads too late is not told."""
    for parameter in net.parameters:
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad).fmod_(_MOST)


@_op(writes=("net.grads",), results=0)
def zero(net: Net) -> None:
    for parameter in net.parameters:
        parameter.grad = None


@_op(reads=("net.grads",))
def gradient(net: Net) -> int:
    found = [p.grad for p in net.parameters if p.grad is not None]
    return int(sum(g.abs().sum().item() for g in found)) % _MODULUS


@_op(reads=("net.w", "net.b"))
def weight(net: Net) -> int:
    return int(sum(p.abs().sum().item() for p in net.parameters)) % _MODULUS


@_op(reads=("chance",), writes=("chance",))
def throw(chance: np.random.Generator) -> int:
    return int(chance.integers(_MODULUS))


#: Operations whose effects stand in their signatures.
STATE_OPS = {op.name: op for op in (forward, backward, update, zero, gradient, weight, throw)}


# Operations whose effects are drawn.


def _see_cells(cells: list[int]) -> int:
    return sum((i + 1) * v for i, v in enumerate(cells))


def _see_grid(grid: torch.Tensor) -> int:
    return int(grid.nan_to_num().sum().item())


def _see_last(table: dict[str, int]) -> int:
    return table["last"]


def _see_weight(net: Net) -> int:
    return int(net.w.detach().abs().sum().item())


def _see_chance(chance: np.random.Generator) -> int:
    return int(chance.integers(7))


def _set_cells(cells: list[int], value: int) -> None:
    cells[value % len(cells)] = value


def _set_grid(grid: torch.Tensor, value: int) -> None:
    grid[value % len(grid)] = value


def _set_last(table: dict[str, int], value: int) -> None:
    table["last"] = value


def _set_weight(net: Net, value: int) -> None:
    net.w.data[value % len(net.w)] = value % _MOST


def _see_global(unused: None) -> int:
    return int(torch.randint(7, ()))


Access = tuple[str, str, Callable[[Any], int] | None, Callable[[Any, int], None] | None]
#: What such an operation may touch: its root (none for a global), entry, and how it does.
ACCESSES: tuple[Access, ...] = (
    ("cells", "cells", _see_cells, _set_cells),
    ("grid", "grid", _see_grid, _set_grid),
    ("table", "table.last", _see_last, _set_last),
    ("net", "net.w", _see_weight, _set_weight),
    # to draw is to read and to write
    ("chance", "chance", _see_chance, None),
    ("", "rng:torch", _see_global, None),
)


def strange(name: str, reads: Sequence[Access], writes: Sequence[Access]) -> Op:
    """An operation on a number and the roots of these accesses."""
    both = [*reads, *writes]
    roots = [root for root in dict.fromkeys(a[0] for a in both) if root]
    draws = tuple(a[1] for a in reads if a[3] is None)
    signature = Signature(
        name,
        ("a", *roots),
        tuple(dict.fromkeys(a[1] for a in reads)),
        tuple(dict.fromkeys((*(a[1] for a in writes), *draws))),
        may_raise=False,
    )

    def run(a: int, *objects: Any) -> int:
        given = dict(zip(roots, objects, strict=True))
        value = a
        for root, _, see, _ in reads:
            assert see is not None
            value = (value * 31 + see(given.get(root))) % _MODULUS
        for root, _, _, write in writes:
            assert write is not None
            write(given[root], value)
        return value

    return Op(signature, run)
