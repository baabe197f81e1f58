"""Pointwise recurrences on the CPU, a stretch of trips at a time.

Series are computed by numpy into memory that is used again, so that they stay in the cache, and
chains row by row. Sums, products, quotients and comparisons of two numbers have one right result in
IEEE 754, so the bits are those of the user's loop. Where a row holds few elements the calls would
cost more than the sums: those chains run over Python numbers (``scan_scalar``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from rose_compiler.base.recurrence import (
    ROUNDED,
    SAME,
    Item,
    Link,
    Recurrence,
    Step,
    Type,
    arrange,
)
from rose_compiler.kernels import scan_scalar

if TYPE_CHECKING:
    from rose_compiler.kernels.scan_fit import Given

Array = np.ndarray[Any, Any]

#: Elements that one series holds at a time; a few of them fit into a core's cache.
STRETCH = 1 << 17
#: Bytes up to which memory is kept for the next time.
KEPT = 1 << 20

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and_": np.logical_and,
    "or_": np.logical_or,
    "invert": np.logical_not,
}
#: Bytes of memory for series that are kept in all.
KEPT_IN_ALL = 1 << 26


class _Spare(dict[tuple[Any, ...], list[Array]]):
    """Memory for series by shape, handed out and given back; two threads never hold the same. Of
    what is given back, shapes that were not asked for longest go first."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.bytes = 0

    def take(self, key: tuple[Any, ...]) -> Array | None:
        with self.lock:
            found = self.pop(key, [])
            if found:
                self[key] = found  # used last
                array = found.pop()
                self.bytes -= array.nbytes
                return array
            return None

    def give(self, key: tuple[Any, ...], array: Array) -> None:
        with self.lock:
            self.setdefault(key, []).append(array)
            self.bytes += array.nbytes
            while self.bytes > KEPT_IN_ALL:
                oldest = next(iter(self))
                if not self[oldest]:
                    del self[oldest]
                    continue
                self.bytes -= self[oldest].pop().nbytes


_spare = _Spare()


def run(given: Given) -> tuple[torch.Tensor, ...]:
    """Compute every trip, store what it stores; the final carried values."""
    quiet: AbstractContextManager[Any] = np.errstate(all="ignore")
    with torch.no_grad(), quiet:
        made = _Run(given).run()
    # autograd's check for changed tensors does not see numpy write
    changed = [given.inputs[s.source] for s in given.of.stores]
    changed += [given.handed[j] for j in given.of.inplace]
    increment_version([t for t in changed if not t.is_inference()])
    return given.finals(made)


