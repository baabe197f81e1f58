"""A loss and its gradients as one compiled function: the same numbers, or torch's own work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from rose_compiler.ir.checks import check_valid
from rose_compiler.runtime import gradients, inductor
from rose_compiler.runtime.gradients import Gradients
from rose_compiler.runtime.inductor import Note


def forward(x: Any, y: Any, weight: Any, bias: Any) -> Any:
    h = F.linear(x, weight, bias)
    check_valid(torch._is_all_true(h == h), "{type}: {value}", h)
    error = (torch.tanh(h) - y).pow(2)
    return error.mean(), error.max()


def twins(a: Any, b: Any) -> Any:
    """Both leaves get one and the same gradient."""
    return ((a + b).sum(),)


def scaled(x: Any, coefficient: Any, weight: Any) -> Any:
    return ((x @ weight).sum() * coefficient,)


def clamped(x: Any, bound: Any, weight: Any) -> Any:
    return ((x @ torch.clamp(weight, -bound, 0.7)).sum() * bound,)


def arguments(rows: int = 5) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(rows, 3, generator=generator) for _ in range(2))
    weight = nn.Parameter(torch.randn(3, 3, generator=generator))
    return x, y, weight, nn.Parameter(torch.zeros(3))


def doubled(parameter: Any) -> None:
    parameter.grad = 2 * parameter.grad


def by_engine(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    loss, *others = function(*args)
    loss.backward()
    return tuple(o.detach() for o in others)


@pytest.fixture
def notes() -> list[Note]:
    return []


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graph of forward and backward runs as it is: what Inductor is given."""
    built: list[Any] = []

    def as_it_is(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            built.append(inductor.make_fx(function)(*given))
        return built[-1]

    monkeypatch.setattr(gradients, "_built", as_it_is)
    return built


def test_results_and_gradients_are_those_of_the_engine(uncompiled: Any, notes: Any) -> None:
    ours, theirs = arguments(), arguments()
    got = Gradients(forward)(ours, notes.append)
    (expected,) = by_engine(forward, theirs)
    assert torch.equal(got, expected)
    assert not got.requires_grad
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[2:], theirs[2:], strict=True))
    assert ours[0].grad is None
    assert len(uncompiled) == 1
    assert [n.why for n in notes] == [""]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_what_inductor_makes_agrees(notes: Any) -> None:
    ours, theirs = arguments(), arguments()
    loss = Gradients(forward)
    refused = counters["inductor"]["fxgraph_cache_bypass"]
    got = loss(ours, notes.append)
    (expected,) = by_engine(forward, theirs)
    assert [n.why for n in notes] == [""]
    assert "us a call instead of" in notes[0].gain
    # a later run takes it from the disk
    assert counters["inductor"]["fxgraph_cache_bypass"] == refused
    assert len(loss.makes.found) == 1
    torch.testing.assert_close(got, expected)
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_gradients_add_up_in_the_tensor_that_is_there(uncompiled: Any, notes: Any) -> None:
    args = arguments()
    loss = Gradients(forward)
    loss(args, notes.append)
    held = args[2].grad
    once = held.clone()
    loss(args, notes.append)
    assert args[2].grad is held
    torch.testing.assert_close(held, 2 * once)


def test_a_gradient_is_nobody_elses_memory(uncompiled: Any, notes: Any) -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    Gradients(twins)((a, b), notes.append)
    assert notes[0].why == ""
    a.grad.mul_(0)
    assert b.grad.tolist() == [1.0, 1.0, 1.0]


def test_values_that_a_check_refuses_raise_what_it_raises(uncompiled: Any, notes: Any) -> None:
    x, y, weight, bias = arguments()
    loss = Gradients(forward)
    loss((x, y, weight, bias), notes.append)
    weight.grad = bias.grad = None
    x[0] = float("nan")
    with pytest.raises(ValueError, match="Tensor: tensor"):
        loss((x, y, weight, bias), notes.append)
    assert weight.grad is None


@pytest.mark.parametrize(
    "change",
    [
        lambda args: args[2].register_hook(lambda g: 2 * g),
        lambda args: args[2].register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", 2 * p.grad)
        ),
        lambda args: args[3].requires_grad_(False),
    ],
    ids=["hook", "hook after", "frozen"],
)
def test_what_changes_between_calls_has_its_effect(
    uncompiled: Any, notes: Any, change: Callable[[Any], Any]
) -> None:
    ours, theirs = arguments(), arguments()
    loss = Gradients(forward)
    loss(ours, notes.append)
    for args in (ours, theirs):
        change(args)
        for leaf in args[2:]:
            leaf.grad = None
    loss(ours, notes.append)
    by_engine(forward, theirs)
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_each_make_of_arguments_is_compiled_once_and_only_so_many(
    uncompiled: Any, notes: Any
) -> None:
    loss = Gradients(forward)
    for rows in (5, 3, 5, 3):
        ours, theirs = arguments(rows), arguments(rows)
        assert torch.equal(loss(ours, notes.append), by_engine(forward, theirs)[0])
    assert len(uncompiled) == 2
    for rows in range(6, 12):
        ours, theirs = arguments(rows), arguments(rows)
        assert torch.equal(loss(ours, notes.append), by_engine(forward, theirs)[0])
        assert torch.equal(ours[2].grad, theirs[2].grad)
    assert len(uncompiled) == inductor.MAX_MAKES


