"""What an observer sees of one call: byte ranges, generators, gradients, modes, contents, items."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.runtime.observe import Seen, Watch, byte_range


def seen_of(call: Callable[[], Any], *things: tuple[str, Any]) -> Seen:
    with Watch(things).observing() as seen:
        call()
    return seen


def test_reads_and_writes_by_byte_range() -> None:
    x, y = torch.zeros(4, 3), torch.ones(3)
    seen = seen_of(lambda: x[1].add_(y))
    assert list(seen.reads) == [byte_range(y)]
    assert list(seen.writes) == [byte_range(x[1])]
    (where,) = seen.writes.values()
    assert where is not None
    assert where.file == __file__


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda x: x.mul_(2),
    "a view": lambda x: x.view(-1)[2:5].zero_(),
    "a transposed view": lambda x: x.t().fill_(1),
    ".data": lambda x: x.data.add_(1),
    "an item": lambda x: x.__setitem__((0, 1), 3.0),
    "out=": lambda x: torch.add(torch.ones(4, 3), 1, out=x),
    "copy_": lambda x: x.copy_(torch.ones(4, 3)),
    "foreach": lambda x: torch._foreach_add_([x, torch.ones(2)], 1.0),
    "random": lambda x: x.normal_(),
    "an alias by detach": lambda x: x.detach().sub_(1),
}


@pytest.mark.parametrize("way", WRITES)
def test_every_way_to_write_a_tensor_is_seen(way: str) -> None:
    x = torch.zeros(4, 3)
    low, high = byte_range(x)  # type: ignore[misc]
    seen = seen_of(lambda: WRITES[way](x))
    assert any(low <= a < b <= high for a, b in seen.writes)
    assert ("rng:torch" in seen.changed) == (way == "random")


def test_views_read_nothing_and_own_memory_is_left_out() -> None:
    x = torch.zeros(4, 3)
    assert seen_of(lambda: x.t().reshape(-1).unsqueeze(0)[:, 2:]).reads != {}  # reshape copies
    assert seen_of(lambda: x.view(-1).unsqueeze(0)[:, 2:].detach()).reads == {}
    seen = seen_of(lambda: torch.ones(3).add_(1).mul_(2).sum())
    assert (seen.reads, seen.writes) == ({}, {})


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_optimizers(options: dict[str, bool]) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), **options)
    net(torch.ones(1, 3)).sum().backward()
    seen = seen_of(optimizer.step)
    assert {byte_range(p) for p in net.parameters()} <= set(seen.writes)
    # the fused kernel may scale gradients in place, and says so
    touched = {**seen.reads, **seen.writes}
    assert {byte_range(p.grad) for p in net.parameters() if p.grad is not None} <= set(touched)


def test_gradients_made_replaced_dropped_and_added_to() -> None:
    net = torch.nn.Linear(2, 1)
    named = list(net.named_parameters())

    def changed(call: Callable[[], Any]) -> list[str]:
        found = seen_of(call, *named).gradients
        return [n for n, p in named if any(p is g for g in found)]

    assert changed(lambda: net(torch.ones(1, 2)).sum().backward()) == ["weight", "bias"]
    assert changed(lambda: net(torch.ones(1, 2)).sum().backward()) == ["weight", "bias"]
    assert changed(lambda: setattr(net.weight, "grad", torch.zeros(1, 2))) == ["weight"]
    assert changed(net.zero_grad) == ["weight", "bias"]
    assert changed(lambda: net(torch.ones(1, 2))) == []


def test_generators() -> None:
    own, legacy = np.random.default_rng(0), np.random.RandomState(0)
    torch_own, python_own = torch.Generator(), random.Random(0)
    things = (("a", own), ("b", legacy), ("c", torch_own), ("d", python_own))
    draws: list[tuple[str, Callable[[], Any]]] = [
        ("rng:torch", lambda: torch.rand(1)),
        ("rng:numpy", lambda: np.random.rand()),  # noqa: NPY002
        ("rng:python", random.random),
        ("a", own.random),
        ("b", legacy.rand),
        ("c", lambda: torch.rand(1, generator=torch_own)),
        ("d", python_own.random),
    ]
    for name, draw in draws:
        assert seen_of(draw, *things).changed == {name: "generator"}
    assert seen_of(lambda: torch.ones(3) + 1, *things).changed == {}


def test_numpy_writes_are_told_by_content() -> None:
    array, tensor = np.zeros(5), torch.zeros(3)
    big = np.zeros(1 << 21, dtype=np.uint8)
    things = (("array", array), ("tensor", tensor), ("big", big))
    assert seen_of(lambda: array.__setitem__(2, 1.0), *things).changed == {"array": "content"}
    assert seen_of(lambda: tensor.numpy().fill(2), *things).changed == {"tensor": "content"}
    assert seen_of(lambda: big.fill(1), *things).changed == {"big": "content"}
    with Watch(things).observing(contents=False) as seen:
        array.fill(9)
    assert seen.changed == {}


def test_modes_attributes_and_containers() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    thing, log, table = SimpleNamespace(count=0, kept=[1]), [1], {"a": 1}
    things = (("net", net), ("thing", thing), ("log", log), ("table", table))
    assert seen_of(net.eval, *things).changed == {"net": "mode"}
    assert seen_of(net.eval, *things).changed == {}
    assert seen_of(lambda: setattr(net[1], "training", True), *things).changed == {"net": "mode"}
    assert seen_of(lambda: setattr(thing, "count", 1), *things).changed == {"thing.count": "items"}
    assert seen_of(lambda: log.append(2), *things).changed == {"log": "items"}
    assert seen_of(lambda: table.__setitem__("a", 2), *things).changed == {"table": "items"}


def test_what_raises_is_still_seen() -> None:
    x = torch.zeros(2)
    seen = Seen()

    def call() -> None:
        nonlocal seen
        with Watch().observing() as seen:
            x.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call()
    assert list(seen.writes) == [byte_range(x)]
    torch.ones(2).add_(1)  # the mode is gone
    assert len(seen.writes) == 1
