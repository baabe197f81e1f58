"""Which numbers of Python objects code that ran may have read."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.mentions import Mentions
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.numbers import numbers_read
from rose_compiler.frontend.stores import Stores
from tests.frontend.numbered import Around, Thing, mentioned


def found(read: Callable[[Any], Any], thing: Any = None) -> dict[str, Any]:
    """What ``read`` may have read of a thing."""
    thing = Thing() if thing is None else thing
    mentions = mentioned(read, thing)
    numbers = numbers_read(mentions, [thing], StateNames({"t": thing}))
    for each in numbers:
        assert each.now({"t": thing}) == each.value
        assert each.changed({"t": thing}) is None
    assert all((n.steps[-1][0] == "type") == n.where.startswith("the type of") for n in numbers)
    return {n.where: n.value for n in numbers if n.steps[-1][0] != "type"}


WHOLE = {"len(t.parts)": 2, "t.parts[0]": 6, "t.parts[1].rate": 7}
TABLE = {"whether t.table has any": True}
READS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "an attribute": (lambda t: t.rate, {"t.rate": 1}),
    "a method of that name": (lambda t: "".join(t.name), {"t.name": "x"}),
    "of the class": (lambda t: t.kind, {"t.kind": 4}),
    "an entry": (
        lambda t: t.table["a"],
        {**TABLE, "which keys t.table has": ("a",), "t.table['a']": 3, "t.table[7]": 5},
    ),
    "an entry below": (
        lambda t: t.table["b"]["c"],
        {
            **TABLE,
            "whether t.table['b'] has any": True,
            "which keys t.table has": ("b",),
            "which keys t.table['b'] has": ("c",),
            "t.table['b']['c']": 4,
            "t.table[7]": 5,
        },
    ),
    "by getattr": (lambda t: getattr(t, "mean"), {"t.mean": 2}),  # noqa: B009
    "an item": (lambda t: t.parts[1].rate, {"t.rate": 1, **WHOLE}),
    "far below": (lambda t: t.inner.deep.rate, {"t.rate": 1, "t.inner.deep.rate": 8}),
    "nothing": (lambda t: None, {}),
}


@pytest.mark.parametrize("name", READS)
def test_what_code_mentions_counts_as_read(name: str) -> None:
    read, expected = READS[name]
    assert found(read) == expected


def test_a_key_that_is_not_written_out_may_be_any() -> None:
    every = {"t.table['a']": 3, "t.table['b']['c']": 4, "t.table[7]": 5}
    every |= {**TABLE, "whether t.table['b'] has any": True}
    keys = "which keys t.table has", "which keys t.table['b'] has"
    key = "a"
    looked_up = every | dict.fromkeys(keys, ()) | {"key": "a"}
    assert found(lambda t: t.table[key]) == looked_up
    through = found(lambda t: dict(**{k: v for k, v in t.table.items() if k == "a"}))
    assert through == every | {keys[0]: ("a", "b", 7), keys[1]: ("c",)}


def test_a_change_is_told_and_so_is_an_end() -> None:
    thing, mentions = Thing(), Mentions()
    mentions.attributes.update(["rate", "table"])
    mentions.keys.add("a")
    numbers = numbers_read(mentions, [thing], StateNames({"t": thing}))
    thing.table["a"] = 9
    del thing.rate
    told = sorted(filter(None, (n.changed({"t": thing}) for n in numbers)))
    assert told == ["t.rate changed from 1 to nothing", "t.table['a'] changed from 3 to 9"]
    thing.table = {"a": 3.0}
    assert any("from 3 to 3.0" in (n.changed({"t": thing}) or "") for n in numbers), "another type"
    assert numbers[0].changed({"t": Thing()}) is None, "another object of the same values will do"


def test_what_is_not_there_is_reached_by_its_name_alone() -> None:
    thing = SimpleNamespace(rate=1)
    mentions = mentioned(lambda t: hasattr(t, "mean"), thing)
    (absent,) = numbers_read(mentions, [thing], StateNames({"t": thing}))
    assert not Stores(Changes()).reach(absent, {"t": thing})
    assert Stores(Changes(attributes={"mean": {None}})).reach(absent, {"t": thing})


WRITTEN: list[Callable[[Any], Any]] = [
    lambda t: getattr(t, "rate"),  # noqa: B009
    lambda t: getattr(max([t], key=id).inner, "rate", max(1, 2 * id(t))),
    lambda t: (hasattr(t.inner, "rate") and getattr(t, "rate", None)) or getattr(t, "mean", ()),
    lambda t: operator.attrgetter("rate", "inner.rate")(t),
    lambda t: t.it.rate,
]


def test_names_that_are_written_out_are_no_others() -> None:
    inner = SimpleNamespace(rate=1, mean=2)
    thing = SimpleNamespace(it=Around(inner), inner=inner, rate=1)
    for number, read in enumerate(WRITTEN):
        mentions = mentioned(read, thing)
        assert not mentions.any_attribute, number
        assert "rate" in mentions.attributes, number
        assert mentions.looked <= {"rate", "mean", "inner"}, number
