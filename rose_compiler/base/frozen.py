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
from types import BuiltinFunctionType, FunctionType
from typing import Any

#: The protocol that ``torch.save`` pickles by.
PROTOCOL = 2
#: Pickled as what they are, or by name.
_ATOMS = (*(type(None), type(...), bool, int, float, complex, str, bytes), FunctionType)
_BY_NAME = (type, BuiltinFunctionType)


class Reduced:
    """Stands for an object in a pickle: looks like one of its class there, and is made of the same
    parts."""

    __slots__ = ("_rose_class", "_rose_parts")

    def __init__(self, kind: type) -> None:
        self._rose_class = kind
        self._rose_parts: tuple[Any, ...] = ()

    __class__ = property(lambda self: self._rose_class)

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
        # the originals too, so that no other object gets the address of one
        self.seen: dict[int, tuple[Any, Any]] = {}
        self.storages: dict[int, Any] = {}

    def freeze(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, _BY_NAME):
            return value
        if id(value) in self.seen:
            return self.seen[id(value)][1]
        made: Any
        if kind is list:
            self.keep(value, made := [])
            made.extend(map(self.freeze, value))
        elif kind is dict:
            self.keep(value, made := {})
            made.update((self.freeze(k), self.freeze(v)) for k, v in value.items())
        elif kind is tuple:
            parts = tuple(map(self.freeze, value))
            same = all(a is b for a, b in zip(parts, value, strict=True))
            self.keep(value, made := value if same else parts)
        elif (storage := self.storage(value)) is not None:
            made = storage
        else:
            made = self.reduce(value)
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
            self.storages[plain._cdata] = plain.clone()
        made = self.storages[plain._cdata]
        if not typed:
            return made
        return torch.storage.TypedStorage(wrap_storage=made, dtype=value.dtype, _internal=True)

    def reduce(self, value: Any) -> Any:
        """Any other object, by what it tells pickle of itself."""
        table = copyreg.dispatch_table.get(type(value))
        told: Any = value.__reduce_ex__(PROTOCOL) if table is None else table(value)
        if isinstance(told, str):
            return value  # found again by its name
        made = Reduced(type(value))
        self.keep(value, made)
        given: list[Any] = [*told, *[None] * (5 - len(told))]
        make, args, state, items, pairs, *setter = given
        made._rose_parts = (
            make,
            tuple(map(self.freeze, args)),
            self.freeze(state),
            None if items is None else list(map(self.freeze, items)),
            None if pairs is None else list(map(self.pair, pairs)),
            *setter,
        )
        return made

    def pair(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        return self.freeze(pair[0]), self.freeze(pair[1])
