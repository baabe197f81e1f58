"""A graph without gradients as one compiled function: the same numbers, or torch's own work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_compiler.ir.checks import check_valid
from rose_compiler.runtime import graphs, inductor
from rose_compiler.runtime.graphs import Graph
from rose_compiler.runtime.inductor import Note


def forward(x: Any, weight: Any, scale: Any) -> Any:
    h = torch.tanh(F.linear(x, weight))
    check_valid(torch._is_all_true(h == h), "{type}: {value}", h)
    return h * scale, h.sum(-1)


def single(x: Any, weight: Any, scale: Any) -> Any:
    return torch.tanh(x @ weight) * scale


def viewing(x: Any, weight: Any, scale: Any) -> Any:
    return x[:2], torch.tanh(x @ weight) * scale


def twice(x: Any, weight: Any, scale: Any) -> Any:
    h = torch.tanh(x @ weight) * scale
    return h, h.t()


def handing(x: Any, weight: Any, scale: Any) -> Any:
    h = torch.tanh(x @ weight) * scale
    return h, x, h


def passing(x: Any, y: Any) -> Any:
    return torch.tanh(x) * y, x, y


def writing(x: Any, weight: Any, scale: Any) -> Any:
    x.add_(1.0)
    return torch.tanh(x @ weight) * scale


def arguments(rows: int = 5) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, generator=generator)
    return x, nn.Parameter(torch.randn(3, 3, generator=generator)), 0.5


@pytest.fixture
def notes() -> list[Note]:
    return []


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graph runs as it is: what Inductor is given. It always pays."""
    made: list[Any] = []

    def as_it_is(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            made.append(inductor.make_fx(function)(*given))
        return made[-1]

    monkeypatch.setattr(graphs, "built", as_it_is)
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    return made


@pytest.mark.parametrize("function", [forward, single])
def test_results_are_those_of_torch(uncompiled: Any, notes: Any, function: Any) -> None:
    graph = Graph(function)
    for rows in (5, 5, 7):
        with torch.no_grad():
            expected = function(*arguments(rows))
            found = graph(arguments(rows), notes.append)
        assert type(found) is type(expected)
        for a, b in zip(
            *([x] if isinstance(x, Tensor) else x for x in (found, expected)), strict=True
        ):
            assert torch.equal(a, b)
            assert not a.requires_grad
    assert len(uncompiled) == 2, "one for each number of rows"
    assert [n.why for n in notes] == ["", ""]


def test_what_another_thread_compiles_or_uses_meanwhile_is_not_taken() -> None:
    """Functions of several threads share what one loss or graph is compiled to."""

    def compiler(_: Any, args: tuple[Any, ...], __: Any) -> Any:
        return SimpleNamespace(known=args, threads=torch.get_num_threads(), gain="")

    def fits(make: Any, args: tuple[Any, ...]) -> bool:
        looking = make.known == args
        if looking and other:
            makes.get(other.pop(), lambda _: None)
        return looking

    makes: Any = inductor.Makes(forward, compiler, inductor.INDUCTOR)
    other: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "_shapes", lambda known: known)
        patch.setattr(inductor, "fits", fits)
        assert makes.get((1,), lambda _: makes.get((2,), lambda _: None)).known == (1,)
        makes.get((2,), lambda _: None)
        other.append((1,))
        assert makes.get((1,), lambda _: None).known == (1,)
        other.append((2,))
        assert makes.get((1,), lambda _: None).known == (1,)
    assert sorted(make.known for make in makes.found) == [(1,), (2,)]


def test_results_are_new_memory_each_time(uncompiled: Any, notes: Any) -> None:
    graph = Graph(single)
    with torch.no_grad():
        first = graph(arguments(), notes.append)
        kept = first.clone()
        second = graph(arguments(), notes.append)
    second.zero_()
    assert torch.equal(first, kept)


@pytest.mark.parametrize("function", [viewing, twice])
def test_what_shares_memory_is_left_alone(uncompiled: Any, notes: Any, function: Any) -> None:
    args = arguments()
    with torch.no_grad():
        found = Graph(function)(args, notes.append)
        found[0].zero_()
    assert "shares memory" in notes[0].why
    if function is viewing:
        assert not args[0][:2].any(), "a view stays a view"


def test_one_tensor_stays_one_tensor(uncompiled: Any, notes: Any) -> None:
    args = arguments()
    with torch.no_grad():
        made, given, again = Graph(handing)(args, notes.append)
        assert torch.equal(made, handing(*args)[0])
    assert made is again
    assert given is args[0]
    assert [n.why for n in notes] == [""]
    assert len(uncompiled) == 1


def test_arguments_that_were_one_tensor_are_handed_on_apart(uncompiled: Any, notes: Any) -> None:
    graph = Graph(passing)
    a, b = torch.randn(5, 3), torch.randn(5, 3)
    with torch.no_grad():
        graph((a, a), notes.append)
        made, x, y = graph((a, b), notes.append)
    assert (x is a, y is b) == (True, True)
    assert torch.equal(made, passing(a, b)[0])
    assert [n.why for n in notes] == [""]
    assert len(uncompiled) == 1


def test_what_writes_an_argument_writes_it_once_a_call(uncompiled: Any, notes: Any) -> None:
    graph, args = Graph(writing), arguments()
    before = args[0].clone()
    with torch.no_grad():
        graph(args, notes.append)
    assert "writes an argument" in notes[0].why
    assert torch.equal(args[0], before + 1.0)


def test_a_failing_check_raises_what_it_raised(uncompiled: Any, notes: Any) -> None:
    graph = Graph(forward)
    x, *rest = arguments()
    with torch.no_grad():
        graph((x, *rest), notes.append)
        assert len(uncompiled) == 1
        with pytest.raises(ValueError, match="nan"):
            graph((x * float("nan"), *rest), notes.append)
    assert len(uncompiled) == 1


def test_gradients_are_recorded_by_torch(uncompiled: Any, notes: Any) -> None:
    graph, args = Graph(single), arguments()
    assert graph(args, notes.append).requires_grad
    with torch.inference_mode():
        assert graph(args, notes.append).is_inference()
    assert not uncompiled


def test_modes_and_other_threads_are_left_alone(uncompiled: Any, notes: Any) -> None:
    graph, args = Graph(single), arguments()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert graph(args, notes.append).dtype is torch.bfloat16
        assert not uncompiled
        graph(args, notes.append)
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        try:
            graph(args, notes.append)
        finally:
            torch.set_num_threads(before)
    assert len(uncompiled) == 2


def test_wrong_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch, notes: Any) -> None:
    monkeypatch.setattr(graphs, "built", lambda f, given: lambda *v: [x + 1e-3 for x in f(*v)])
    with torch.no_grad():
        found = Graph(single)(arguments(), notes.append)
        assert torch.equal(found, single(*arguments()))
    assert "differs by 0.001" in notes[0].why


def test_what_is_slower_is_not_used(
    uncompiled: Any, monkeypatch: pytest.MonkeyPatch, notes: Any
) -> None:
    monkeypatch.setattr(graphs, "PAYS", 0.0)
    with torch.no_grad():
        Graph(single)(arguments(), notes.append)
    assert "too little is won" in notes[0].why


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
def test_compiled_by_inductor(monkeypatch: pytest.MonkeyPatch, notes: Any) -> None:
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    graph = Graph(forward)
    with torch.no_grad():
        graph(arguments(), notes.append)
        found = graph(arguments(), notes.append)
        expected = forward(*arguments())
    assert notes[0].why == ""
    assert graph.makes.found
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
