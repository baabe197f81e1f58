"""Numbers that decide what code does may change, wherever they are held."""

from __future__ import annotations

import dataclasses
import enum
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.numbers import numbers_read
from tests.frontend.numbered import Around, Thing, mentioned

DEFAULT = [3.0]


def scaled(value: float = 2.0, *, by: list[float] = DEFAULT) -> float:
    return value * by[0]


def uncalled(value: float = 2.0) -> float:
    return value


vars(uncalled)["rate"] = 1.0


def fetched(of: Any, name: str) -> Any:
    return getattr(of, name)


FETCH, FOUND = getattr, hasattr


def fetched_by_default(of: Any, name: str, fetch: Any = getattr) -> Any:
    return fetch(of, name)


def matched(of: Any) -> Any:
    match of:
        case Rated(rate=rate):
            return rate


def matched_in_order(of: Any) -> Any:
    match of:
        case Rated(rate):
            return rate


@dataclasses.dataclass
class Rated:
    rate: float = 1.0


class Phase(enum.Enum):
    """Settings by phase."""

    MAIN = {"rate": 1.0}  # noqa: RUF012


class Keeping:
    """Keeps the values of an attribute aside."""

    def __init__(self) -> None:
        self.held: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.held.get(instance, 1.0)

    def __set__(self, instance: Any, value: float) -> None:
        self.held[instance] = value


class Kept:
    rate = Keeping()


