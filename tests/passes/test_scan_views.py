"""Rows that are views, and tensors that others see: a scan computes what the loop does, or stays
one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rose_compiler
from rose_compiler.base.decision import Decision

T = 12


def picked_before(buf: Any, k: Any, value: Tensor) -> Any:
    """``old`` is a view of the row that is stored to before it is used."""
    total = value
    for t in range(T):
        old = buf.out[t]
        buf.out[t] = old * k.g + buf.r[t]
        total = total * k.g + old
    return total


def picked_as_float(buf: Any, k: Any, value: Tensor) -> Any:
    """``float`` of single precision is the tensor itself."""
    total = value
    for t in range(T):
        old = buf.out[t].float()
        buf.out[t] = old * k.g + buf.r[t]
        total = total * k.g + old
    return total


def changed_as_float(buf: Any, k: Any, value: Tensor) -> Any:
    total = value.clone()
    for t in range(T):
        before = total.float()
        total += buf.r[t]
        buf.out[t] = before * k.g
    return total


def used_before(buf: Any, k: Any, value: Tensor) -> Any:
    """Nothing asks for the row once it is stored to."""
    total = value
    for t in range(T):
        old = buf.out[t]
        total = total * k.g + old
        buf.out[t] = total - old
    return total


def picked_after(buf: Any, k: Any, value: Tensor) -> Any:
    """A row that is picked after a store is not the tensor that was stored."""
    total = value.clone()
    for t in range(T):
        total += buf.r[t]
        buf.out[t] = total
        total = buf.out[t]
        total *= k.g
    return total


def stored_row(buf: Any, k: Any, value: Tensor) -> Any:
    """What is handed on is a row of the buffer, in the end too."""
    last = value
    for t in range(T):
        buf.out[t] = last * k.g + buf.r[t]
        last = buf.out[t]
    return last


def row_before(buf: Any, k: Any, value: Tensor) -> Any:
    """What is handed on is the row that the trip before has stored."""
    last = value
    for t in range(1, T):
        last = buf.out[t - 1]
        buf.out[t] = last * k.g + buf.r[t]
    return last


def float_row(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    last = value
    for t in range(T):
        total = total * k.g + last
        buf.out[t] = total
        last = buf.r[t].float()
    return total, last


def two_names(buf: Any, k: Any, value: Tensor) -> Any:
    total, same = value, value
    for t in range(T):
        total = total * k.g + buf.r[t]
        same = total
        buf.out[t] = total
    total += 1
    return total, same


def products(buf: Any, k: Any, value: Tensor) -> Any:
    """Each product with a tensor of ones is rounded to single precision."""
    total = value
    for t in range(T):
        total = buf.r[t] + torch.ones_like(value) * k.g * k.l * total
        buf.out[t] = total
    return total


def over_zero(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    for t in range(T):
        total = torch.where(buf.m[t], 1.0 / torch.zeros_like(total), total * k.g + buf.r[t])
        buf.out[t] = total
    return total


def over_small(buf: Any, k: Any, value: Tensor) -> Any:
    """Zero over a number below the least normal one is zero; its reciprocal is infinite."""
    total = value
    for t in range(T):
        total = total * k.g + torch.zeros_like(buf.r[t]) / (buf.r[t] * 1e-40)
        buf.out[t] = total
    return total


def filled_in_place(buf: Any, k: Any, value: Tensor) -> Any:
    total = value
    for t in range(T):
        zeros = torch.zeros_like(total)
        same = zeros
        zeros += buf.r[t]
        total = total * k.g + same
        buf.out[t] = total
    return total


def wider(buf: Any, k: Any, value: Tensor) -> Any:
    """Zeros of more axes make a result of more axes."""
    total = value
    for t in range(T):
        row = total * k.g + torch.zeros_like(k.wide)
        buf.out[t] = row[0]
        total = buf.r[t] * total
    return total


def filled(buf: Any, k: Any, value: Tensor) -> Any:
    """Beside what they are like, tensors of zeros and ones are as good as numbers."""
    total = value
    for t in range(T):
        total = total * k.g + buf.r[t] * torch.ones_like(buf.r[t])
        total = torch.where(buf.m[t], torch.zeros_like(total), total / torch.ones_like(total))
        buf.out[t] = total
    return total


def world(seed: int, n: int = 5) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(seed)
    buf = SimpleNamespace(**{name: torch.randn(T, n, generator=g) for name in ("r", "v", "out")})
    buf.m = torch.randn(T, n, generator=g) > 0.5
    return buf, SimpleNamespace(g=0.9, l=0.95, wide=torch.ones(3, n)), torch.randn(n, generator=g)


@pytest.fixture
def run(tmp_path) -> Any:
    """Compiles a function."""
    Decision().save(tmp_path / "decision.json")
    made: list[Any] = []

    def compiled(fn: Any) -> Any:
        made.append(rose_compiler.compile(fn, numerics="bitwise", tune=tmp_path / "decision.json"))
        return made[-1]

    yield compiled
    for one in made:
        one.close()


def bits(found: Any) -> Any:
    array = found.detach().numpy() if isinstance(found, Tensor) else np.asarray(found)
    return array.tobytes()


def check(fn: Any, fast: Any, world: Any = world) -> None:
    """Results, buffers and the value have the bits of the loop's, also once a buffer has changed
    that results may lie in."""
    for seed in range(3):
        given, again = world(seed), world(seed)
        pairs = []
        for call, args in ((fn, given), (fast, again)):
            results = call(*args)
            seen = results if isinstance(results, tuple) else (results,)
            first = [bits(x) for x in (*seen, args[0].out, args[0].r, args[2])]
            args[0].out += 1
            args[0].r += 1
            pairs.append((first, [bits(x) for x in seen]))
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    ("fn", "scanned"),
    [
        (picked_before, False),
        (picked_as_float, False),
        (changed_as_float, False),
        (used_before, True),
        (picked_after, False),
        (stored_row, False),
        (row_before, False),
        (float_row, False),
        (two_names, False),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rows_that_are_views(fn: Any, scanned: bool, run: Any) -> None:
    fast = run(fn)
    check(fn, fast)
    assert ("scan [scan]" in fast.explain()) is scanned, fast.explain()


@pytest.mark.parametrize(
    ("fn", "scanned"),
    [
        (products, False),
        (over_zero, False),
        (over_small, False),
        (filled_in_place, False),
        (wider, False),
        (filled, True),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_tensors_of_zeros_and_ones(fn: Any, scanned: bool, run: Any) -> None:
    fast = run(fn)
    check(fn, fast)
    assert ("scan [scan]" in fast.explain()) is scanned, fast.explain()
