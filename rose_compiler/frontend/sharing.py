"""Which states lie in the same memory and of what make they are, and a check before each call.

A program takes for granted what each name touches. Below one root an attribute may be bound anew,
or a tensor may be pointed at other memory, without that any object the guards hold is another.
``module.double()`` and ``module.to("cuda")`` do just that and keep the parameters' identity.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch

from rose_compiler.base import gaps
from rose_compiler.frontend.names import MAX_ITEMS, StateNames, callable_only, memory_range
from rose_compiler.frontend.scalar import is_scalar

Relation = dict[str, frozenset[str]]
_Read = Callable[[Any], Any]
_GONE = object()
#: Dtype, device, whether gradients are taken for it, and shape.
Make = tuple[torch.dtype, torch.device, bool, torch.Size, tuple[int, ...]]


def relation_of(names: StateNames) -> Relation:
    """For each name the other names that share a byte with it, or are the same object.

    Names that share with nobody are left out.
    """
    found: dict[str, set[str]] = {}
    open_: list[tuple[int, str]] = []  # ranges that reach behind where the sweep is
    for low, high, name in sorted(names.memory):
        open_ = [(end, other) for end, other in open_ if end > low]
        for _, other in open_:
            if other != name:
                found.setdefault(name, set()).add(other)
                found.setdefault(other, set()).add(name)
        open_.append((high, name))
    for path, links in names.links.items():
        found.setdefault(path, set()).update(links)
    return {name: frozenset(others) for name, others in found.items()}


class Shared:
    """The sharing that a program was captured with, and where its references hang.

    Seeing the same objects in the same places again costs a comparison each. A tensor or array that
    was put in the place of another is compared with the memory of the others; anything else new is
    walked. Names that were not there at capture don't count: the program knows none of them.

    A tensor must also keep its dtype, device and ``requires_grad``. Its shape and strides matter
    where a traced graph holds what was read from it; ``sized`` says for which states. Items of
    sequences, which have no names of their own, are compared in nothing but their memory.
    """

    def __init__(self, names: StateNames) -> None:
        self.known = {*names.names.values(), *(name for *_, name in names.slots)}
        self.relation = self._of_known(names)
        self.makes = _makes(names)
        self.sized: Callable[[], Collection[str]] = tuple
        self.look(names)

    def look(self, names: StateNames) -> None:
        """Take the places for how they are now."""
        self._things: list[tuple[_Read, Any, Any]] = []
        self._leaves: list[tuple[_Read, Any, int, int, Any, bool, str]] = []
        self._arrays: list[tuple[_Read, Any, np.ndarray, str]] = []
        self._lengths = [(value, len(value)) for value, _ in names.lengths]
        self._ids = {*names.names}  # of all that is named, and of dicts that came in since
        for read, key, name in names.slots:
            value = _there(read, key)
            if value is _GONE:
                continue
            if isinstance(value, torch.Tensor):
                self._leaves.append((read, key, *_mark(value), name))
            elif isinstance(value, np.ndarray):
                self._arrays.append((read, key, value, name))
            elif value is None or not _plain(value):
                self._things.append((read, key, value))
        self._memory = list(names.memory)
        relation = relation_of(names)
        self._touched = {*relation, *(o for others in relation.values() for o in others)}

    def changed(self, states: Mapping[str, Any]) -> str | None:
        """What is shared now and was not at capture, or the other way round; or what is a tensor of
        another make."""
        if self._as_it_was():
            return None
        names = StateNames(dict(states))
        for name, made in _makes(names).items():
            if not self._fits(name, made):
                old = self.makes[name]
                return f"{name} changed from a {_told(old, made)} to a {_told(made, old)}"
        found = self._of_known(names)
        if found == self.relation:
            self.look(names)
            return None
        for name in sorted({*found, *self.relation}):
            now, before = (r.get(name, frozenset()) for r in (found, self.relation))
            if now != before:
                other = sorted(now ^ before)[0]
                verb = "shares" if other in now else "no longer shares"
                return f"{name} changed: it {verb} memory with {other}"
        return None

    def _as_it_was(self) -> bool:
        moved: list[int] = []
        try:
            for read, key, thing in self._things:
                if read(key) is not thing:
                    return False
            for read, key, array, _ in self._arrays:
                if read(key) is not array:
                    return False
            for k, (read, key, identity, address, shape, grad, _) in enumerate(self._leaves):
                value = read(key)
                same = id(value) == identity and _wanted(value) == grad
                if not same or (address and (value.data_ptr() != address or value.shape != shape)):
                    moved.append(k)
            for n, (container, length) in enumerate(self._lengths):
                if len(container) != length and not self._grown(n):
                    return False
        except (LookupError, AttributeError, RuntimeError):
            return False
        return not moved or self._alone(moved)

    def _grown(self, n: int) -> bool:
        """Whether a container has changed its length by what shares with nothing: numbers, and new
        dicts of numbers, as a history of what was logged has them."""
        container, length = self._lengths[n]
        if isinstance(container, deque):
            new = list(container)
        elif isinstance(container, list) and len(container) >= length:
            new = container[length:]
        else:
            return False
        for item in new:
            if _plain(item):
                continue
            if type(item) is not dict or id(item) in self._ids or len(container) > MAX_ITEMS:
                return False
            if not all(map(_plain, item.values())):
                return False
            self._ids.add(id(item))
        self._lengths[n] = (container, len(container))
        return True

    def _alone(self, moved: list[int]) -> bool:
        """Whether tensors that took the place of others share memory with nothing, as those did."""
        fresh = []
        elsewhere = {leaf[2] for k, leaf in enumerate(self._leaves) if k not in moved}
        for k in moved:
            read, key, *_, name = self._leaves[k]
            value = read(key)
            if not isinstance(value, torch.Tensor) or not self._fits(name, _make(value)):
                return False
            found = memory_range(value)
            if found is None or name in self._touched or id(value) in elsewhere:
                return False
            elsewhere.add(id(value))
            fresh.append((k, (read, key, *_mark(value), name), (*found, name)))
        gone = {name for *_, (_, _, name) in fresh}
        memory = [m for m in self._memory if m[2] not in gone]
        if len(memory) + len(fresh) != len(self._memory):
            return False  # several lie under one name
        for _, _, (low, high, name) in fresh:
            if any(a < high and low < b for a, b, other in memory if other != name):
                return False
            memory.append((low, high, name))
        for k, leaf, _ in fresh:
            self._leaves[k] = leaf
        self._memory = memory
        return True

    def _fits(self, name: str, made: Make) -> bool:
        """Whether what was captured is right for a tensor of this make."""
        before = self.makes.get(name, made)
        return before[:3] == made[:3] and (before == made or name not in self.sized())

    def _of_known(self, names: StateNames) -> Relation:
        found = relation_of(names)
        kept = {name: o & self.known for name, o in found.items() if name in self.known}
        return {name: others for name, others in kept.items() if others}


def _there(read: _Read, key: Any) -> Any:
    """What stands in a place. Another thread, such as a logger's that has a queue, may have taken
    it out since the place was found: the container's length is another one then, and is seen."""
    try:
        return read(key)
    except (LookupError, AttributeError):
        return _GONE


