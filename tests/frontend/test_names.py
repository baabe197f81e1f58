"""One thing under several paths: a list that holds what an attribute holds, a view, a gradient."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rose_compiler.frontend.capture import capture
from rose_compiler.frontend.names import StateNames
from rose_compiler.ir import interp
from rose_compiler.ir.deps import why
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.testing.capturing import difference, first_trip, shuffle, values_of


class Part:
    def __init__(self, items):
        self.items = items
        self.k = 1


class World:
    def __init__(self):
        self.t = torch.arange(4.0)
        self.parts = [Part([1]), Part([2])]
        self.first = self.parts[0]
        self.items = self.first.items
        self.net = torch.nn.Linear(2, 2)
        with torch.no_grad():
            self.net.weight.fill_(0.5)
            self.net.bias.fill_(1.0)
        self.both = list(self.net.parameters())

    def swap(self):
        self.first = self.parts[1]


def an_item_of_a_list(w, x):
    a = x + 1
    w.first.k = 5
    for i in range(2):
        w.parts[i].k = 2
    b = x + 2
    c = w.first.k
    return a, b, c


def a_path_below_an_item(w, x):
    a = x + 1
    before = w.items[0] + len(w.items)
    i = 0
    w.parts[i].items.append(3)
    w.parts[i].items[0] = 7
    b = x + 2
    return a, b, before, w.items[0]


def a_transposed_view(w, x):
    w.net.weight.data[0, 0] = 2
    a = x + 1
    b = w.net.weight.T + 1
    w.net.weight.data[0, 0] = 3
    c = w.net.weight.data + x
    w.net.weight.data.mul_(2)
    return a, b, c


def gradients_by_a_list(w, x):
    a = x + 1
    w.net(x).sum().backward()
    total = sum(p.grad.sum() for p in w.both if p.grad is not None)
    for p in w.both:
        p.grad = None
    b = x + 2
    return a, b, total, w.net.weight.grad is None


def gradients_held_for_later(w, x):
    out = x * 0
    for i in range(3):
        kept = [p.grad for p in w.both if p.grad is not None]
        a = x + i
        w.net(x).sum().backward()
        out = out + sum(g.sum() for g in kept) + a
    return out


def a_swapped_attribute(w, x):
    a = x + 1
    w.swap()
    w.first.items[0] = 9
    b = w.parts[1].items[0]
    w.parts[1].items[0] = 4
    return a, b, w.first.items[0]


PROGRAMS = (
    an_item_of_a_list,
    a_path_below_an_item,
    a_transposed_view,
    gradients_by_a_list,
    gradients_held_for_later,
    a_swapped_attribute,
)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_legal_orders_give_the_same(fn):
    def make():
        return World(), torch.ones(2)

    args = make()
    eager = fn(*args), args
    program = first_trip(fn, *make()).captured.program
    moved = 0
    for number in range(12):
        moved += shuffle(program, random.Random(number))
        args = make()
        found = capture(fn, args, {})
        result = interp.run(program, values_of(found, args, {}), found.program.objects)
        assert difference(eager, (result, args)) is None, f"order {number}"
    assert moved


def test_other_names_of_what_a_path_leads_to():
    names = StateNames({"w": World()})
    assert names.linked("w.parts.items") == ["w.first.items", "w.items"]
    assert "w.first" in names.linked("w.parts")
    assert "w.first" not in names.linked("w.parts", items=False)
    assert names.linked("w.t") == []


def test_optimizers_and_their_schedulers_are_known_without_links():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    names = StateNames({"net": net, "scheduler": scheduler, "optimizer": optimizer})
    assert names.linked("optimizer") == names.linked("scheduler") == []


class _Heads:
    def __init__(self) -> None:
        self.by_name = torch.nn.ModuleDict({"value": torch.nn.Linear(2, 1)})
        self.by_number = torch.nn.ModuleList([torch.nn.Linear(2, 1)])
        parameters = [*self.by_name.parameters(), *self.by_number.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)


def _items(heads: _Heads, x: torch.Tensor):
    with torch.no_grad():
        value = heads.by_name["value"](x)
        other = heads.by_number[0](x)
    heads.optimizer.step()
    return value, other


def test_modules_that_are_items_of_containers_read_their_parameters():
    program = first_trip(_items, _Heads(), torch.ones(1, 2)).captured.program
    calls = [n for n in program.graph.nodes if is_call(n) and op_of(n).kind == "block"]
    *forwards, step = calls
    assert len(forwards) == 2
    for forward in forwards:
        blocker = why(program, forward, step)
        assert blocker is not None
        assert blocker.code == "effects-conflict"


def test_a_number_of_numpys_under_two_names_is_nothing_shared() -> None:
    best, row = np.float64(1.5), np.zeros(2, [("x", "f4")])[0]
    names = StateNames({"best": best, "scores": [(best, 0)], "row": row, "rows": [row]})
    assert id(best) not in names.names
    # what changes a record changes the array that it is part of
    assert names.links == {"rows": {"row": True}}
