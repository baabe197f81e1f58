"""Objects as pickling finds them now, to be pickled later: the same bytes, whatever has become of
them.

A checkpoint is written from live parameters. Frozen, it holds copies of all storages and what every
object's own ``__reduce_ex__`` answered when it was frozen, at the same place of the same graph; so
what pickles the frozen form writes what it would have written then. Nothing but pickling can use
one: objects that are not containers are stood for by what they are made of.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Generator
from types import FunctionType
from typing import Any

#: The protocol that ``torch.save`` pickles by.
PROTOCOL = 2
#: Pickled as what they are, or by name.
_ATOMS = (*(type(None), type(...), bool, int, float, complex, str, bytes), FunctionType)

#: Freezes one object: asks for its parts one by one, and returns what stands for it.
_Steps = Generator[Any, Any, Any]


class Reduced:
    """Stands for an object in a pickle: looks like one of its class there, and is made of the same
    parts."""

    __slots__ = ("_rose_class", "_rose_parts")

    def __init__(self, kind: type) -> None:
        self._rose_class = kind
        self._rose_parts: tuple[Any, ...] = ()

    __class__ = property(lambda self: self._rose_class)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pickle insists that what makes an object can be called; it does not call it."""
        raise TypeError("a frozen object can only be pickled")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        make, args, state, items, pairs, *setter = self._rose_parts
        entries = None if items is None else iter(items)
        keyed = None if pairs is None else iter(pairs)
        return (make, args, state, entries, keyed, *setter)


def frozen(value: Any) -> Any:
    """What to hand to ``torch.save`` later for the file that it would write of ``value`` now.

    Raises:
        Exception: what pickling ``value`` raises by itself, such as ``TypeError`` for a lock.
    """
    return _Freezer().freeze(value)


class _Freezer:
    """One object's graph; what occurs twice in it does so in the frozen one."""

    def __init__(self) -> None:
        # the originals too, so that nothing else gets the address of one
        self.seen: dict[int, tuple[Any, Any]] = {}
        self.storages: dict[int, tuple[Any, Any]] = {}

    def freeze(self, value: Any) -> Any:
        """Step by step, with what is under way on a list: objects may be nested as deeply as pickle
        takes them, which goes deeper than calls of Python."""
        stack, made = [self.steps(value)], None
        while stack:
            try:
                part = stack[-1].send(made)
            except StopIteration as done:
                stack.pop()
                made = done.value
                continue
            if type(part) in _ATOMS:
                made = part
            else:
                stack.append(self.steps(part))
                made = None
        return made

    def steps(self, value: Any) -> _Steps:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, type):
            return value
        if id(value) in self.seen:
            return self.seen[id(value)][1]
        made: Any
        if kind is list:
            self.keep(value, made := [])
            for item in value:
                made.append((yield item))
        elif kind is dict:
            self.keep(value, made := {})
            for k, v in value.items():
                key = yield k
                made[key] = yield v
        elif kind is tuple:
            found = []
            for item in value:
                found.append((yield item))
            if id(value) in self.seen:  # it holds itself, and was made inside
                return self.seen[id(value)][1]
            same = all(a is b for a, b in zip(found, value, strict=True))
            self.keep(value, made := value if same else tuple(found))
        elif kind is bytearray:
            self.keep(value, made := bytearray(value))
        elif (storage := self.storage(value)) is not None:
            made = storage
        else:
            made = yield from self.reduce(value)
        return made

    def keep(self, value: Any, made: Any) -> None:
        self.seen[id(value)] = (value, made)

    def storage(self, value: Any) -> Any:
        """A storage's copy, one for all that lie in it; None for anything else."""
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        typed = isinstance(value, torch.storage.TypedStorage)
        if not typed and not torch.is_storage(value):
            return None
        plain = value._untyped_storage if typed else value
        if plain._cdata not in self.storages:
            self.storages[plain._cdata] = plain, plain.clone()
        made = self.storages[plain._cdata][1]
        if not typed:
            return made
        return torch.storage.TypedStorage(wrap_storage=made, dtype=value.dtype, _internal=True)

    def reduce(self, value: Any) -> _Steps:
        """Any other object, by what it tells pickle of itself."""
        table = copyreg.dispatch_table.get(type(value))
        told: Any = value.__reduce_ex__(PROTOCOL) if table is None else table(value)
        if isinstance(told, str):
            return value  # found again by its name
        made = Reduced(type(value))
        self.keep(value, made)
        given: list[Any] = [*told, *[None] * (5 - len(told))]
        make, args, state, items, pairs, *setter = given
        # a bound method, for one, has an object that may change
        maker = yield make
        # what it is made from may occur elsewhere, too
        parts = (yield args) if type(args) is tuple else (yield tuple(args))
        kept = yield state
        entries = None if items is None else (yield list(items))
        keyed = None if pairs is None else (yield list(pairs))
        then = yield setter
        made._rose_parts = (maker, parts, kept, entries, keyed, *then)
        return made
