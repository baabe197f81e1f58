"""Which numbers of Python objects code that ran may have read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rose_compiler.frontend.mentions import Mentions
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.numbers import numbers_read


class Thing:
    """Something with all kinds of numbers."""

    kind = 4

    def __init__(self) -> None:
        self.rate = 1
        self.mean = 2
        self.table = {"a": 3, "b": {"c": 4}, 7: 5}
        self.parts = [6, SimpleNamespace(rate=7)]
        self.inner = SimpleNamespace(deep=SimpleNamespace(rate=8))
        self.name = "x"
        self.long = list(range(1000))


def found(read: Callable[[Any], Any], thing: Any = None) -> dict[str, Any]:
    """What ``read`` may have read of a thing."""
    thing = Thing() if thing is None else thing
    mentions = Mentions()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            mentions.add(frame)

    sys.setprofile(note)
    try:
        read(thing)
    finally:
        sys.setprofile(None)
    numbers = numbers_read(mentions, [thing], StateNames({"t": thing}))
    for each in numbers:
        assert each.now({"t": thing}) == each.value
        assert each.changed({"t": thing}) is None
    return {n.where: n.value for n in numbers}


WHOLE = {"len(t.parts)": 2, "t.parts[0]": 6, "t.parts[1].rate": 7}
READS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "an attribute": (lambda t: t.rate, {"t.rate": 1}),
    "a method of that name": (lambda t: "".join(t.name), {"t.name": "x"}),
    "of the class": (lambda t: t.kind, {"t.kind": 4}),
    "an entry": (
        lambda t: t.table["a"],
        {"which keys t.table has": ("a",), "t.table['a']": 3, "t.table[7]": 5},
    ),
    "an entry below": (
        lambda t: t.table["b"]["c"],
        {
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
    keys = "which keys t.table has", "which keys t.table['b'] has"
    key = "a"
    looked_up = every | dict.fromkeys(keys, ()) | {"key": "a"}
    assert found(lambda t: t.table[key]) == looked_up
    through = found(lambda t: dict(**{k: v for k, v in t.table.items() if k == "a"}))
    assert through == every | {keys[0]: ("a", "b"), keys[1]: ("c",)}


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