@pytest.mark.parametrize(
    ("function", "coefficients", "compiled"),
    [
        (scaled, (1.0, 2.0, 0.5), 1),  # a schedule's number is an input
        (scaled, (1, 2, 3), 1),  # a counter's is fixed, and every other one not compiled
        (clamped, (1.0, 2.0, 0.5), 1),  # torch wants numbers here
        (scaled, (1.0, True, 2), 1),
    ],
)
def test_numbers(
    uncompiled: Any, notes: Any, function: Any, coefficients: Any, compiled: int
) -> None:
    x, weight = torch.ones(2, 3), nn.Parameter(torch.ones(3))
    loss = Gradients(function)
    for coefficient in coefficients:
        weight.grad = None
        loss((x, coefficient, weight), notes.append)
        ours = weight.grad
        weight.grad = None
        by_engine(function, (x, coefficient, weight))
        assert torch.equal(ours, weight.grad)
    assert len(loss.makes.found) == compiled


def test_modes_that_watch_or_change_torch_get_its_own_operations(
    uncompiled: Any, notes: Any
) -> None:
    args = arguments()
    loss = Gradients(forward)
    with torch.autograd.set_detect_anomaly(True):
        loss(args, notes.append)
    with torch.autocast("cpu", torch.bfloat16):
        loss(args, notes.append)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        loss(args, notes.append)
    assert uncompiled == []


def test_what_differs_by_more_than_rounding_is_not_used(
    monkeypatch: pytest.MonkeyPatch, notes: Any
) -> None:
    def wrong(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            graph = inductor.make_fx(function)(*given)
        return lambda *args: [a if a.dtype == torch.bool else a * 1.0001 for a in graph(*args)]

    monkeypatch.setattr(gradients, "_built", wrong)
    ours, theirs = arguments(), arguments()
    loss = Gradients(forward)
    assert torch.equal(loss(ours, notes.append), by_engine(forward, theirs)[0])
    assert torch.equal(ours[2].grad, theirs[2].grad)
    assert "more than rounding does" in notes[0].why
    loss(ours, notes.append)
    assert len(notes) == 1  # it is not tried again


def test_cancellation_is_no_difference(monkeypatch: pytest.MonkeyPatch, notes: Any) -> None:
    """What is left of nearly equal numbers may be off by the rounding of those numbers."""

    def cancelling(x: Any, weight: Any) -> Any:
        total = (x @ weight).sum()
        return total, total - (x.sum(0) * weight).sum()

    def rounded_otherwise(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            graph = inductor.make_fx(function)(*given)

        def run(*args: Tensor) -> list[Tensor]:
            valid, other, *rest = graph(*args)
            return [valid, other + 1e-5, *rest]

        return run

    monkeypatch.setattr(gradients, "_built", rounded_otherwise)
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) * 100
    loss = Gradients(cancelling)
    loss((x, nn.Parameter(torch.ones(8))), notes.append)
    assert [n.why for n in notes] == [""]


def test_code_emitted_anew_finds_what_was_compiled() -> None:
    source = "def loss(x):\n    return (x.sum(),)\n"
    made = []
    for text in (source, "\n\n" + source, source.replace("sum", "mean")):
        scope: dict[str, Any] = {}
        exec(compile(text, "emitted", "exec"), scope)
        made.append(gradients.of(scope["loss"]))
    assert made[0] is made[1]
    assert made[0] is not made[2]


def test_functions_that_were_compiled_longest_ago_go(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[Any, Any] = {}
    monkeypatch.setattr(gradients, "_known_losses", known)
    monkeypatch.setattr(gradients, "MAX_FUNCTIONS", 3)
    functions = []
    for number in range(5):
        scope: dict[str, Any] = {}
        exec(f"def loss(x):\n    return (x.sum() * {number},)\n", scope)
        functions.append(scope["loss"])
    first = gradients.of(functions[0])
    for one in functions[1:]:
        gradients.of(one)
        assert gradients.of(functions[0]) is first, "used in between"
    assert len(known) == 3