class Simulated(gymnasium.Env[Any, Any]):
    """A simulator with numbers of its own."""

    kind = 4

    def __init__(self) -> None:
        self.scale = 1


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A simulator around another."""


class Settings:
    """Looks its attributes up."""

    def __init__(self, **held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_held"][name]
        except KeyError:
            raise AttributeError(name) from None


class Base:
    def number(self) -> int:
        return 1


class Derived(Base):
    def number(self) -> int:
        return 2


CHANGED: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Any], Any]]] = {
    "an object goes": (
        lambda t: hasattr(t, "it"),
        SimpleNamespace(it=object()),
        lambda t: delattr(t, "it"),
    ),
    "None in its place": (
        lambda t: t.it is None,
        SimpleNamespace(it=object()),
        lambda t: setattr(t, "it", None),
    ),
    "of another class": (
        lambda t: isinstance(t.it, Derived),
        SimpleNamespace(it=Base()),
        lambda t: setattr(t, "it", Derived()),
    ),
    "a first entry": (
        lambda t: not t.it,
        SimpleNamespace(it={}),
        lambda t: t.it.update(a=object()),
    ),
    "a whole number": (
        lambda t: 3 in t.it,
        SimpleNamespace(it={1: 1}),
        lambda t: t.it.update({3: 1}),
    ),
    "a pair": (
        lambda t: t.it.get(("a", 3)),
        SimpleNamespace(it={}),
        lambda t: t.it.update({("a", 3): 1}),
    ),
    "a key from elsewhere": (
        lambda t: t.key in t.it,
        SimpleNamespace(it={}, key="x"),
        lambda t: t.it.update(x=object()),
    ),
    "of an array": (
        lambda t: float(t.it.max()),
        SimpleNamespace(it=np.ones(3)),
        lambda t: t.it.fill(2.0),
    ),
    "behind a method": (
        lambda t: t.it(),
        SimpleNamespace(it=Thing().rated),
        lambda t: setattr(t.it.__self__, "rate", 2),
    ),
    "another method": (
        lambda t: t.number(),
        Base(),
        lambda t: setattr(t, "number", lambda: 3),
    ),
    "a default": (
        lambda t: scaled(),
        SimpleNamespace(),
        lambda t: DEFAULT.append(1.0),
    ),
    "of a function that is not called": (
        lambda t: t.it.rate,
        SimpleNamespace(it=uncalled),
        lambda t: setattr(t.it, "rate", 2.0),
    ),
    "a default of a function that is not called": (
        lambda t: t.it.__defaults__[0],
        SimpleNamespace(it=uncalled),
        lambda t: setattr(t.it, "__defaults__", (3.0,)),
    ),
    "a function at the other of two places": (
        lambda t: t.one() + t.other(),
        SimpleNamespace(one=scaled, other=scaled),
        lambda t: setattr(t, "other", uncalled),
    ),
    "a name that is handed on": (
        lambda t: fetched(t, "it"),
        SimpleNamespace(it=1),
        lambda t: setattr(t, "it", 2),
    ),
    "names in a list": (
        lambda t: [getattr(t, name) for name in t.names],
        SimpleNamespace(it=1, names=["it"]),
        lambda t: setattr(t, "it", 2),
    ),
    "names in a tuple": (
        lambda t: [getattr(t, name) for name in ("it", "names")],
        SimpleNamespace(it=1, names=[]),
        lambda t: setattr(t, "it", 2),
    ),
    "a name with a default": (
        lambda t: getattr(t, t.names[0], max(1, 2)),
        SimpleNamespace(it=1, names=["it"]),
        lambda t: setattr(t, "it", 2),
    ),
    "by another name for getattr": (
        lambda t: FETCH(t, "r" + "ate"),
        SimpleNamespace(rate=1.0),
        lambda t: setattr(t, "rate", 2.0),
    ),
    "by an attribute that is getattr": (
        lambda t: t.fetch(t, "r" + "ate"),
        SimpleNamespace(rate=1.0, fetch=getattr),
        lambda t: setattr(t, "rate", 2.0),
    ),
    "by a default that is getattr": (
        lambda t: fetched_by_default(t, "r" + "ate"),
        SimpleNamespace(rate=1.0),
        lambda t: setattr(t, "rate", 2.0),
    ),
    "whether it has one, by another name": (
        lambda t: FOUND(t, "r" + "ate"),
        SimpleNamespace(),
        lambda t: setattr(t, "rate", 2.0),
    ),
    "by a pattern": (
        lambda t: matched(t.it),
        SimpleNamespace(it=Rated()),
        lambda t: setattr(t.it, "rate", 2.0),
    ),
    "by a pattern without a name": (
        lambda t: matched_in_order(t.it),
        SimpleNamespace(it=Rated()),
        lambda t: setattr(t.it, "rate", 2.0),
    ),
    "as a dict of all fields": (
        lambda t: [*dataclasses.asdict(t.it).values()],
        SimpleNamespace(it=Rated()),
        lambda t: setattr(t.it, "rate", 2.0),
    ),
    "what a member of an enum holds": (
        lambda t: Phase.MAIN.value["rate"],
        SimpleNamespace(),
        lambda t: Phase.MAIN.value.update(rate=2.0),
    ),
    "what a descriptor keeps": (
        lambda t: t.it.rate,
        SimpleNamespace(it=Kept()),
        lambda t: setattr(t.it, "rate", 2.0),
    ),
    "a name in a path": (
        lambda t: operator.attrgetter("inner.it")(t),
        SimpleNamespace(inner=SimpleNamespace(it=1)),
        lambda t: setattr(t.inner, "it", 2),
    ),
    "of a class, by any name": (
        lambda t: fetched(t.cls, "kind"),
        SimpleNamespace(cls=Thing),
        lambda t: setattr(t, "cls", Around),
    ),
    "of something around it": (
        lambda t: t.it.rate,
        SimpleNamespace(it=Around(SimpleNamespace(rate=1))),
        lambda t: setattr(t.it.inner, "rate", 2),
    ),
    "a private name that is put together": (
        lambda t: getattr(t, "_" + t.name),
        SimpleNamespace(_it=1, name="it"),
        lambda t: setattr(t, "_it", 2),
    ),
    "of a class that looks its attributes up": (
        lambda t: t.it.rate,
        SimpleNamespace(it=Settings(rate=1)),
        lambda t: vars(t.it)["_held"].update(rate=2),
    ),
    "of a simulator": (
        lambda t: t.it.scale,
        SimpleNamespace(it=Simulated()),
        lambda t: setattr(t.it, "scale", 2),
    ),
    "of a simulator's class": (
        lambda t: t.it.kind,
        SimpleNamespace(it=Simulated()),
        lambda t: setattr(t.it, "kind", 5),
    ),
    "of a simulator inside another": (
        lambda t: t.it.unwrapped.scale,
        SimpleNamespace(it=Wrapped(Simulated())),
        lambda t: setattr(t.it.env, "scale", 2),
    ),
    "an attribute that a library's module lacks": (
        lambda t: getattr(t.it, "gain", 1.5),
        SimpleNamespace(it=torch.nn.Tanh()),
        lambda t: setattr(t.it, "gain", 2.0),
    ),
    "a default rate": (
        lambda t: t.it.defaults["lr"],
        SimpleNamespace(it=torch.optim.SGD([torch.ones(1)], lr=0.1)),
        lambda t: t.it.defaults.update(lr=0.2),
    ),
    "an attribute that comes": (
        lambda t: getattr(t, t.names[0], 1.0),
        SimpleNamespace(names=["it"]),
        lambda t: setattr(t, "it", 2.0),
    ),
    "a rate": (
        lambda t: t.it.param_groups[0]["lr"],
        SimpleNamespace(it=torch.optim.SGD([torch.ones(1)], lr=0.1)),
        lambda t: t.it.param_groups[0].update(lr=0.2),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_decides_may_change(name: str) -> None:
    read, thing, change = CHANGED[name]
    mentions = mentioned(read, thing)
    numbers = numbers_read(mentions, [thing], StateNames({"t": thing}))
    assert not [n.where for n in numbers if n.changed({"t": thing})]
    change(thing)
    assert [n.where for n in numbers if n.changed({"t": thing})]
