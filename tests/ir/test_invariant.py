"""The part of a graph that hangs on some inputs alone, cut off: both together do what it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from rose_compiler.ir import facts
from rose_compiler.ir.checks import check_deviations
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.invariant import Parts, cut, makes_anew
from rose_compiler.ir.program import placeholders
from rose_compiler.ir.slice import draws_random

fx.wrap("check_deviations")


def both(fn: Any, fixed: set[str], *args: Tensor) -> Parts:
    """Cut, run the parts one after the other and compare with the whole."""
    gm = fx.symbolic_trace(fn)
    parts = cut(gm, fixed)
    assert parts is not None
    values: dict[str, Any] = {p.name: a for p, a in zip(placeholders(gm.graph), args, strict=True)}
    torch.manual_seed(0)
    expected = gm.forward(*args)
    torch.manual_seed(0)
    made = parts.fixed.forward(*(values[n] for n in parts.fixed_inputs))
    values |= dict(zip([n.name for n in parts.passed], made, strict=True))
    found = parts.rest.forward(*(values[n] for n in parts.rest_inputs))
    pairs = (
        [(expected, found)] if isinstance(expected, Tensor) else zip(expected, found, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    return parts


def encoded(x: Tensor, prompt: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(F.linear(prompt, w))
    mean = F.linear(hidden, w).flatten(1)
    return F.linear(x + mean, v), mean.sum(1)


ARGS = (torch.randn(4, 3), torch.randn(4, 3), torch.randn(3, 3), torch.randn(2, 3))


def test_what_hangs_on_the_fixed_inputs_comes_apart() -> None:
    parts = both(encoded, {"prompt", "w", "v"}, *ARGS)
    assert parts.fixed_inputs == ("prompt", "w")
    # the view is made again, and so is the result of the whole graph
    assert [n.name for n in parts.passed] == ["linear_1"]
    assert parts.rest_inputs == ("x", "v", "linear_1")
    assert parts.calls == 3


def test_weights_alone_leave_what_the_prompt_makes() -> None:
    assert cut(fx.symbolic_trace(encoded), {"w", "v"}) is None


def test_a_result_is_made_anew_by_each_call() -> None:
    def handed_out(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = torch.tanh(y)
        b = torch.exp(a)
        return x + torch.cos(b), b, b[0], a.view(-1), F.dropout(a * 2, 0.5, False)

    parts = both(handed_out, {"y"}, torch.randn(4, 3), torch.randn(4, 3))
    # `b` and `a` lie in results; what dropout does nothing to is one
    assert [n.name for n in parts.passed] == ["cos"]


def test_results_of_two_calls_share_no_memory() -> None:
    def act(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        b = torch.exp(torch.tanh(y))
        return x + b, b[1:]

    gm = fx.symbolic_trace(act)
    parts = cut(gm, {"y"})
    assert parts is not None
    x, y = torch.randn(4), torch.randn(4)
    values = {"x": x, "y": y}
    made = parts.fixed.forward(*(values[n] for n in parts.fixed_inputs))
    values |= dict(zip([n.name for n in parts.passed], made, strict=True))
    first, second = (parts.rest.forward(*(values[n] for n in parts.rest_inputs)) for _ in range(2))
    kept = second[1].clone()
    first[1].zero_()
    assert torch.equal(second[1], kept)


def test_draws_and_checks_stay() -> None:
    def act(x: Tensor, y: Tensor) -> Tensor:
        std = torch.exp(torch.tanh(y))
        check_deviations(std)
        return x + torch.normal(torch.zeros(4, 3), std)

    parts = both(act, {"y"}, torch.randn(4, 3), torch.randn(4, 3))
    assert [n.name for n in parts.passed] == ["exp"]
    assert not any(draws_random(n) for n in parts.fixed.graph.nodes)
    assert "check_deviations(exp)" in parts.rest.code


def test_what_is_written_in_place_stays() -> None:
    def act(x: Tensor, y: Tensor) -> Tensor:
        a = torch.tanh(y)
        a.mul_(2)
        return x + a

    assert cut(fx.symbolic_trace(act), {"y"}) is None


def test_one_result_of_several_is_passed() -> None:
    def act(x: Tensor, y: Tensor) -> Tensor:
        return x + torch.sort(y)[0]

    gm = fx.symbolic_trace(act)
    for node in gm.graph.nodes:
        one = Spec("tensor", "Tensor", (4,), "float32")
        facts.put(node, spec=Spec("tuple", items=(one, one)) if node.name == "sort" else one)
    parts = cut(gm, {"y"})
    assert parts is not None
    assert [n.name for n in parts.passed] == ["getitem"]


@pytest.mark.parametrize(
    ("fn", "anew"),
    [
        (lambda x: torch.exp(x), True),
        (lambda x: x + 1, True),
        (lambda x: F.linear(x, x), True),
        (lambda x: torch.positive(x), False),
        (lambda x: x.to(torch.float32), False),
        (lambda x: x.contiguous(), False),
        (lambda x: F.dropout(x, 0.5, False), False),
        (lambda x: torch.einsum("ij->ji", x), False),
        (lambda x: x.reshape(2, 2), False),
        (lambda x: torch.broadcast_tensors(x, x), False),
    ],
)
def test_which_calls_make_their_result_anew(fn: Any, anew: bool) -> None:
    gm = fx.symbolic_trace(fn)
    last = [n for n in gm.graph.nodes if n.op.startswith("call_")][-1]
    assert makes_anew(last) is anew
    x = torch.randn(2, 2)
    found = gm.forward(x)
    for one in found if isinstance(found, tuple | list) else (found,):
        shared = one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert not (anew and shared)
