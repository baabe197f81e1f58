"""What a program may assign while it runs."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch

from rose_compiler.frontend import source
from rose_compiler.frontend.assigning import find_changes


class Settings:
    """Something whose attributes are set by name."""

    def __init__(self) -> None:
        self.rate = 1.0
        self.inner = types.SimpleNamespace(rate=1.0)

    def put(self, name: str, value: Any) -> None:
        setattr(self, name, value)


def by_method(thing: Settings, name: str) -> None:
    thing.put(name, 1.0)


def of_argument(thing: Settings, name: str) -> None:
    setattr(thing, name, 1.0)


def in_namespace(thing: Settings, name: str) -> None:
    vars(thing).update({name: 1.0})


def of_module(thing: Settings, name: str) -> None:
    setattr(torch, name, 1.0)


def of_whatever_is_inside(thing: Settings, name: str) -> None:
    # who knows what was put there by name
    setattr(thing, name, 1.0)
    setattr(thing.inner, name, 1.0)


def of_something(thing: Settings, name: str) -> None:
    for each in (thing, torch):
        setattr(each, name, 1.0)


def of_globals(thing: Settings, name: str) -> None:
    globals().update({name: 1.0})


CASES = [
    (by_method, False),
    (of_argument, False),
    (in_namespace, False),
    (of_module, True),
    (of_whatever_is_inside, True),
    (of_something, True),
    (of_globals, True),
]


@pytest.mark.parametrize(("fn", "modules"), CASES)
def test_an_attribute_set_by_an_unknown_name(
    fn: Callable[[Settings, str], None], modules: bool
) -> None:
    thing = Settings()
    changes = find_changes(source.read(fn), {"thing": thing, "name": "rate"})
    assert changes.attribute(thing, "rate")
    assert changes.attribute(torch, "tanh") == modules


put = setattr


class Annealed:
    """Something with numbers that methods and properties of its class set."""

    def __init__(self, **given: float) -> None:
        for name, value in given.items():
            setattr(self, name, value)
        self.rate, self._hidden, self.steady = 1.0, 1.0, 1.0

    @property
    def shown(self) -> float:
        return self._hidden

    @shown.setter
    def shown(self, value: float) -> None:
        self._hidden = value

    def anneal(self) -> None:
        self.rate *= 0.9

    def again(self) -> None:
        self.__init__()  # type: ignore[misc]


def written_out(thing: Any) -> None:
    for name in ("rate", "other"):
        setattr(thing, name, 1.0)


def in_pairs(thing: Any) -> None:
    for name, value in {"rate": 1.0}.items():
        setattr(thing, name, value)


def by_the_name_of_a_method(thing: Any) -> None:
    operator.methodcaller("anneal")(thing)


def as_an_entry(thing: Any) -> None:
    thing.__dict__["rate"] = 1.0


def through_a_property(thing: Any) -> None:
    thing.shown = 2.0


def in_a_base_class(thing: Any) -> None:
    thing.reset()


KNOWN = [
    (written_out, "rate"),
    (in_pairs, "rate"),
    (by_the_name_of_a_method, "rate"),
    (as_an_entry, "rate"),
    (through_a_property, "_hidden"),
]


@pytest.mark.parametrize(("fn", "name"), KNOWN)
def test_names_that_are_known_leave_the_others(fn: Callable[[Any], None], name: str) -> None:
    thing = Annealed()
    changes = find_changes(source.read(fn), {"thing": thing})
    assert changes.attribute(thing, name)
    assert not changes.attribute(thing, "steady")


def under_another_name(thing: Any) -> None:
    put(thing, "rate", 1.0)


def by_an_attribute(thing: Any) -> None:
    thing.put(thing, "rate", 1.0)


def by_a_variable(thing: Any) -> None:
    set_ = setattr
    set_(thing, "rate", 1.0)


def by_a_partial(thing: Any) -> None:
    functools.partial(setattr, thing)("rate", 1.0)


def as_a_dict(thing: Any) -> None:
    held = thing.__dict__
    held["rate"] = 1.0


def handed_on(thing: Any) -> None:
    operator.setitem(vars(thing), "rate", 1.0)


def another_dict(thing: Any) -> None:
    thing.__dict__ = {"rate": 1.0}


def another_class(thing: Any) -> None:
    thing.__class__ = Settings


def by_any_method(thing: Any, name: str = "anneal") -> None:
    getattr(thing, name)()


def made_again(thing: Any) -> None:
    thing.again()


ALIASES = [
    *(under_another_name, by_an_attribute, by_a_variable, by_a_partial, as_a_dict, handed_on),
    *(another_dict, another_class, by_any_method, made_again),
]


@pytest.mark.parametrize("fn", ALIASES)
def test_an_attribute_set_in_a_roundabout_way(fn: Callable[[Any], None]) -> None:
    thing: Any = Annealed()
    if fn is by_an_attribute:
        thing.put = setattr
    assert find_changes(source.read(fn), {"thing": thing}).attribute(thing, "rate")


class Entries(dict[str, Any]):
    """Has its entries as attributes."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__ = self


def an_entry(thing: Any) -> None:
    thing["rate"] = 1.0


def test_entries_that_are_attributes_may_change() -> None:
    thing = Entries(rate=1.0)
    assert find_changes(source.read(an_entry), {"thing": thing}).attribute(thing, "rate")


class Counted(gymnasium.wrappers.RecordEpisodeStatistics):  # type: ignore[type-arg]
    """A wrapper whose class is the user's, and whose numbers are the library's."""


def test_what_methods_of_a_base_class_set_may_change() -> None:
    thing = Counted(gymnasium.make("CartPole-v1"))
    changes = find_changes(source.read(in_a_base_class), {"thing": thing})
    assert changes.attribute(thing, "episode_count")
    assert not changes.attribute(thing, "env")
