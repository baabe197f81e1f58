"""Finds what overlaps an interval, among many things that ran one after the other on some lanes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class _Timed(Protocol):
    @property
    def start_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...


T = TypeVar("T", bound=_Timed)


class Intervals(Generic[T]):
    """Items by time; those of one group (a lane, a loop) do not overlap each other."""

    def __init__(self, items: Iterable[T], group: Callable[[T], Hashable]) -> None:
        groups: dict[Hashable, list[T]] = defaultdict(list)
        for item in sorted(items, key=lambda i: i.start_s):
            groups[group(item)].append(item)
        self._groups = [(g, [i.start_s for i in g], [i.end_s for i in g]) for g in groups.values()]

    def overlapping(self, start: float, end: float) -> Iterator[T]:
        """What runs at some time strictly between ``start`` and ``end``."""
        for items, starts, ends in self._groups:
            at = bisect_right(ends, start)
            while at < len(items) and starts[at] < end:
                yield items[at]
                at += 1

    def around(self, start: float, end: float) -> Iterator[T]:
        """What runs from ``start`` or before to ``end`` or after."""
        for items, starts, ends in self._groups:
            at = bisect_right(starts, start) - 1
            if at >= 0 and ends[at] >= end:
                yield items[at]

    def before(self, time: float) -> T | None:
        """What ended last, at ``time`` or earlier."""
        found = []
        for items, _, ends in self._groups:
            at = bisect_right(ends, time) - 1
            if at >= 0:
                found.append(items[at])
        return max(found, key=lambda i: i.end_s, default=None)

    def after(self, time: float) -> T | None:
        """What starts first, at ``time`` or later."""
        found = []
        for items, starts, _ in self._groups:
            at = bisect_left(starts, time)
            if at < len(items):
                found.append(items[at])
        return min(found, key=lambda i: i.start_s, default=None)
