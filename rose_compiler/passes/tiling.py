"""A batch in groups of shards, and the types of some of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from rose_compiler.ir.facts import Spec

Span = tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """A batch in groups of neighbouring shards: for each group its shards' spans of rows."""

    groups: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(cls, rows: tuple[int, ...], groups: int) -> Tiling:
        """Cut shards of these many rows into groups whose rows are as equal as neighbours allow."""
        ends = list(accumulate(rows))
        spans = [(end - n, end) for n, end in zip(rows, ends, strict=True)]
        count = min(groups, len(rows))
        cut: list[tuple[Span, ...]] = []
        first = 0
        for k in range(count):
            goal = ends[-1] * (k + 1) / count
            last = len(rows) - (count - 1 - k)  # leave a shard for each group that follows
            stop = first + 1
            while stop < last and abs(ends[stop] - goal) <= abs(ends[stop - 1] - goal):
                stop += 1
            stop = len(rows) if k == count - 1 else stop
            cut.append(tuple(spans[first:stop]))
            first = stop
        return cls(tuple(cut))

    @property
    def size(self) -> int:
        """Rows of the whole batch."""
        return self.groups[-1][-1][1]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The rows of each group."""
        return tuple((g[0][0], g[-1][1]) for g in self.groups)

    @property
    def group_rows(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.spans)


def with_rows(spec: Spec | None, rows: int) -> Spec | None:
    """The type of some rows of a value of this type."""
    if spec is None:
        return None
    if spec.kind in ("tensor", "array") and spec.shape:
        return replace(spec, shape=(rows, *spec.shape[1:]))
    if spec.kind in ("tuple", "dict"):
        return replace(spec, items=tuple(with_rows(i, rows) or i for i in spec.items))
    return spec
