"""Abstract values for the walk that finds a block's effects."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.attributes import NOT_STATIC

IMMUTABLE = (
    int,
    float,
    bool,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    np.generic,
    range,
)
MAX_DEPTH = 8
_Kind = type[Any] | None
#: Containers that hold references: changing which ones changes no item.
CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


@dataclass(frozen=True)
class Val:
    """What is known of one expression.

    ``places`` are effect entries of the memory that it is or may share, ``shares`` others that
    overlap it and that no index of it narrows. ``obj`` is the live object, if it is known and stays
    the same. ``items`` are the values of a tuple, by key those of a dict display, and ``each`` is
    what iterating yields. ``modules`` are the live modules whose parameters it lists. ``index`` is
    the parameter of the operation whose integer value it is. ``pending`` are the effects of taking
    the next item of an iterator.
    """

    places: frozenset[str] = frozenset()
    obj: Any = NOT_STATIC
    type: type | None = None
    loaded: bool = True  # False while a path is still being walked (no data read yet)
    items: tuple[Val, ...] | dict[str, Val] | None = None
    each: Val | None = None
    shares: frozenset[str] = frozenset()
    modules: tuple[torch.nn.Module, ...] = ()
    index: str = ""
    pending: Effects | None = field(default=None, compare=False)

    @property
    def static(self) -> bool:
        return self.obj is not NOT_STATIC

    @property
    def all_places(self) -> frozenset[str]:
        """Every state that the value itself, or anything it holds, may be."""
        found = self.places | self.shares
        for each in (*self.parts, *((self.each,) if self.each is not None else ())):
            found |= each.all_places
        return found

    @property
    def parts(self) -> tuple[Val, ...]:
        """The values of ``items``, without their keys."""
        return tuple(self.items.values() if isinstance(self.items, dict) else self.items or ())

    def view(self, kind: _Kind, *, loaded: bool = True) -> Val:
        """A value of this type in the same memory. Rows of a tensor that is a view or a part of
        another one are not that one's rows: no index of it narrows what it touches."""
        places, shares = self.places, self.shares
        if kind is not None and issubclass(kind, (torch.Tensor, np.ndarray)):
            places, shares = frozenset(), places | shares
        return Val(places, NOT_STATIC, kind, loaded, shares=shares)

    def as_list(self) -> Val:
        """A list of values like this one."""
        return Val(type=list, each=self)


FRESH = Val()


@dataclass
class Effects:
    """The result of a walk.

    ``unknown`` names the call, with its line, that made it everything. ``kept`` says which places
    were made to hold a reference to which others, ``inside`` the places whose contents were written
    in place, ``deep`` those of them where that may have changed the memory of an item rather than
    which items a container has. ``results`` says what each variable may share memory with at the
    end, ``backward`` that gradients of a graph were computed.
    """

    reads: dict[str, None] = field(default_factory=dict)
    writes: dict[str, None] = field(default_factory=dict)
    unknown: str = ""
    calls: set[str] = field(default_factory=set)  # kinds of known calls: "draw", "module", ...
    may_raise: bool = False
    kept: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)
    deep: set[str] = field(default_factory=set)
    results: dict[str, frozenset[str]] = field(default_factory=dict)
    kinds: dict[str, type | None] = field(default_factory=dict)  # of the results, where known
    backward: bool = False
    pending: dict[str, Effects] = field(default_factory=dict)  # by variable: iterators made

    def add(self, other: Effects) -> None:
        """Take over the effects of another walk of the same statements."""
        self.reads.update(other.reads)
        self.writes.update(other.writes)
        self.unknown = self.unknown or other.unknown
        self.calls |= other.calls
        self.may_raise |= other.may_raise
        self.kept += other.kept
        self.inside |= other.inside
        self.deep |= other.deep
        self.backward |= other.backward
        self.pending.update(other.pending)
        for name, kind in other.kinds.items():
            self.kinds[name] = kind if self.kinds.get(name, kind) is kind else None
        for name, places in other.results.items():
            self.results[name] = self.results.get(name, frozenset()) | places


def is_tensor(value: Val) -> bool:
    """Whether a value is known to be a tensor of torch or an array of numpy."""
    return value.type is not None and issubclass(value.type, (torch.Tensor, np.ndarray))


def is_immutable(value: Val) -> bool:
    """Whether a value is known to be of a type whose objects never change."""
    return value.type is not None and issubclass(value.type, IMMUTABLE)


def has_plain_items(value: Val) -> bool:
    """Whether the items of a value are immutable: text, numbers, ranges."""
    return value.type is not None and issubclass(value.type, (str, bytes, range, int, float))


def iterated(value: Val) -> Val:
    """What iterating over a value yields."""
    if value.each is not None:
        return value.each
    if has_plain_items(value):
        return Val(type=int if value.type is range else None)
    if isinstance(value.items, tuple) and value.items:
        return joined(list(value.items))
    if isinstance(value.items, dict):
        return FRESH
    if value.type is torch.Tensor or value.type is np.ndarray:
        return Val(value.all_places).view(value.type)
    return Val(value.all_places)


def joined(values: list[Val]) -> Val:
    """One value for any of several."""
    if not values:
        return FRESH
    first = values[0]
    if all(v == first for v in values):
        return first
    # what is None on some way has the type of the others: using it as one raises there
    kinds = {v.type for v in values if v.type is not type(None)} or {type(None)}
    kind = kinds.pop() if len(kinds) == 1 else None
    items = None
    rows = [v.items for v in values if isinstance(v.items, tuple)]
    if len(rows) == len(values) and len({len(r) for r in rows}) == 1:
        items = tuple(joined(list(c)) for c in zip(*rows, strict=True))
    pending = next((v.pending for v in values if v.pending is not None), None)
    each = None
    if all(v.each is not None for v in values):
        each = joined([v.each for v in values if v.each is not None])
    # what one of them is known to hold, and others are not, is still held
    inside = [i for v in values if items is None for i in v.parts]
    inside += [v.each for v in values if each is None and v.each is not None]
    shares = frozenset().union(*(v.shares for v in values), *(i.all_places for i in inside))
    return Val(
        frozenset().union(*(v.places for v in values)),
        NOT_STATIC,
        kind,
        all(v.loaded for v in values),
        items,
        each,
        shares,
        tuple(dict.fromkeys(m for v in values for m in v.modules)),
        pending=pending,
    )


def loaded(value: Val) -> Val:
    """A value whose path has been walked to its end: its data are read."""
    return value if value.loaded else replace(value, loaded=True)


def grads_of(place: str) -> str:
    """The state that holds the gradients of what a place is."""
    if ".params" in place:
        return place.replace(".params", ".grads", 1)
    return f"{place}.grads"
