"""The cross-check of a traced graph: planted faults must be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.crosscheck import crosscheck, vary
from rose_compiler.ir.facts import Context


def check(
    fn: Callable[..., Any],
    graph: Callable[..., Any],
    *args: Any,
    contexts: tuple[Context, ...] = (),
) -> Blocker | None:
    return crosscheck(fn, args, fx.symbolic_trace(graph), list(range(len(args))), [], contexts)


def found(code: str, blocker: Blocker | None) -> str:
    assert blocker is not None
    assert blocker.code == code, blocker
    return blocker.why


def test_equal() -> None:
    assert check(lambda x: x * 2 + 1, lambda x: x * 2 + 1, torch.randn(3)) is None


def test_one_bit() -> None:
    x = torch.randn(100)
    found("probe-values-differ", check(lambda x: x / 3, lambda x: x * (1 / 3), x))


def test_equal_on_the_examples_alone() -> None:
    why = found("probe-values-differ", check(lambda x: x.abs(), lambda x: x * 1, torch.ones(3)))
    assert "other inputs" in why


def test_number_that_is_fixed() -> None:
    args = torch.randn(3), 0.5
    found("not-traceable", check(lambda x, g: x * g, lambda x, g: x * 0.5, *args))


def test_whole_number_that_is_fixed() -> None:
    args = torch.randn(4, 3), 1
    found("not-traceable", check(lambda x, k: x[k], lambda x, k: x[1], *args))


def test_other_draws() -> None:
    def drawing(x: Tensor) -> Tensor:
        torch.rand(3)
        return x + 1

    why = found("probe-values-differ", check(drawing, lambda x: x + 1, torch.randn(3)))
    assert "random numbers" in why


def test_gradients() -> None:
    weight = nn.Parameter(torch.ones(3))

    def fn(x: Tensor) -> Tensor:
        return (x * weight) * weight

    def detached(x: Tensor, weight: Tensor) -> Tensor:
        return (x * weight) * weight.detach()

    blocker = crosscheck(
        fn, [torch.randn(3)], fx.symbolic_trace(detached), [0, "weight"], [weight], ()
    )
    assert "gradients" in found("probe-values-differ", blocker)


def test_gradient_flag() -> None:
    weight = nn.Parameter(torch.ones(3))

    def detached(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.detach()

    blocker = crosscheck(
        lambda x: x * weight,
        [torch.randn(3)],
        fx.symbolic_trace(detached),
        [0, "weight"],
        [weight],
        (),
    )
    assert "requires_grad" in found("probe-values-differ", blocker)


def test_graph_that_raises() -> None:
    blocker = check(lambda x: x + 1, lambda x: x.reshape(7), torch.randn(3))
    assert "raises" in found("probe-values-differ", blocker)


def test_function_that_raises_on_anything_else() -> None:
    def picky(x: Tensor) -> Tensor:
        if not torch.equal(x, torch.tensor([1.0, 2.0])):
            raise ValueError
        return x + 1

    blocker = check(picky, lambda x: x + 1, torch.tensor([1.0, 2.0]))
    assert "every other input" in found("not-traceable", blocker)


def test_made_up_values_keep_types_and_ranges() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(50)
    for wide in (True, False):
        other = vary(x, generator, wide)
        assert other.shape == x.shape
        assert not torch.equal(other, x)
    assert ((vary(x, generator, False) >= 0) & (vary(x, generator, False) <= 1)).all()
    whole = torch.arange(10)
    assert sorted(vary(whole, generator, True).tolist()) == list(range(10))
    assert vary(torch.ones(4, 3).t(), generator, True).stride() == (1, 3)
    assert vary(torch.ones(2, requires_grad=True), generator, True).requires_grad
    assert vary((1, {"a": torch.ones(2)}), generator, True)[0] == 1
