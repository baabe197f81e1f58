"""Which states share memory, and that a change of it is seen below the same roots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.base import gaps
from rose_compiler.base.apart import alike
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


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_tensors_without_strides_are_no_error(
    convert: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    sparse = convert(torch.eye(2))
    roots = {"t": SimpleNamespace(edges=sparse)}
    shared = Shared(StateNames(roots))
    roots["t"].edges = sparse.clone()
    assert shared.changed(roots) is None
    assert gaps.like(sparse.clone(), sparse).layout == sparse.layout
    assert not alike([sparse, sparse])


def test_what_another_thread_takes_out_meanwhile_is_no_error() -> None:
    """A logger's thread empties its queue between two looks at it."""
    queue = deque([{"loss": 1.0}, {"loss": 2.0}])
    roots = {"log": SimpleNamespace(queue=queue)}
    names = StateNames(roots)
    queue.clear()
    shared = Shared(names)
    queue.append({"loss": 3.0})
    assert shared.changed(roots) is None


def test_a_history_of_numbers_is_not_walked_again_as_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    t = things()
    t.stats, t.history, t.returns = {"loss": 0.0}, [{"loss": 1.0}], deque([1.0], maxlen=3)
    roots = {"t": t}
    shared = Shared(StateNames(roots))
    with monkeypatch.context() as patched:
        patched.setattr("rose_compiler.frontend.sharing.StateNames", None)
        for k in range(4):
            t.returns.append(float(k))
            t.history.append({"loss": float(k), "name": "x"})
            assert shared.changed(roots) is None
    for other in (t.history[-1], t.stats):  # one object in two places is no number
        t.log, t.history = [1.0], t.history[:1]
        shared = Shared(StateNames(roots))
        t.history.append(other)
        assert shared.changed(roots) is None or other is t.stats
        t.log.append(other)
        assert shared.changed(roots) is not None


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


def other_dtype(t: Any) -> None:
    t.b = t.b.double()


def other_dtype_in_place(t: Any) -> None:
    t.inner.c.data = t.inner.c.double()


def module_of_other_dtype(t: Any) -> None:
    weight = t.net.weight
    t.net.double()
    assert t.net.weight is weight, "torch keeps the parameter and gives it other data"


def new_module_of_other_dtype(t: Any) -> None:
    t.net = torch.nn.Linear(3, 3).double()


def other_device(t: Any) -> None:
    t.b = t.b.to("meta")


def entry_on_another_device(t: Any) -> None:
    t.table["x"] = t.table["x"].to("meta")


def module_on_another_device(t: Any) -> None:
    t.net.to("meta")


#: What moves, and the words that have to tell it.
MOVES = {
    other_dtype: "t.b changed from a float32 tensor of (4, 3) on cpu to a float64",
    other_dtype_in_place: "t.inner.c changed from a float32 tensor of (3,) on cpu to a float64",
    module_of_other_dtype: "t.net.params.weight changed from a float32",
    new_module_of_other_dtype: "t.net.params.weight changed from a float32",
    other_device: "t.b changed from a float32 tensor of (4, 3) on cpu to a float32 tensor of (4, 3)"
    " on meta",
    entry_on_another_device: "on cpu to a float32 tensor of (2,) on meta",
    module_on_another_device: "t.net.params.weight changed from a float32 tensor of (3, 3) on cpu "
    "to a float32 tensor of (3, 3) on meta",
}


@pytest.mark.parametrize("move", MOVES)
def test_another_dtype_or_device_below_the_same_root_is_seen(move: Callable[[Any], None]) -> None:
    t = things()
    shared = Shared(StateNames({"t": t}))
    move(t)
    for _ in range(2):
        assert MOVES[move] in (shared.changed({"t": t}) or ""), "it never fits"


def test_a_root_that_is_a_tensor_may_be_given_other_data() -> None:
    root, other = torch.zeros(3), torch.zeros(3)
    states = {"root": root, "other": other}
    shared = Shared(StateNames(states))
    root.data = torch.zeros(3)
    assert shared.changed(states) is None
    root.data = other
    assert "memory with" in (shared.changed(states) or "")
    root.data = torch.zeros(3, dtype=torch.float64)
    assert "root changed from a float32" in (shared.changed(states) or "")


def test_another_shape_matters_where_graphs_hold_it() -> None:
    for sized in ((), ("t.b",), ("t.net.params.bias",)):
        t = things()
        shared = Shared(StateNames({"t": t}))
        shared.sized = lambda: sized  # noqa: B023  # asked in this trip
        t.b = torch.zeros(9, 3)
        found = shared.changed({"t": t})
        assert (found is None) == (sized != ("t.b",))
        t.net.bias.data = torch.zeros(5)
        found = shared.changed({"t": t})
        assert (found is None) == (sized == ())


def test_items_of_a_sequence_may_be_of_any_make() -> None:
    t = things()
    shared = Shared(StateNames({"t": t}))
    t.parts[0] = torch.zeros(4, dtype=torch.int64)
    t.parts.append(1.0)
    assert shared.changed({"t": t}) is None


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