def _plain(value: Any) -> bool:
    return isinstance(value, np.generic) or is_scalar(value) or callable_only(value)


def _makes(names: StateNames) -> dict[str, Make]:
    """The make of every tensor that has a name for itself, by it."""
    count = Counter(name for *_, name in names.slots)
    several = {name for _, name in names.lengths}
    found = ((name, _there(read, key)) for read, key, name in names.slots if count[name] == 1)
    return {
        name: _make(value)
        for name, value in found
        if isinstance(value, torch.Tensor) and name not in several
    }


def _make(tensor: torch.Tensor) -> Make:
    return tensor.dtype, tensor.device, _wanted(tensor), tensor.shape, gaps.strides_of(tensor)


def _wanted(tensor: torch.Tensor) -> bool:
    """Whether gradients are taken for a tensor itself: a frozen parameter may be thawed."""
    return tensor.requires_grad and tensor.is_leaf


def _told(made: Make, other: Make) -> str:
    dtype, device, wanted, shape, strides = made
    grad = " that requires grad" if wanted and not other[2] else ""
    laid = f" with strides {strides}" if made[:4] == other[:4] else ""
    return f"{str(dtype).removeprefix('torch.')} tensor of {tuple(shape)}{laid} on {device}{grad}"


def _mark(tensor: torch.Tensor) -> tuple[int, int, Any, bool]:
    """What is compared of a tensor: itself, where it starts, its shape, and whether gradients are
    taken for it; an address of 0 where it has no memory of its own."""
    place = 0 if memory_range(tensor) is None else tensor.data_ptr()
    return id(tensor), place, tensor.shape, _wanted(tensor)
