"""Splitting a graph by outputs: both halves together do what the whole did."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.checks import check_valid
from rose_compiler.ir.program import output_node, placeholders
from rose_compiler.ir.slice import Split, split_outputs


def graph_of(fn: Any) -> fx.GraphModule:
    return fx.symbolic_trace(fn)


def both(gm: fx.GraphModule, early: set[int], *args: Tensor, small: tuple[str, ...] = ()) -> Split:
    """Split, run the halves one after the other and compare with the whole."""
    split = split_outputs(gm, early, small=small)
    assert isinstance(split, Split), split
    values: dict[str, Tensor] = {
        p.name: a for p, a in zip(placeholders(gm.graph), args, strict=True)
    }
    torch.manual_seed(0)
    expected = gm.forward(*args)
    torch.manual_seed(0)
    outputs: Any = output_node(gm.graph).args[0]
    made = split.early.forward(*(values[n] for n in split.early_inputs))
    names = [*(outputs[i].name for i in split.early_outputs), *split.passed]
    values |= dict(zip(names, made, strict=True))
    rest = split.late.forward(*(values[n] for n in split.late_inputs))
    found = dict(zip(split.early_outputs, made, strict=False))
    found |= dict(zip(split.late_outputs, rest, strict=True))
    assert all(torch.equal(found[i], e) for i, e in enumerate(expected))
    return split


def policy(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.tanh(x @ w)
    action = torch.normal(hidden, hidden.abs() + 1)
    score = (action - hidden).pow(2).sum(1)
    return action, score, (x @ v).flatten()


def test_what_the_action_needs_comes_first() -> None:
    gm = graph_of(policy)
    split = both(gm, {0}, torch.randn(4, 3), torch.randn(3, 2), torch.randn(3, 1))
    assert split.early_inputs == ("x", "w")
    assert split.late_outputs == (1, 2)
    # the mean is passed, not computed again; the action is an output anyway
    assert split.passed == ("tanh",)
    assert "matmul" in split.late.code
    assert "tanh(" not in split.late.code
    assert "torch.normal(" not in split.late.code


def test_draws_stay_early() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + torch.rand_like(x)

    split = both(graph_of(fn), {0}, torch.ones(3))
    assert "rand_like" in split.early.code


def test_views_are_made_again() -> None:
    def fn(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        wide = s.expand_as(y)
        return y * wide, wide + y

    split = both(graph_of(fn), {0}, torch.ones(4, 3), torch.ones(1, 3))
    assert split.passed == ("exp",)
    assert split.late_inputs == ("s", "exp")


def test_checks_go_late() -> None:
    gm = graph_of(lambda x: (x + 1, x * 2))
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    with gm.graph.inserting_after(first):
        check = gm.graph.call_function(check_valid, (first, "no: {value}"))
    gm.recompile()
    split = split_outputs(gm, {0})
    assert isinstance(split, Split)
    assert check.name not in split.early.code
    assert "check_valid" in split.late.code


def test_an_output_of_both() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.exp()
        return y, y, y * 2

    split = both(graph_of(fn), {0}, torch.ones(3))
    assert split.passed == ()


def test_pinned_nodes_stay_early() -> None:
    gm = graph_of(lambda x: (x + 1, x * 2, x.exp()))
    split = split_outputs(gm, {0}, pinned=["mul"])
    assert isinstance(split, Split)
    assert "mul" in split.early.code
    assert split.passed == ("mul",)


def test_writes_are_refused() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y.add_(1)
        return y, x + 1

    found = split_outputs(graph_of(fn), {0})
    assert isinstance(found, Blocker)
    assert found.code == "not-pure"
    gm = graph_of(lambda x: (x + 1, x * 2))
    gm.graph.inserting_before(output_node(gm.graph)).__enter__()
    gm.graph.call_function(operator.setitem, (placeholders(gm.graph)[0], 0, 1.0))
    assert isinstance(split_outputs(gm, {0}), Blocker)


def test_nothing_left() -> None:
    gm = graph_of(lambda x: (x + 1, x * 2))
    assert isinstance(split_outputs(gm, {0, 1}), Blocker)


def test_a_single_value() -> None:
    assert isinstance(split_outputs(graph_of(lambda x: x + 1), {0}), Blocker)


def scaled(x: Tensor, w: Tensor, logstd: Tensor) -> tuple[Tensor, Tensor]:
    mean = x @ w
    std = torch.exp(logstd.expand_as(mean))
    action = torch.normal(mean, std)
    return action, -((action - mean) / std).pow(2).sum(1) - std.log().sum(1)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_scale_that_is_a_parameter_is_made_again(rows: int) -> None:
    gm = graph_of(scaled)
    args = torch.randn(rows, 3), torch.randn(3, 2), torch.randn(1, 2)
    split = both(gm, {0}, *args, small=("w", "logstd"))
    assert split.passed == ("matmul",)
    assert {"logstd", "matmul"} <= set(split.late_inputs)


def test_without_the_promise_the_scale_is_handed_over() -> None:
    gm = graph_of(scaled)
    args = torch.randn(4, 3), torch.randn(3, 2), torch.randn(1, 2)
    assert both(gm, {0}, *args).passed == ("matmul", "exp")


def test_sizes_that_are_not_handed_over_anyway_keep_a_scale_from_being_made_again() -> None:
    def fn(x: Tensor, w: Tensor, logstd: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ w
        std = torch.exp(logstd.expand_as(hidden))
        return hidden * std, std.log()

    args = torch.randn(4, 3), torch.randn(3, 2), torch.randn(1, 2)
    assert both(graph_of(fn), {0}, *args, small=("w", "logstd")).passed == ("exp",)
