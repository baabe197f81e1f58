"""One trip of a loop as a recurrence in the making: symbols, items, stores and tests.

The loop variable stays a symbol, so that ``values[t + 1]`` becomes a row at a fixed distance. Tests
on the loop variable are decided for one trip in the middle and kept, so that the caller can tell
for which other trips they come out alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rose_compiler.base.recurrence import (
    ARITHMETIC,
    COMPARISONS,
    LOGIC,
    Input,
    Item,
    NotScan,
    Recurrence,
    Store,
)


@dataclass(frozen=True)
class Number:
    """A number that stands in the statements."""

    value: Any


@dataclass(frozen=True)
class Index:
    """``sign * t + offset`` for the loop variable t; ``sign`` is 1 or -1."""

    sign: int
    offset: int

    def at(self, t: int) -> int:
        return self.sign * t + self.offset


@dataclass(frozen=True)
class Path:
    """A live object: an argument from outside the loop, or what lies below it."""

    argument: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """A tensor, or a number computed in the loop: an item of the recurrence."""

    item: int


@dataclass(frozen=True)
class Filled:
    """A tensor with ``number`` in each place, of type and shape of the item ``like``."""

    number: float
    like: int


@dataclass(frozen=True)
class Global:
    """A function, class or module."""

    found: Any


@dataclass(frozen=True)
class Several:
    """A tuple of symbols."""

    items: tuple[Any, ...]


Symbol = Number | Index | Path | Value | Filled | Global | Several
#: Says of a test for which values of the loop variable it holds.
Test = Callable[[int], bool]


def other_form(why: str, code: str = "unsupported-shape") -> NotScan:
    """The statements have a form that is not followed."""
    return NotScan(code, why)


class Trip:
    """What one trip computes, as items in order, and what it stores.

    ``live(argument, names)`` gives the object at a path, or raises ``LookupError``. ``sample`` is
    the value of the loop variable that decides tests.
    """

    def __init__(self, live: Callable[[Path], Any], sample: int) -> None:
        self.live = live
        self.sample = sample
        self.items: list[Item] = []
        self.inputs: list[Input] = []
        self.stores: list[Store] = []
        self.assumed: dict[int, int] = {}
        self.named: list[tuple[Mapping[str, Any], str, float]] = []  # globals that are numbers
        self.tests: list[tuple[Test, bool]] = []
        self.sign = 0  # of the loop variable in all indices
        self.negative: list[Index] = []  # indices that must not be negative
        self.inplace: set[int] = set()  # carried values whose own memory is changed
        self.changes = 0  # how often that has happened
        self.arrays = False  # functions of numpy are called
        self._gone: set[int] = set()  # items whose tensor holds something else by now
        self._stored_rows: set[int] = set()  # items that are rows, picked after a store to them
        self._memory: dict[int, int] = {}  # items in the memory of a carried value
        self._known: dict[tuple[Item, type], int] = {}

    # -- items

    def item(self, one: Item) -> Value:
        """An item, made once."""
        key = (one, type(one.number))  # 1 and 1.0 are equal, and not the same
        if key not in self._known:
            self._known[key] = len(self.items)
            self.items.append(one)
        return Value(self._known[key])

    def call(self, function: str, *args: Symbol) -> Value:
        if function == "detach":  # where no graph is built it is the tensor itself
            return self.value(args[0])
        args = tuple(self._number_for(n, function, args) for n in range(len(args)))
        given = tuple(self.value(a).item for a in args)
        return self.item(Item("call", function=function, args=given))

    def filled(self, number: float, symbol: Symbol) -> Filled:
        """``zeros_like`` or ``ones_like`` of a tensor."""
        like = self.value(symbol).item
        if not any(self.items[k].kind in ("row", "carried") for k in self._made_of(like)):
            raise other_form("a tensor is made like what may be a number")
        return Filled(number, like)

    def _number_for(self, n: int, function: str, args: tuple[Symbol, ...]) -> Symbol:
        """An operand, a number instead of a tensor that is filled with it: beside a tensor of the
        same type and shape they have the same result. Two numbers would be computed with in double
        precision, and a number over a tensor is a product with the reciprocal."""
        symbol = args[n]
        if not isinstance(symbol, Filled):
            return symbol
        known = function == "where" or function in ARITHMETIC | COMPARISONS
        if not known or (function, n) in (("truediv", 0), ("where", 0)):
            return symbol
        beside = [a for a in (args[3 - n :][:1] if function == "where" else args) if a != symbol]
        if any(isinstance(a, Value) and symbol.like in self._made_of(a.item) for a in beside):
            return Number(symbol.number)
        return symbol

    def _made_of(self, k: int) -> set[int]:
        """An item and those that it has its type and shape of."""
        found: set[int] = set()
        todo = [k]
        while todo:
            k = todo.pop()
            function, args = self.items[k].function, self.items[k].args
            if k not in found and function not in COMPARISONS | LOGIC | {"float"}:
                todo += args[1:] if function == "where" else args
            found.add(k)
        return found

    def value(self, symbol: Symbol) -> Value:
        """A symbol as an operand."""
        if isinstance(symbol, Value):
            if symbol.item in self._gone:
                raise other_form("a tensor is used by a second name after it was changed")
            return symbol
        if isinstance(symbol, Number) and type(symbol.value) in (int, float):
            return self.item(Item("number", number=symbol.value))
        if isinstance(symbol, Path):
            return self.item(Item("input", source=self.input(symbol)))
        raise other_form(f"it computes with {_named(symbol)}")

    def owns(self, symbol: Value) -> bool:
        """Whether a tensor is a carried value's own, so that it may be followed when it changes."""
        return self._carried(symbol) is not None

    def _carried(self, symbol: Value) -> int | None:
        item = self.items[symbol.item]
        return item.source if item.kind == "carried" else self._memory.get(symbol.item)

    def changed(self, old: Value, new: Value) -> Value:
        """A carried tensor holds ``new`` now."""
        position = self._carried(old)
        assert position is not None
        if new.item in self._memory or any(new.item in i.args for i in self.items):
            raise other_form("a tensor is changed to what another one holds")
        self.inplace.add(position)
        self.changes += 1
        self._retire(old.item)
        self._memory[new.item] = position
        return new

    def _retire(self, k: int) -> None:
        """The tensor of an item holds something else from here on; so does what may be that same
        tensor, such as one that has the type already that it is turned into."""
        self._gone.add(k)
        for n, item in enumerate(self.items):
            if item.function == "float" and item.args[0] in self._gone:
                self._gone.add(n)

    def input(self, path: Path) -> int:
        one = Input(path.argument, path.names)
        if one not in self.inputs:
            self.inputs.append(one)
        return self.inputs.index(one)

    def row(self, base: Symbol, index: Index) -> Value:
        """``base[index]``."""
        source = self._place(base, index)
        for store in self.stores:
            if store.source == source and store.offset == index.offset:
                # the row is no other name of what was stored, which may be changed in place
                found = self.call("clone", Value(store.value))
                self._stored_rows.add(found.item)
                return found
        return self.item(Item("row", source=source, offset=index.offset))

    def store(self, base: Symbol, index: Index, symbol: Symbol) -> None:
        """``base[index] = symbol``."""
        value = self.value(symbol)
        source = self._place(base, index)
        if any(s.source == source for s in self.stores):
            raise other_form("it stores to the same buffer twice on a trip")
        self.stores.append(Store(source, index.offset, value.item))
        for k, item in enumerate(self.items):
            # a row that was picked before is a view, and sees what is stored
            if (item.kind, item.source, item.offset) == ("row", source, index.offset):
                self._retire(k)

    def _place(self, base: Symbol, index: Index) -> int:
        if not isinstance(base, Path):
            raise other_form("an element of a row is picked", "cross-element")
        if self.sign not in (0, index.sign):
            raise other_form("it walks some buffers forward and others backward")
        self.sign = index.sign
        self.negative.append(index)
        return self.input(base)

    def recurrence(self, trips: range, following: tuple[int, ...]) -> Recurrence:
        """All that is stored or handed on, over these trips; what only tests use is left out."""
        if any(map(self._is_view, following)) or len({*following}) < len(following):
            raise other_form("what it hands on may be a tensor by a second name", "may-alias")
        seeds = self._seeds(trips.step, len(following))
        if any(self._is_seed(k, len(following)) for k in following):
            raise other_form("a row that it stores is handed on", "may-alias")
        following = (*following, *(self._stored(source) for source, _ in seeds))
        used: set[int] = set()
        todo = [*following, *(s.value for s in self.stores)]
        while todo:
            k = todo.pop()
            if k not in used:
                used.add(k)
                todo += self.items[k].args
        new = {k: n for n, k in enumerate(sorted(used))}
        sources = {self.items[k].source for k in used if self.items[k].kind in ("row", "input")}
        sources |= {s.source for s in self.stores} | set(self.assumed)
        at = {k: n for n, k in enumerate(sorted(sources))}
        items = []
        for k in sorted(used):
            one = self.items[k]
            source = at[one.source] if one.kind in ("row", "input") else one.source
            items.append(replace(one, source=source, args=tuple(new[a] for a in one.args)))
        sign = self.sign or 1
        for position in self.inplace:
            if self._memory.get(following[position]) != position:
                raise other_form("a tensor is changed in place and another one handed on")
        return Recurrence(
            sign * trips.start,
            sign * trips.stop,
            sign * trips.step,
            tuple(self.inputs[k] for k in sorted(sources)),
            tuple(items),
            tuple(new[k] for k in following),
            tuple(replace(s, source=at[s.source], value=new[s.value]) for s in self.stores),
            tuple((at[k], number) for k, number in self.assumed.items()),
            seeds=tuple((at[k], offset) for k, offset in seeds),
            inplace=tuple(sorted(self.inplace)),
            named=tuple(self.named),
        )

    def _is_view(self, k: int) -> bool:
        """Whether an item may be another name of a row or a tensor, of which the forms would hand
        on a copy."""
        item = self.items[k]
        if item.function == "float":  # of booleans it is a new tensor
            return self.items[item.args[0]].function not in COMPARISONS | LOGIC
        return k in self._stored_rows

    def _is_seed(self, k: int, count: int) -> bool:
        return self.items[k].kind == "carried" and self.items[k].source >= count

    def _stored(self, source: int) -> int:
        return next(s.value for s in self.stores if s.source == source)

    def _seeds(self, step: int, count: int) -> list[tuple[int, int]]:
        """Rows that the trip before has stored become carried values; where the first one lies."""
        found: list[tuple[int, int]] = []
        for store in self.stores:
            offset = store.offset - (self.sign or 1) * step
            for k, item in enumerate(self.items):
                if (item.kind, item.source, item.offset) == ("row", store.source, offset):
                    self.items[k] = Item("carried", source=count + len(found))
                    found.append((store.source, offset))
        return found

    # -- integers

    def integer(self, symbol: Symbol) -> Index | int:
        """A symbol as an integer: known, or the loop variable plus or minus a known one."""
        if isinstance(symbol, Index):
            return symbol
        if isinstance(symbol, Number) and type(symbol.value) is int:
            return symbol.value
        if isinstance(symbol, Path):
            return self._number(symbol)
        if isinstance(symbol, Value):
            return self._folded(symbol.item)
        raise other_form(f"{_named(symbol)} is no whole number that is known")

    def _number(self, path: Path) -> int:
        try:
            found = self.live(path)
        except LookupError:
            found = None
        if type(found) is not int:
            raise other_form(f"`{'.'.join(path.names) or 'a value'}` is no whole number known here")
        self.assumed[self.input(path)] = found
        return found

    def _folded(self, k: int) -> int:
        item = self.items[k]
        if item.kind == "number" and type(item.number) is int:
            return item.number
        if item.kind == "input":
            one = self.inputs[item.source]
            return self._number(Path(one.argument, one.path))
        folds: dict[str, Callable[[int, int], int]] = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
        }
        if item.function in folds:
            return folds[item.function](*(self._folded(a) for a in item.args))
        raise other_form("a test or an index hangs on data")


def _named(symbol: object) -> str:
    known: dict[type, str] = {Index: "the loop variable", Several: "a tuple"}
    known[Filled] = "a tensor of zeros or ones that meets none like it"
    return known.get(type(symbol), "an object")