class _Run:
    def __init__(self, given: Given) -> None:
        of = given.of
        self.given, self.of, self.order = given, of, given.order
        self.size = max(1, int(np.prod(given.shape)))
        self.length = min(len(of.trips), max(8, STRETCH // self.size))
        self.forward = of.step > 0
        self.arrays = [
            v.detach().numpy() if isinstance(v, torch.Tensor) else v for v in given.inputs
        ]
        self.dtype = np.float32 if given.dtype == torch.float32 else np.float64
        self.fixed = {k: self._operand(v) for k, v in given.fixed.items()}
        self.number = {k for k, v in given.fixed.items() if not isinstance(v, torch.Tensor)}
        self.borrowed: list[tuple[tuple[Any, ...], Array]] = []
        self.slots = _slots(of, given.kinds)
        self.made: dict[int, Array] = {}  # by slot
        self.shifted: dict[int, Array] = {}  # carried values that are looked at, one row more
        self.direct = _direct(of)
        for j in self.order.previous:
            self.shifted[j] = self._memory((self.length + 1, *given.shape), self.dtype)
        self.carry: list[Array] = [c.detach().numpy() for c in given.carried]
        self.value: dict[int, Array] = {}

    def run(self) -> tuple[torch.Tensor | None, ...]:
        low, high = min(self.of.trips), max(self.of.trips) + 1
        starts = range(low, high, self.length)
        try:
            for start in starts if self.forward else reversed(starts):
                self._stretch(start, min(start + self.length, high))
            return tuple(self._final(j) for j in range(self.of.handed))
        finally:
            for key, array in self.borrowed:
                if array.nbytes <= KEPT:
                    _spare.give(key, array)

    def _stretch(self, low: int, high: int) -> None:
        """The trips with ``low <= t < high``."""
        count = high - low
        self.value = value = dict(self.fixed)
        for k, item in enumerate(self.of.items):
            if item.kind == "row":
                value[k] = self.arrays[item.source][low + item.offset : high + item.offset]
            elif item.kind == "carried" and item.source in self.shifted:
                whole = self.shifted[item.source][: count + 1]
                value[k] = whole[:-1] if self.forward else whole[1:]
                whole[0 if self.forward else -1] = self.carry[item.source]
        for j, last in enumerate(self.of.following):
            if j in self.shifted and self.of.items[last].kind == "row":
                self._after(j, count)[...] = value[last]
        for step in self.order.steps:
            k = step.item
            out = self._out(k, low, high)
            if step.chain < 0:
                value[k] = self._call(self.of.items[k], out)
            else:
                self._chain(step, out)
                value[k] = out
            for j, last in enumerate(self.of.following):
                if last == k and j in self.shifted and value[k] is not self._after(j, count):
                    self._after(j, count)[...] = value[k]
        for store in self.of.stores:
            target = self.arrays[store.source][low + store.offset : high + store.offset]
            if self.direct.get(store.value) != (store.source, store.offset):
                target[...] = value[store.value]
        edge = count - 1 if self.forward else 0
        self.carry = [
            value[last][edge].copy() if high - low < len(self.of.trips) else value[last][edge]
            for last in self.of.following
        ]

    def _after(self, j: int, count: int) -> Array:
        """The rows of a carried value behind each trip."""
        whole = self.shifted[j][: count + 1]
        return whole[1:] if self.forward else whole[:-1]

    def _final(self, j: int) -> torch.Tensor | None:
        if self.given.is_row(j):
            return None
        if j in self.of.inplace:
            self.given.carried[j].detach().numpy()[...] = self.carry[j]
            return self.given.handed[j]
        made = torch.from_numpy(np.array(self.carry[j], dtype=self.dtype))
        return made.reshape(self.given.made_shape(j))

    # -- memory

    def _operand(self, value: Any) -> Any:
        """A value that is the same on all trips, as numpy takes it without widening a result."""
        if isinstance(value, torch.Tensor):
            return value.detach().numpy()
        return self.dtype(value)

    def _memory(self, shape: tuple[int, ...], dtype: Any) -> Array:
        key = (shape, np.dtype(dtype))
        found = _spare.take(key)
        if found is None:
            found = np.empty(shape, dtype)
        self.borrowed.append((key, found))
        return found

    def _out(self, k: int, low: int, high: int) -> Array:
        """Where an item's series goes."""
        place = self.direct.get(k)
        if place is not None:
            source, offset = place
            target: Array = self.arrays[source][low + offset : high + offset]
            return target
        slot = self.slots[k]
        if slot not in self.made:
            dtype = np.bool_ if self.given.kinds[k] == "bool" else self.dtype
            self.made[slot] = self._memory((self.length, *self.given.shape), dtype)
        return self.made[slot][: high - low]

    # -- computing

    def _call(self, item: Item, out: Array) -> Array:
        """One function of whole series."""
        function = item.function
        args = [self.value[a] for a in item.args]
        if function in SAME:
            out[...] = args[0]
        elif function == "float":
            np.copyto(out, args[0], casting="unsafe")
        elif function == "where":
            np.copyto(out, args[2])
            np.copyto(out, args[1], where=args[0])
        elif function in ROUNDED:
            _rounded(function, args, out)
        elif function == "truediv" and item.args[0] in self.number and not self.of.arrays:
            # torch divides a number by a tensor as the product with the reciprocal
            np.divide(self.dtype(1), args[1], out)
            np.multiply(out, args[0], out)
        else:
            _NUMPY[function](*args, out)
        return out

    def _chain(self, step: Step, out: Array) -> None:
        """A carried value from trip to trip."""
        links = [link for link in step.links if link.function not in SAME]
        start = self.carry[step.chain]
        others = [[self.value[a] for a in link.others] for link in links]
        if scan_scalar.fits(links, self.size):
            varies = [[a not in self.fixed for a in link.others] for link in links]
            scan_scalar.chain(links, others, varies, start, out, self.forward)
            return
        count = len(out)
        order = range(count) if self.forward else range(count - 1, -1, -1)
        fixed = [[a in self.fixed for a in link.others] for link in links]
        plain = [_plain(link) for link in links]
        if len(links) == 2 and all(plain):
            self._pair(links, others, fixed, order, start, out)
            return
        at = start
        for i in order:
            row = out[i, ...]
            for link, given, same in zip(links, others, fixed, strict=True):
                now = [g if s else g[i] for g, s in zip(given, same, strict=True)]
                if link.function == "where":
                    # the mask comes first; what is carried stands for one of the arms
                    mask, other = now
                    if at is not row:
                        np.copyto(row, at)
                    np.copyto(row, other, where=mask if link.position == 2 else ~mask)
                elif link.function == "neg":
                    np.negative(at, row)
                elif link.position == 0:
                    _NUMPY[link.function](at, now[0], row)
                else:
                    _NUMPY[link.function](now[0], at, row)
                at = row
            if at is not row:  # a chain of nothing but copies
                np.copyto(row, at)
                at = row

    def _pair(
        self,
        links: list[Link],
        others: list[list[Any]],
        fixed: list[list[bool]],
        order: range,
        start: Array,
        out: Array,
    ) -> None:
        """The usual chain, ``b + a * x``, with the least that can be done on a trip."""
        (one,), (two,) = others
        first, second = _flipped(links[0]), _flipped(links[1])
        rows = list(out)
        ones = [one] * len(rows) if fixed[0][0] else list(one)
        twos = [two] * len(rows) if fixed[1][0] else list(two)
        if not isinstance(rows[0], np.ndarray):  # rows of no axis come out as numbers
            rows, flat = [out[i, ...] for i in range(len(out))], order
        else:
            flat = order
        at = start
        for i in flat:
            row = rows[i]
            first(at, ones[i], row)
            second(row, twos[i], row)
            at = row


@lru_cache(maxsize=256)
def _direct(of: Recurrence) -> dict[int, tuple[int, int]]:
    """Items that are computed where they are stored: by item, the place of its store."""
    read = {i.source for i in of.items if i.kind == "row"}
    return {
        s.value: (s.source, s.offset)
        for s in of.stores
        if of.items[s.value].kind == "call" and s.source not in read
    }


@lru_cache(maxsize=256)
def _slots(of: Recurrence, kinds: tuple[Type, ...]) -> dict[int, int]:
    """Which memory each computed item gets; what nobody needs any more is used again, so that all
    of it stays in the cache."""
    steps, direct = arrange(of).steps, _direct(of)
    kept = {*of.following, *(s.value for s in of.stores)}
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        used = of.items[step.item].args if step.chain < 0 else ()
        for k in (*used, *(o for link in step.links for o in link.others)):
            last[k] = at
    slots: dict[int, int] = {}
    free: dict[Type, list[int]] = {}
    count = 0
    for at, step in enumerate(steps):
        item = of.items[step.item]
        gone = [k for k, end in last.items() if end == at and k in slots and k not in kept]
        # these write their result before they have read all they need
        early = () if step.chain >= 0 or item.function == "where" else gone
        late = [k for k in gone if k not in early]
        for k in early:
            free.setdefault(kinds[k], []).append(slots[k])
        if step.item not in direct:
            same = free.setdefault(kinds[step.item], [])
            if not same:
                same.append(count)
                count += 1
            slots[step.item] = same.pop()
        for k in late:
            free.setdefault(kinds[k], []).append(slots[k])
    return slots


def _plain(link: Link) -> bool:
    return link.function in ("add", "sub", "mul", "truediv") and len(link.others) == 1


def _flipped(link: Link) -> Callable[..., Any]:
    """The function of (carried value, other value, where to)."""
    function = _NUMPY[link.function]
    if link.position == 0 or link.function in ("add", "mul"):
        return function
    return lambda at, other, out: function(other, at, out)


def _rounded(function: str, args: list[Any], out: Array) -> None:
    """Functions that torch computes its own way."""
    target = torch.from_numpy(out)
    given = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a.item() for a in args]
    if function == "clamp_min":
        torch.clamp(given[0], min=given[1], out=target)
    elif function == "clamp_max":
        torch.clamp(given[0], max=given[1], out=target)
    else:
        getattr(torch, function)(*given, out=target)
