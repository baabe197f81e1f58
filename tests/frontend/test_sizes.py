"""Sizes that traced code reads: constants of a graph where they can't change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.trace import Traced, trace

X = torch.arange(12.0).reshape(4, 3)


def per_row(x: Tensor) -> Tensor:
    return x.pow(2).sum() / x.shape[0]


def by_size(x: Tensor) -> Tensor:
    return x + torch.zeros(x.size(0), 3) * x.size()[0]


def by_numel(x: Tensor) -> Tensor:
    return x.sum() / x.numel()


def unpacked(x: Tensor) -> Tensor:
    n, width = x.shape
    return x.reshape(n * width) * n


@pytest.mark.parametrize("fn", [per_row, by_size, by_numel, unpacked])
def test_a_graph_takes_sizes_that_vary_from_its_inputs(fn: Callable[..., Any]) -> None:
    for options in ({"vary": "rows"}, {"rows": True}):
        found = trace(fn, [X], lifted={}, **options)  # type: ignore[arg-type]
        assert isinstance(found, Traced)
        for rows in (1, 2, 3, 4):
            assert torch.equal(found.gm.forward(X[:rows]), fn(X[:rows]))
    plain = trace(fn, [X], lifted={})
    assert isinstance(plain, Traced)
    assert "size" not in str(plain.gm.code), "where they stay as they are, they cost nothing"


def compared(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 4 else x


def counted(x: Tensor) -> Tensor:
    return x.sum() / len(x)


def width(x: Tensor) -> Tensor:
    return x * 2 if x.shape[1] == 3 else x


def items(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


@pytest.mark.parametrize(
    ("fn", "value", "options"),
    [
        (compared, X, {"vary": "rows"}),
        (compared, X, {"rows": True}),
        (counted, X, {"vary": "rows"}),
        (width, X, {"vary": "all"}),
        (items, [X, X], {"rows": True}),
    ],
)
def test_what_fixes_a_size_that_varies_is_not_traced(
    fn: Callable[..., Any], value: Any, options: dict[str, Any]
) -> None:
    assert isinstance(trace(fn, [value], lifted={}), Traced)
    found = trace(fn, [value], lifted={}, **options)
    assert isinstance(found, Blocker)
    assert found.code in ("not-traceable", "host-read")
