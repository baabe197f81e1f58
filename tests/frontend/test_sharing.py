"""Which states share memory, and that a change of it is seen below the same roots."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.frontend.guards import layout_of
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.sharing import Shared, relation_of


def things() -> Any:
    return SimpleNamespace(
        a=torch.zeros(4, 3),
        b=torch.zeros(4, 3),
        rows=np.zeros((4, 3), np.float32),
        inner=SimpleNamespace(c=torch.zeros(3)),
        log=[1.0],
        parts=[torch.zeros(2), torch.zeros(2)],
        table={"x": torch.zeros(2)},
        net=torch.nn.Linear(3, 3),
        none=None,
    )


def test_the_relation_tells_overlaps_and_second_names() -> None:
    t = things()
    t.inner.c, t.second = t.a[2], t.b
    assert relation_of(StateNames({"t": t})) == {
        "t.a": {"t.inner.c"},
        "t.inner.c": {"t.a"},
        "t.second": {"t.b"},
    }


def attribute(t: Any) -> None:
    t.b = t.a[1:]


def same(t: Any) -> None:
    t.b = t.a


def data(t: Any) -> None:
    t.b.data = t.a


def set_to(t: Any) -> None:
    t.b.set_(t.a[0])


def array(t: Any) -> None:
    t.rows = t.a.numpy()


def below(t: Any) -> None:
    t.inner = SimpleNamespace(c=t.a[0])


def item(t: Any) -> None:
    t.parts[1] = t.a[0]


def appended(t: Any) -> None:
    t.parts.append(t.a[0])


def logged(t: Any) -> None:
    t.log.append(t.a)


def entry(t: Any) -> None:
    t.table["x"] = t.a


def weight(t: Any) -> None:
    t.net.weight = torch.nn.Parameter(t.a[1:])


def module(t: Any) -> None:
    t.net = torch.nn.Linear(3, 3)
    t.net.bias.data = t.a[0]


def late(t: Any) -> None:
    t.none = t.a[0]


CHANGES = [attribute, same, data, set_to, array, below, item, appended]
CHANGES += [logged, entry, weight, module, late]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_below_the_same_root_is_seen(change: Callable[[Any], None]) -> None:
    t = things()
    shared = Shared(StateNames({"t": t}))
    assert shared.changed({"t": t}) is None
    change(t)
    found = shared.changed({"t": t})
    assert found is not None
    assert "memory with" in found
    assert shared.changed({"t": t}) == found, "the program captured before never fits"


def test_what_no_longer_shares_is_a_change() -> None:
    for first in ("a", "b"):
        t = things()
        t.b = t.a
        shared = Shared(StateNames({"t": t}))
        setattr(t, first, torch.zeros(4, 3))
        assert "no longer shares" in (shared.changed({"t": t}) or "")


def test_other_objects_that_share_nothing_are_accepted_and_watched() -> None:
    t = things()
    shared = Shared(StateNames({"t": t}))
    for _ in range(3):
        t.a, t.b = torch.zeros(5, 3), t.a
        t.rows = np.zeros(3)
        t.inner = SimpleNamespace(c=torch.zeros(2))
        t.log.append(2.0)
        t.log.append(np.float32(1))
        t.parts = [torch.zeros(2)]
        t.net = torch.nn.Linear(3, 3)
        assert shared.changed({"t": t}) is None
    t.net.bias.data = t.inner.c
    assert shared.changed({"t": t}) is not None


def test_tensors_put_in_the_place_of_others_cost_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    t = things()
    shared = Shared(StateNames({"t": t}))
    monkeypatch.setattr("rose_compiler.frontend.sharing.StateNames", None)
    for _ in range(2):
        t.a, t.b = t.b, t.a
        t.inner.c = torch.zeros(2, 2)
        t.log.append(1.0)
        assert shared.changed({"t": t}) is None


def test_names_that_were_not_there_do_not_count() -> None:
    t = things()
    shared = Shared(StateNames({"t": t}))
    t.later = t.a[0]
    t.table["y"] = t.b
    assert shared.changed({"t": t}) is None


def test_the_layout_tells_which_names_are_the_same_thing() -> None:
    layouts = []
    for name in ("a", "b"):
        t = things()
        t.second = getattr(t, name)
        layouts.append(layout_of(StateNames({"t": t})))
    assert layouts[0] != layouts[1]


def filled(buf: Any, k: float) -> Any:
    for t in range(3):
        buf.out[t] = buf.r[t] + k
    return buf.out


@pytest.mark.parametrize("anew", [True, False], ids=["another root", "the same root"])
def test_the_object_that_eager_returns_is_returned(anew: bool) -> None:
    fast = rose_compiler.compile(filled, tune=False)
    buf = SimpleNamespace(r=torch.zeros(3), v=torch.zeros(3), out=None)
    for name in ("r", "r", "v", "r"):
        if anew:
            buf = SimpleNamespace(r=torch.zeros(3), v=torch.zeros(3), out=None)
        buf.out = getattr(buf, name)
        assert fast(buf, 1.0) is getattr(buf, name)
    fast.close()
