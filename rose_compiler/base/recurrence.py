"""Pointwise recurrences over a loop variable, as plain frozen data.

A :class:`Recurrence` says what each trip of a loop computes, element by element: values read at
``buffer[t + offset]``, what the last trip handed on, calls of pointwise functions on them, and what
is stored. :func:`arrange` finds how all trips can be computed at once: everything that doesn't hang
on a carried value as whole series, each carried value as a chain of operations that its last value
enters at one end, ``x -> b[t] + a[t] * x``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

#: Functions of two numbers or tensors that IEEE 754 fixes to the last bit.
ARITHMETIC = frozenset(("add", "sub", "mul", "truediv"))
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))
LOGIC = frozenset(("and_", "or_", "invert"))
#: Functions that hand on the value they are given.
SAME = frozenset(("clone", "detach"))
#: Functions whose last bits, or whose zero's sign, hang on who computes them.
ROUNDED = frozenset(
    ("clamp_min", "clamp_max", "exp", "log", "maximum", "minimum", "sigmoid", "sqrt", "tanh")
)
FUNCTIONS = ARITHMETIC | COMPARISONS | LOGIC | SAME | ROUNDED | {"neg", "where", "float"}

#: Columns that a new form of a recurrence is tried on beside another one, and what is left over.
PROVEN = 64

Kind = Literal["row", "input", "number", "carried", "call"]
#: What an item is: a plain number, a tensor of the recurrence's type, of booleans, of another type.
Type = Literal["number", "value", "bool", "other"]


@dataclass(frozen=True)
class Input:
    """An argument of the operation, or what lies below one: ``path`` holds attribute names."""

    argument: int
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """One value of a trip.

    ``"row"``: ``inputs[source][t + offset]``; ``"input"``: ``inputs[source]``, the same on every
    trip; ``"number"``: a constant; ``"carried"``: what the trip before made of carried value
    ``source``; ``"call"``: a function of :data:`FUNCTIONS` of earlier items.
    """

    kind: Kind
    source: int = 0
    offset: int = 0
    number: float = 0
    function: str = ""
    args: tuple[int, ...] = ()


@dataclass(frozen=True)
class Store:
    """``inputs[source][t + offset] = items[value]``."""

    source: int
    offset: int
    value: int


@dataclass(frozen=True, eq=False)  # what is found out about one is kept by identity
class Recurrence:
    """What the trips ``range(start, stop, step)`` of a loop do, ``step`` 1 or -1.

    Arguments begin with the initial carried values. ``following[j]`` is the item that carried value
    ``j`` becomes. ``assumed`` holds inputs and the integers they must be for this form to hold.
    ``seeds`` are for carried values behind those: the first is row ``start + offset`` of an input,
    and nobody asks for the last. ``inplace`` are the carried values that keep the memory of their
    first tensor. ``named`` are globals of a module that are numbers, and the ones they must be.
    With ``bounds`` the operation's last three arguments are those of the loop, and must be these;
    ``ends`` are trips in front and behind that are not like the others. ``bitwise`` asks for the
    bits of the loop on every device. ``text`` shows it to a reader. ``parts``, where there are any,
    are all trips in order: those at the ends as recurrences of one trip each, and those in between.
    With ``arrays`` rows are those of numpy's arrays.
    """

    start: int
    stop: int
    step: int
    inputs: tuple[Input, ...]
    items: tuple[Item, ...]
    following: tuple[int, ...]
    stores: tuple[Store, ...]
    assumed: tuple[tuple[int, int], ...] = ()
    seeds: tuple[tuple[int, int], ...] = ()
    inplace: tuple[int, ...] = ()
    named: tuple[tuple[Mapping[str, object], str, float], ...] = ()
    bounds: tuple[int, int, int] | None = None
    ends: tuple[int, int] = (0, 0)
    bitwise: bool = False
    text: tuple[str, ...] = ()
    parts: tuple[Recurrence, ...] = ()
    arrays: bool = False

    @property
    def trips(self) -> range:
        """The values of the loop variable, in order."""
        return range(self.start, self.stop, self.step)

    @property
    def handed(self) -> int:
        """How many carried values the loop takes and returns."""
        return len(self.following) - len(self.seeds)

    @cached_property
    def touched(self) -> tuple[int, ...]:
        """The inputs that rows are read from or stored to."""
        read = {i.source for i in self.items if i.kind == "row"}
        return tuple(sorted(read | {s.source for s in self.stores}))

    def tried(self, size: int) -> int:
        """Of rows of ``size`` elements as many as are computed both ways when a form is new: one
        block and what is left over of the last one."""
        return size if size <= 2 * PROVEN else PROVEN + size % PROVEN

    @property
    def exact(self) -> bool:
        """Whether the bits are the same whoever computes it."""
        return all(i.function not in ROUNDED for i in self.items)


@dataclass(frozen=True)
class Link:
    """One operation of a chain: ``function`` with the chain's value at ``position``."""

    function: str
    position: int
    others: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """Compute an item for all trips, or, with ``links``, the recurrent carried value ``chain``."""

    item: int = -1
    chain: int = -1
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Arrangement:
    """All of a recurrence in an order that can be computed, one step after the other.

    ``invariant`` are the items that are the same on all trips, in order. ``previous`` are the
    carried values that somebody besides their own chain looks at.
    """

    invariant: tuple[int, ...]
    steps: tuple[Step, ...]
    previous: frozenset[int]


