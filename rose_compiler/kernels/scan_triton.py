"""``x[t] = a[t] * x[t - 1] + b[t]`` for all columns: one Triton kernel, or a loop over rows.

Triton is imported when the first kernel is asked for, and not needed otherwise.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch

#: Columns that one program walks through; few, so that small batches fill a device too.
BLOCK = 128

tl: Any = None  # triton.language, which the kernel finds among the module's globals


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def _kernel() -> Any:
    global tl
    import triton
    import triton.language

    tl = triton.language

    @triton.jit
    def scan(
        a: Any,
        b: Any,
        reset: Any,
        first: Any,
        out: Any,
        trips: Any,
        size: Any,
        RESET: tl.constexpr,
        REVERSE: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        inside = column < size
        x = tl.load(first + column, mask=inside, other=0.0)
        for k in range(trips):
            t = k
            if REVERSE:
                t = trips - 1 - k
            at = column + (column * 0 + t) * size  # in 64 bits
            added = tl.load(b + at, mask=inside, other=0.0)
            following = tl.load(a + at, mask=inside, other=0.0) * x + added
            if RESET:
                # a chosen arm of `where` takes nothing from x, not even an infinity
                cut = tl.load(reset + at, mask=inside, other=0) != 0
                following = tl.where(cut, added, following)
            x = following
            tl.store(out + at, x, mask=inside)

    return scan


def linear(
    a: torch.Tensor,
    b: torch.Tensor,
    first: torch.Tensor,
    *,
    reset: torch.Tensor | None = None,
    reverse: bool = False,
) -> torch.Tensor:
    """The linear recurrence by the kernel.

    ``a`` and ``b`` are of shape (trips, size), ``first`` (the value before the first trip) of shape
    (size,), all of one floating type on one device. Where ``reset``, of booleans, holds, a value is
    ``b`` alone. ``reverse`` walks from the last row to the first. Returns shape (trips, size).
    """
    trips, size = b.shape
    a, b, first = a.contiguous(), b.contiguous(), first.contiguous()
    cut = b if reset is None else reset.contiguous().view(torch.uint8)
    out = torch.empty_like(b)
    grid = (-(-size // BLOCK),)
    _kernel()[grid](a, b, cut, first, out, trips, size, reset is not None, reverse, BLOCK)
    return out


def linear_by_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    first: torch.Tensor,
    *,
    reset: torch.Tensor | None = None,
    reverse: bool = False,
) -> torch.Tensor:
    """What :func:`linear` computes, by torch row by row; the reference, and for where there is no
    Triton."""
    out = torch.empty_like(b)
    x = first
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        x = a[t] * x + b[t]
        if reset is not None:
            x = torch.where(reset[t], b[t], x)
        out[t] = x
    return out
