"""What a program may assign while it runs."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rose_compiler.frontend import source
from rose_compiler.frontend.changes import find_changes


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