class NotScan(Exception):
    """A recurrence is none that can be computed at once; ``code`` is that of a remark."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


#: Where a chain's value may stand among the arguments of a function.
_POSITIONS: dict[str, tuple[int, ...]] = {
    "add": (0, 1),
    "mul": (0, 1),
    "sub": (0, 1),
    "truediv": (0,),
    "neg": (0,),
    "where": (1, 2),
    "clone": (0,),
    "detach": (0,),
}


def arrange(of: Recurrence) -> Arrangement:
    """How to compute all trips at once.

    Raises:
        NotScan: ``not-affine`` where a carried value enters otherwise than by sums and products
            with other values, or several hang on each other.
    """
    return _Arranger(of).run()


class _Arranger:
    def __init__(self, of: Recurrence) -> None:
        self.of = of
        self.uses: list[frozenset[int]] = []  # carried values that an item hangs on, in its trip
        self.varies: list[bool] = []
        for item in of.items:
            inner = frozenset().union(*(self.uses[a] for a in item.args))
            own = frozenset((item.source,)) if item.kind == "carried" else frozenset()
            self.uses.append(inner | own)
            self.varies.append(
                item.kind in ("row", "carried") or any(self.varies[a] for a in item.args)
            )
        self.steps: list[Step] = []
        self.done: set[int] = set()
        self.chained: dict[int, tuple[Link, ...]] = {}
        self.made_by: dict[int, int] = {}  # the item that a chain ends in -> carried value
        self.previous: set[int] = set()
        self.open: set[int] = set()

    def run(self) -> Arrangement:
        for j, last in enumerate(self.of.following):
            if not self.varies[last]:
                raise NotScan("unsupported-shape", "what it carries is the same on every trip")
            if j in self.uses[last]:
                self.chained[j] = tuple(self.links(j))
                self.made_by[last] = j
        self._no_cycles()
        for store in self.of.stores:
            self.need(store.value)
        for last in self.of.following:
            self.need(last)
        invariant = tuple(k for k in range(len(self.of.items)) if not self.varies[k])
        return Arrangement(invariant, tuple(self.steps), frozenset(self.previous))

    def links(self, j: int) -> Iterator[Link]:
        """The chain of one carried value, from its last value to the next."""
        found: list[Link] = []
        at = self.of.following[j]
        while self.of.items[at].kind != "carried":
            item = self.of.items[at]
            inside = [p for p, a in enumerate(item.args) if j in self.uses[a]]
            if len(inside) > 1 or inside[0] not in _POSITIONS.get(item.function, ()):
                raise NotScan("not-affine", f"what is carried goes into `{item.function}`")
            others = tuple(a for p, a in enumerate(item.args) if p != inside[0])
            found.append(Link(item.function, inside[0], others))
            at = item.args[inside[0]]
        return reversed(found)

    def _no_cycles(self) -> None:
        """Carried values may hang on others, not on each other."""
        count = len(self.of.following)
        below = [self.uses[last] - {j} for j, last in enumerate(self.of.following)]
        left = set(range(count))
        while left:
            free = {j for j in left if not below[j] & left}
            if not free:
                raise NotScan("not-affine", f"{len(left)} carried values hang on each other")
            left -= free

    def need(self, k: int) -> None:
        """Let an item be computed, and what it is computed from before."""
        if k in self.done or not self.varies[k]:
            return
        item = self.of.items[k]
        if k in self.made_by:
            self._chain(self.made_by[k])
        elif item.kind == "carried":
            self.previous.add(item.source)
            self.need(self.of.following[item.source])
        else:
            for a in item.args:
                self.need(a)
            if item.kind == "call":
                self.steps.append(Step(item=k))
        self.done.add(k)

    def _chain(self, j: int) -> None:
        links = self.chained[j]
        for link in links:
            for other in link.others:
                self.need(other)
        self.steps.append(Step(item=self.of.following[j], chain=j, links=links))


def types(of: Recurrence, inputs: Sequence[Type]) -> tuple[Type, ...]:
    """What each item is, if inputs are what is told and carried values are ``"value"``.

    Raises:
        NotScan: where types meet that would make others than the recurrence's own.
    """
    found: list[Type] = []
    for item in of.items:
        if item.kind == "number":
            found.append("number")
        elif item.kind == "carried":
            found.append("value")
        elif item.kind in ("row", "input"):
            found.append(inputs[item.source])
        else:
            found.append(_result(item.function, [found[a] for a in item.args]))
    for last in of.following:
        if found[last] != "value":
            raise NotScan("unsupported-shape", "what it carries changes its type")
    for store in of.stores:
        if found[store.value] != "value" or inputs[store.source] != "value":
            raise NotScan("unsupported-shape", "it stores values of another type")
    return tuple(found)


def _result(function: str, args: list[Type]) -> Type:
    given = set(args)
    numbers: bool = given <= {"number", "value"}
    if function in ("maximum", "minimum"):
        if given == {"value"}:
            return "value"
    elif function in ARITHMETIC or function == "neg":
        if numbers:
            return "value" if "value" in given else "number"
    elif function in COMPARISONS:
        if numbers and "value" in given:
            return "bool"
    elif function in LOGIC:
        if given == {"bool"}:
            return "bool"
    elif function == "where":
        if args[0] == "bool" and {*args[1:]} <= {"number", "value"} and "value" in args[1:]:
            return "value"
    elif function == "float":
        if "number" not in given:
            return "value"
    elif function in SAME:
        if "number" not in given:
            return args[0]
    elif args[0] == "value" and given <= {"number", "value"}:
        return "value"
    raise NotScan("unsupported-shape", f"`{function}` of {' and '.join(args)} has another type")
