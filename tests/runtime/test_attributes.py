"""Attributes that a call reaches and assigns, and classes that are afterwards as they were."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.runtime.attributes import Attributes
from rose_compiler.runtime.observe import Watch


class Plain:
    def __init__(self) -> None:
        self.table = np.zeros(3)
        self.gain = 1.0


class Slotted:
    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def before_and_after(cls: type) -> tuple[Any, Any]:
    return cls.__dict__.get("__getattribute__"), cls.__dict__.get("__setattr__")


def test_reached_and_assigned_attributes_come_with_lines() -> None:
    plain = Plain()
    with Attributes([("p", plain)]).noting() as touched:
        plain.table[1] = plain.gain
        plain.gain = 3.0
    assert set(touched.values) == {("p", "table"), ("p", "gain")}
    line = touched.line_of("p", "table")
    assert line is not None
    assert line.source == "plain.table[1] = plain.gain"
    line = touched.line_of("p", "gain")
    assert line is not None
    assert line.source == "plain.gain = 3.0"


@pytest.mark.parametrize("cls", [Plain, Slotted, Own])
def test_classes_are_as_before(cls: type) -> None:
    thing, was = cls(), before_and_after(cls)
    tensors = {n: torch.Tensor.__dict__.get(n) for n in ("numpy", "tolist")}
    with Attributes([("it", thing)]).noting():
        assert before_and_after(cls) != was
    assert before_and_after(cls) == was
    with pytest.raises(ZeroDivisionError), Attributes([("it", thing)]).noting():
        raise ZeroDivisionError
    assert before_and_after(cls) == was
    assert {n: torch.Tensor.__dict__.get(n) for n in tensors} == tensors


def test_a_module_computes_the_same_and_tells_plain_attributes() -> None:
    module = Own()
    x = torch.ones(1, 2)
    want = module(x)
    with Attributes([("m", module)]).noting() as touched:
        assert torch.equal(module(x), want)
    assert ("m", "scale") in touched.values
    assert ("m", "_parameters") not in touched.values


def test_tensors_handed_to_numpy_are_read() -> None:
    data = torch.arange(4.0)
    watch = Watch([("data", data)])
    for read in (lambda: data.numpy(), lambda: np.asarray(data), lambda: data[1:].tolist()):
        with watch.observing() as seen:
            read()
        assert seen.reads
    with watch.observing() as seen:
        data.shape  # noqa: B018
    assert not seen.reads


def test_slots_that_change_are_seen() -> None:
    thing = Slotted()
    with Watch([("thing", thing)]).observing() as seen:
        thing.count += 1
    assert seen.changed == {"thing.count": "items"}


def test_an_object_is_pickled_as_ever_meanwhile() -> None:
    plain = Plain()
    with Attributes([("p", plain)]).noting():
        again = pickle.loads(pickle.dumps(plain))
    assert again.gain == 1.0


def test_watches_that_overlap_leave_classes_as_they_were() -> None:
    """As of two trainings in two threads: the one that began first ends first."""
    found = before_and_after(Plain), torch.Tensor.__dict__.get("numpy")
    mine, other, tensor = Plain(), Plain(), torch.zeros(1)
    first, second = (Attributes([("p", p)]).noting() for p in (mine, other))
    touched = first.__enter__(), second.__enter__()
    assert (mine.gain, other.gain) == (1.0, 1.0)
    first.__exit__(None, None, None)
    mine.gain, other.table = 2.0, tensor.numpy()
    second.__exit__(None, None, None)
    assert [t.line_of("p", "gain") is not None for t in touched] == [True, True]
    assert [t.line_of("p", "table") is not None for t in touched] == [False, True]
    assert [len(t.tensors) for t in touched] == [0, 1]
    assert (before_and_after(Plain), torch.Tensor.__dict__.get("numpy")) == found
