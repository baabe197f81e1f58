"""Losses and graphs as one call of TorchScript: eager's bits, or torch's own work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_compiler.ir.unread import Dropped
from rose_compiler.runtime import gradients, graphs, inductor, script
from rose_compiler.runtime.gradients import Gradients
from rose_compiler.runtime.graphs import Graph
from rose_compiler.runtime.script import SCRIPT


@pytest.fixture(autouse=True)
def _it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, graphs):
        monkeypatch.setattr(module, "PAYS", float("inf"))


def forward(x: Any, y: Any, power: Any, first: Any, second: Any) -> Any:
    h = torch.tanh(F.linear(x, first))
    # products that share an operand are what TorchScript's optimizer would batch
    error = sum(F.linear(h + k, second).pow(power) for k in range(8)) - y
    return error.pow(2).mean(), error.amax()


def arguments(power: float = 2.0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(17, n, generator=generator) for n in (9, 5))
    weights = [nn.Parameter(torch.randn(n, m, generator=generator)) for n, m in ((33, 9), (5, 33))]
    return x, y, power, *weights


def by_engine(args: tuple[Any, ...]) -> Tensor:
    loss, other = forward(*args)
    loss.backward()
    return other.detach()


def same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return all(torch.equal(a.grad, b.grad) for a, b in zip(ours[3:], theirs[3:], strict=True))


def test_bits_are_those_of_the_engine_and_gradients_add_up() -> None:
    notes: list[Any] = []
    ours, theirs = arguments(), arguments()
    loss = Gradients(forward, SCRIPT)
    for _ in range(3):
        assert torch.equal(loss(ours, notes.append), by_engine(theirs))
        assert same(ours, theirs)
    # a base would hold the memory too, as nobody does behind the engine
    assert not any(w.grad._is_view() for w in ours[3:])
    (note,) = notes
    assert (note.kind, note.why) == ("script", "")
    assert torch._C._get_graph_executor_optimize()  # as the user has it


def test_a_number_that_changes_is_no_input() -> None:
    notes: list[Any] = []
    loss = Gradients(forward, SCRIPT)
    for power in (2.0, 3.0, 0.5, 2.0):
        ours, theirs = arguments(power), arguments(power)
        got, expected = loss(ours, notes.append), by_engine(theirs)
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert len(notes) == 1


def test_gradients_that_nobody_reads_are_left_out_but_on_the_last_trip() -> None:
    notes: list[Any] = []
    ours, theirs = arguments(), arguments()
    loss, optimizer = Gradients(forward, SCRIPT), torch.optim.SGD([ours[3]], lr=0.1)
    loss(ours, notes.append, None, Dropped(optimizer, 0, 3, 1))
    assert ours[3].grad is None
    by_engine(theirs)
    assert torch.equal(ours[4].grad, theirs[4].grad)
    ours[4].grad = theirs[4].grad = theirs[3].grad = None
    loss(ours, notes.append, None, Dropped(optimizer, 2, 3, 1))
    by_engine(theirs)
    assert same(ours, theirs)
    held = ours[3].grad
    loss(ours, notes.append, None, Dropped(optimizer, 0, 3, 1))
    by_engine(theirs)
    assert held is ours[3].grad  # its holder sees what is added
    assert same(ours, theirs)
    assert [n.why for n in notes] == ["", ""]


def test_errors_are_those_of_eager_and_none_is_left_out() -> None:
    notes: list[Any] = []
    scores, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 1])
    loss = Gradients(lambda scores, target: (F.cross_entropy(scores, target),), SCRIPT)
    loss((scores, target), notes.append)
    graph = Graph(lambda scores, target: F.cross_entropy(scores, target), SCRIPT)
    graph((scores.detach(), target), notes.append)
    target[1] = 7
    before = scores.grad.clone()  # type: ignore[union-attr]  # it has one
    for run, given in ((loss, scores), (graph, scores.detach())):
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            run((given, target), notes.append)
    assert torch.equal(scores.grad, before)  # type: ignore[arg-type]
    # nobody takes what says whether this went well
    root, matrix = Graph(lambda a: torch.linalg.cholesky(a) * 2, SCRIPT), torch.eye(2)
    assert torch.equal(root((matrix,), notes.append), 2 * matrix)
    with pytest.raises(torch.linalg.LinAlgError):
        root((-matrix,), notes.append)
    assert [bool(n.why) for n in notes] == [False, False, True]


def test_equal_numbers_that_are_not_the_same_are_told_apart() -> None:
    def scaled(x: Tensor, by: Any) -> Tensor:
        return (x * by).reciprocal()

    run, x = Graph(scaled, SCRIPT), torch.ones(2)
    for by in (0.0, -0.0):
        assert torch.equal(run((x, by), lambda note: None), scaled(x, by))
    told = [eval(f"lambda x: x * {by}") for by in ("1", "1.0", "0.0", "-0.0", "1")]
    assert len({inductor.identity(one) for one in told}) == 4


def test_leaves_that_became_something_else_are_left_to_torch() -> None:
    first, *_, last = arguments()[3:]
    loss = Gradients(lambda a, b: ((a * b.sum()).pow(2).mean(),), SCRIPT)
    a, b = (nn.Parameter(w.detach().clone()) for w in (first, first))
    loss((a, b), lambda note: None)
    a.grad = torch.full_like(a, 0.1)
    loss((a, a), lambda note: None)  # the engine adds both parts up before it adds them to `.grad`
    twin = nn.Parameter(a.detach().clone())
    twin.grad = torch.full_like(a, 0.1)
    (twin * twin.sum()).pow(2).mean().backward()
    assert torch.equal(a.grad, twin.grad)  # type: ignore[arg-type]
    b.grad = None
    loss((a, b * 1), lambda note: None)
    assert b.grad is not None  # it went back through the product
    with torch.inference_mode():
        made = last.detach() * 1
    loss = Gradients(lambda x, w: ((x * w).pow(2).mean(),), SCRIPT)
    loss((last.detach(), last), lambda note: None)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        loss((made, last), lambda note: None)


@pytest.mark.parametrize("why", ["bits", "slower", "absent"])
def test_what_differs_or_does_not_pay_is_left_to_torch(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nudged(function: Any, given: list[Tensor]) -> Any:
        made = script.scripted(function, given)
        return lambda *args: [r * (1 + 2**-23) if r.is_floating_point() else r for r in made(*args)]

    form = SCRIPT
    if why == "bits":
        form = replace(SCRIPT, build=nudged)
    elif why == "slower":
        monkeypatch.setattr(gradients, "PAYS", 0.0)
        monkeypatch.setattr(graphs, "PAYS", 0.0)
    else:
        monkeypatch.setattr(script, "available", lambda: False)
    said = {"bits": "its bits differ", "slower": "too little is won", "absent": "no TorchScript"}
    notes: list[Any] = []
    ours, theirs = arguments(), arguments()
    assert torch.equal(Gradients(forward, form)(ours, notes.append), by_engine(theirs))
    assert same(ours, theirs)

    def graph(x: Tensor) -> Tensor:
        return torch.tanh(x) @ x.T

    assert torch.equal(Graph(graph, form)((ours[0],), notes.append), graph(ours[0]))
    assert [said[why] in n.why for n in notes] == [True, True]


def test_graphs_have_eagers_bits_in_memory_of_their_own() -> None:
    notes: list[Any] = []

    def graph(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x)
        return sum(h @ (x + k).T for k in range(8)), h  # type: ignore[return-value]

    run, x = Graph(graph, SCRIPT), arguments()[0]
    first, second = run((x,), notes.append), run((x,), notes.append)
    for got in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(got, graph(x), strict=True))
    assert first[1].data_ptr() != second[1].data_ptr()
    assert [n.why for n in notes] == [""]
    assert inductor.INDUCTOR.kind != SCRIPT.kind
