"""CUDA graphs of what was compiled, captured and replayed by a stand-in on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_compiler.ir.checks import check_valid
from rose_compiler.runtime import cuda_graphs, gradients, graphs, inductor
from rose_compiler.runtime.cuda_graphs import Captured, Replays, copies, why_not_captured
from rose_compiler.runtime.gradients import Gradients
from rose_compiler.runtime.graphs import Graph
from rose_compiler.runtime.inductor import Note
from rose_compiler.runtime.support import Runtime
from tests.runtime.cuda_stand_in import StandIn


def act(x: Any, weight: Any, scale: Any) -> Any:
    h = torch.tanh(x @ weight) * scale
    return h, h.sum(-1)


def loss(x: Any, y: Any, coefficient: Any, weight: Any, bias: Any) -> Any:
    h = F.linear(x, weight, bias)
    check_valid(torch._is_all_true(h == h), "{type}: {value}", h)
    error = (torch.tanh(h) - y).pow(2)
    return error.mean() * coefficient, error.max()


def arguments(seed: int = 3, rows: int = 5) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 3, generator=generator) for _ in range(2))


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return nn.Parameter(torch.randn(3, 3, generator=generator)), nn.Parameter(torch.zeros(3))


def always() -> bool:
    return True


@pytest.fixture
def notes() -> list[Note]:
    return []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Nothing is compiled, everything that may be is captured, and it always pays."""

    def as_it_is(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            return inductor.make_fx(function)(*given)

    made = StandIn()
    monkeypatch.setattr(graphs, "built", as_it_is)
    monkeypatch.setattr(gradients, "_built", as_it_is)
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    monkeypatch.setattr(cuda_graphs, "PAYS", float("inf"))
    monkeypatch.setattr(cuda_graphs, "DEVICE", made)
    monkeypatch.setattr(inductor, "ROUNDS", 1)
    monkeypatch.setattr(inductor, "LEAST_ROUNDS", 1)
    return made


def captured(notes: list[Note]) -> list[Note]:
    return [n for n in notes if n.kind == "cuda-graph"]


def test_a_replay_sees_new_arguments_and_stepped_parameters(device: StandIn, notes: Any) -> None:
    graph, (weight, _) = Graph(act), parameters()
    with torch.no_grad():
        for seed in range(4):
            x = arguments(seed)[0]
            found = graph((x, weight, 0.5), notes.append, always)
            for a, b in zip(found, act(x, weight, 0.5), strict=True):
                assert torch.equal(a, b)
            weight.add_(0.25)  # as an optimizer does
    assert device.log.count("capture") == 1
    assert device.log.count("replay") >= 4
    (note,) = captured(notes)
    assert note.why == ""
    assert "instead of" in note.gain


def test_results_outlive_the_next_replay(device: StandIn, notes: Any) -> None:
    graph, (weight, _) = Graph(act), parameters()
    with torch.no_grad():
        first = graph((arguments(0)[0], weight, 0.5), notes.append, always)
        kept = [a.clone() for a in first]
        second = graph((arguments(1)[0], weight, 0.5), notes.append, always)
    assert all(map(torch.equal, first, kept))
    assert not torch.equal(first[0], second[0])
    held = graph.makes.found[0].replays.captured
    assert held is not None
    own = {m.untyped_storage().data_ptr() for m in held._made}
    assert own.isdisjoint(a.untyped_storage().data_ptr() for a in (*first, *second))


def test_without_the_decision_nothing_is_captured(device: StandIn, notes: Any) -> None:
    with torch.no_grad():
        Graph(act)((arguments()[0], parameters()[0], 0.5), notes.append)
    assert device.log == []


def trained(step: Callable[..., Any], *, keep: bool) -> tuple[list[Any], list[Tensor]]:
    """Four updates; with ``keep`` gradients are zeroed in place, else they are set to None. Two
    losses add up in each."""
    weight, bias = parameters()
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    seen = []
    for seed in range(4):
        optimizer.zero_grad(set_to_none=not keep)
        for part in range(2):
            seen.append(step((*arguments(10 * seed + part), 0.5, weight, bias)))
        seen += [weight.grad, weight.grad.clone()]
        optimizer.step()
    return seen, [weight.detach(), bias.detach()]


def by_engine(args: tuple[Any, ...]) -> Tensor:
    value, other = loss(*args)
    value.backward()
    return other.detach()


@pytest.mark.parametrize("keep", [False, True])
def test_a_replayed_loss_trains_the_same(device: StandIn, notes: Any, keep: bool) -> None:
    one = Gradients(loss)
    seen, final = trained(lambda args: one(args, notes.append, always), keep=keep)
    expected, wanted = trained(by_engine, keep=keep)
    assert all(map(torch.equal, final, wanted))
    assert all(map(torch.equal, seen, expected)), "kept results and gradients are not written again"
    assert device.log.count("capture") == 1
    assert device.log.count("replay") >= 8


def test_a_gradient_that_somebody_holds_is_not_written(device: StandIn, notes: Any) -> None:
    one, (weight, bias) = Gradients(loss), parameters()
    held = []
    for seed in range(3):
        weight.grad = bias.grad = None
        one((*arguments(seed), 0.5, weight, bias), notes.append, always)
        held.append((weight.grad, weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in held)


@pytest.mark.parametrize("before", [None, 10.0])
def test_a_parameter_that_is_handed_over_twice_has_both_gradients(before: float | None) -> None:
    one = torch.nn.Parameter(torch.zeros(2))
    one.grad = None if before is None else torch.full((2,), before)
    make: Any = SimpleNamespace(leaves=(0, 1), results=0, checked=False)
    made = [torch.tensor(True), torch.ones(2), torch.full((2,), 2.0)]
    assert gradients._taken(make, (one, one), made) == []
    assert one.grad is not None
    assert one.grad.tolist() == [3.0 + (before or 0.0)] * 2


def test_another_number_is_captured_anew_and_then_done_plainly(device: StandIn, notes: Any) -> None:
    one, (weight, bias) = Gradients(loss), parameters()
    for number in (0.5, 0.25, 0.5, 0.125, 0.75, 0.625, 0.0):
        weight.grad = bias.grad = None
        one((*arguments(), number, weight, bias), notes.append, always)
        found, weight.grad = weight.grad, None
        by_engine((*arguments(), number, weight, bias))
        assert torch.equal(found, weight.grad)
    assert len(captured(notes)) == cuda_graphs.MAX_CAPTURES
    assert device.log.count("reset") == cuda_graphs.MAX_CAPTURES - 1


def test_a_parameter_that_was_moved_is_captured_anew(device: StandIn, notes: Any) -> None:
    one, (weight, bias) = Gradients(loss), parameters()
    for _ in range(2):
        weight.grad = bias.grad = None
        one((*arguments(), 0.5, weight, bias), notes.append, always)
        found, weight.grad = weight.grad, None
        by_engine((*arguments(), 0.5, weight, bias))
        assert torch.equal(found, weight.grad)
        weight.data = weight.data.clone() + 1.0
    assert len(captured(notes)) == 2


def test_a_check_that_fails_raises_and_adds_no_gradient(device: StandIn, notes: Any) -> None:
    one, (weight, bias) = Gradients(loss), parameters()
    x, y = arguments()
    one((x, y, 0.5, weight, bias), notes.append, always)
    before = weight.grad.clone()
    with pytest.raises(ValueError, match="nan"):
        one((x * float("nan"), y, 0.5, weight, bias), notes.append, always)
    assert torch.equal(weight.grad, before)


def test_a_hook_and_autocast_are_done_by_torch(device: StandIn, notes: Any) -> None:
    one, (weight, bias) = Gradients(loss), parameters()
    one((*arguments(), 0.5, weight, bias), notes.append, always)
    count = device.log.count("replay")
    handle = weight.register_hook(lambda g: 2 * g)
    one((*arguments(), 0.5, weight, bias), notes.append, always)
    handle.remove()
    with torch.autocast("cpu"):
        one((*arguments(), 0.5, weight, bias), notes.append, always)
    assert device.log.count("replay") == count


def test_nothing_is_captured_while_a_lane_is_at_work(device: StandIn, notes: Any) -> None:
    runtime, go = Runtime(), threading.Event()
    lane = runtime.lane("thread:a")
    task = lane.submit(0, go.wait)
    assert not runtime.quiet()
    with torch.no_grad():
        weight = parameters()[0]
        runtime.graph(act, arguments()[0], weight, 0.5, replayed=True)
        assert device.log == []
        go.set()
        task.wait()
        assert runtime.quiet()
        runtime.graph(act, arguments()[0], weight, 0.5, replayed=True)
    assert "capture" in device.log
    runtime.close()


def test_another_stream_waits_for_the_one_before(device: StandIn, notes: Any) -> None:
    graph, (weight, _) = Graph(act), parameters()
    with torch.no_grad():
        graph((arguments()[0], weight, 0.5), notes.append, always)
        device.stream = "side"
        graph((arguments()[0], weight, 0.5), notes.append, always)
    assert "side waits for main" in device.log


def test_what_is_slower_or_can_t_be_had_is_left_plain(
    device: StandIn, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (arguments()[0], parameters()[0], 0.5)
    with torch.no_grad():
        monkeypatch.setattr(cuda_graphs, "PAYS", 0.0)
        found = Graph(act)(args, notes.append, always)
        device.refuses = "there is no CUDA device"
        graph = Graph(act)
        for _ in range(3):
            again = graph(args, notes.append, always)
    assert all(map(torch.equal, found, again))
    slow, none = captured(notes)
    assert "too little is won" in slow.why
    assert none.why == device.refuses


def test_a_value_that_was_baked_in_is_found_out(device: StandIn, notes: Any) -> None:
    def first(x: Tensor) -> list[Tensor]:
        return [torch.full((2,), float(x.numpy()[0, 0]))]

    replays = Replays("first", first)
    assert replays([arguments()[0]], copies, always, notes.append) is None
    assert "differs" in notes[0].why
    assert "reset" in device.log


def test_a_capture_that_fails_changes_nothing(device: StandIn, notes: Any) -> None:
    replays = Replays("waits", lambda x: [x * x.sum().item()])
    for _ in range(2):
        assert replays([arguments()[0]], copies, always, notes.append) is None
    (note,) = notes
    assert "not permitted" in note.why


def test_expanded_arguments_and_shared_results_are_refused(device: StandIn) -> None:
    with pytest.raises(inductor.Refused, match="over each other"):
        Captured(lambda x: [x + 1], [torch.zeros(1).expand(3)], ())
    with pytest.raises(inductor.Refused, match="shares memory"):
        Captured(lambda x: [x[:2]], [torch.zeros(3)], ())


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: [x[x > 0]], "hangs on values"),
        (lambda x: [torch.nonzero(x)], "hangs on values"),
        (lambda x: [torch.rand_like(x)], "draws"),
        (lambda x: [x.to("meta")], "between the host"),
        (lambda x: [x[torch.argsort(x)]], ""),
        (lambda x: [torch.tanh(x).sum()], ""),
    ],
)
def test_operations_say_whether_they_can_be_captured(function: Any, why: str) -> None:
    graph = inductor.make_fx(function)(torch.ones(3))
    found = why_not_captured(graph.graph)
    assert (why in found) if why else not found


def test_the_first_of_two_threads_has_the_buffers(device: StandIn, notes: Any) -> None:
    replays = Replays("act", lambda x: [x + 1])
    x = arguments()[0]
    seen: list[Any] = []

    def take(made: list[Tensor]) -> Tensor:
        other = threading.Thread(
            target=lambda: seen.append(replays([x], copies, always, notes.append))
        )
        other.start()
        other.join()
        return made[0].clone()

    found = replays([x], take, always, notes.append)
    assert found is not None
    assert torch.equal(found[0], x + 1)
    assert seen == [None]
