"""Snapshots own their memory, whatever they are nested in."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.base.apart import Apart, by_trip
from rose_compiler.ir.ops import CONCAT, JOIN_ROWS, ROWS, SPLIT_ROWS, Op, Signature
from rose_compiler.runtime.buffers import concat, join_rows, rows, snapshot, split_rows

Pair = namedtuple("Pair", "a b")


def leaves(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [x for item in value for x in leaves(item)]
    if isinstance(value, dict):
        return [x for item in value.values() for x in leaves(item)]
    if isinstance(value, tuple | list):
        return [x for item in value for x in leaves(item)]
    return [value] if isinstance(value, np.ndarray | torch.Tensor) else []


def objects(*items: Any) -> np.ndarray:
    made = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        made[i] = item
    return made


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3),
        np.asfortranarray(np.zeros((2, 3))),
        torch.zeros(3),
        (np.zeros(2), [torch.zeros(1)], {"k": np.zeros(1)}),
        Pair(np.zeros(2), "text"),
        OrderedDict(x=np.zeros(2)),
        objects(np.zeros(2), None, {"r": torch.zeros(1)}),
        torch.return_types.max((torch.zeros(2), torch.zeros(2))),
    ],
    ids=lambda v: type(v).__name__,
)
def test_nothing_is_shared(value: Any) -> None:
    copy = snapshot(value)
    assert type(copy) is type(value)
    originals, copies = leaves(value), leaves(copy)
    assert len(copies) == len(originals) > 0
    for leaf in originals:
        leaf += 1
    assert all((c == 0).all() for c in copies)


def test_what_was_shared_inside_stays_shared() -> None:
    x = np.zeros(2)
    copy = snapshot((x, {"again": x}))
    assert copy[0] is copy[1]["again"] is not x


def test_gradients_flow_through_a_snapshot() -> None:
    w = torch.ones(2, requires_grad=True)
    snapshot(w * 3).sum().backward()
    assert torch.equal(w.grad, torch.full((2,), 3.0))


def test_other_objects_are_handed_on() -> None:
    thing = object()
    assert snapshot(thing) is thing
    assert snapshot(torch.Size([1, 2])) == torch.Size([1, 2])


def test_concat_joins_rows() -> None:
    assert concat(np.zeros((1, 2)), np.ones((2, 2))).shape == (3, 2)
    assert torch.equal(concat(torch.zeros(1), torch.ones(2)), torch.tensor([0.0, 1.0, 1.0]))


def test_dicts_are_cut_and_joined_by_entry() -> None:
    whole = {"far": np.arange(4.0), "place": torch.arange(8.0).reshape(4, 2)}
    parts = [rows(whole, 0, 1), rows(whole, 1, 4)]
    assert parts[1]["far"].base is whole["far"]
    joined = concat(*parts)
    assert list(joined) == ["far", "place"]
    assert np.array_equal(joined["far"], whole["far"])
    assert torch.equal(joined["place"], whole["place"])
    again = split_rows(whole, parts)
    assert [len(p["place"]) for p in again] == [1, 3]
    assert np.array_equal(again[1]["far"], whole["far"][1:])


def test_the_interpreter_does_the_same() -> None:
    whole = {"far": np.arange(4.0), "place": torch.arange(8.0).reshape(4, 2)}
    parts = [ROWS(whole, 0, 1), ROWS(whole, 1, 4)]
    assert torch.equal(CONCAT(*parts)["place"], whole["place"])
    assert np.array_equal(SPLIT_ROWS(whole, parts)[1]["far"], whole["far"][1:])


def test_dicts_with_other_keys_are_no_parts_of_one_batch() -> None:
    for join in (concat, CONCAT):
        for one in ({}, {"a": np.zeros(1), "b": np.zeros(1)}):
            with pytest.raises(ValueError, match="different keys"):
                join({"a": np.zeros(1)}, one)


UNEQUAL = {
    "dtype": [torch.zeros(2, 1), torch.ones(1, 1).double()],
    "numpy dtype": [np.zeros((2, 1), np.float32), np.ones((1, 1))],
    "tail": [torch.zeros(2, 1), torch.ones(1, 2)],
    "type": [torch.zeros(2, 1), np.ones((1, 1), np.float32)],
    "entry": [{"a": torch.zeros(2)}, {"a": torch.ones(1).double()}],
    "more": [{"a": torch.zeros(2)}, {"a": torch.ones(1), "b": torch.ones(1)}],
    "less": [{"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(1)}],
    "order": [
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        {"b": torch.ones(1), "a": torch.ones(1)},
    ],
    "no rows": [
        {"a": torch.zeros(2), "b": torch.zeros(3)},
        {"a": torch.ones(1), "b": torch.ones(3)},
    ],
    "number": [{"a": torch.zeros(2), "b": 1}, {"a": torch.ones(1), "b": 2}],
    "scalar": [torch.zeros(()), torch.ones(())],
    "other rows shown": [torch.zeros(3).expand(2, 3), torch.ones(3).expand(4, 3)],
    "layout": [torch.zeros(3, 2).t(), torch.zeros(3, 2).t()],
}


@pytest.mark.parametrize("parts", UNEQUAL.values(), ids=UNEQUAL)
def test_what_is_not_of_one_kind_stays_apart(parts: list[Any]) -> None:
    for join, split in ((join_rows, split_rows), (JOIN_ROWS, SPLIT_ROWS)):
        whole = join(parts)
        assert isinstance(whole, Apart)
        again = split(whole, parts)
        assert repr(again) == repr(tuple(parts))
        assert all(a is not b for a, b in zip(again, parts, strict=True))


def test_equal_kinds_are_joined() -> None:
    parts = [
        {"a": torch.zeros(2), "b": np.zeros((2, 3))},
        {"a": torch.ones(1), "b": np.ones((1, 3))},
    ]
    for join in (join_rows, JOIN_ROWS):
        whole = join(parts)
        assert whole["a"].tolist() == [0, 0, 1]
        assert whole["b"].shape == (3, 3)
        shown = join([torch.ones(3).expand(2, 3), torch.ones(3).expand(4, 3)])
        assert (shown.shape, shown.stride()) == ((6, 3), (0, 1))


def test_a_call_on_what_is_apart_is_made_trip_by_trip() -> None:
    seen: list[Any] = []

    def call(weight: Any, x: Any, y: Any) -> Any:
        seen.append((weight, x["far"].tolist(), y.dtype, len(y)))
        return y * 2, weight

    joined = {"far": torch.arange(3.0)}
    y = join_rows([torch.zeros(2), torch.ones(1).double()])
    twice, weights = by_trip(call, (1, 2))(7, joined, y)
    assert seen == [(7, [0.0, 1.0], torch.float32, 2), (7, [2.0], torch.float64, 1)]
    assert [p.dtype for p in twice.parts] == [torch.float32, torch.float64]
    assert weights.parts == (7, 7)
    assert by_trip(call, (1, 2))(7, joined, torch.zeros(3))[1] == 7


def test_the_interpreter_calls_a_graph_trip_by_trip() -> None:
    batch = (("return.0", 0), ("x", 0))
    op = Op(Signature("double", ("w", "x"), batch=batch), lambda w, x: x * w, kind="graph")
    made = op(2, JOIN_ROWS([torch.ones(2), torch.ones(1).double()]))
    assert [(p.dtype, p.tolist()) for p in made.parts] == [
        (torch.float32, [2.0, 2.0]),
        (torch.float64, [2.0]),
    ]
