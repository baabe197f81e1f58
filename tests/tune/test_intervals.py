"""Looking up what overlaps an interval."""

from __future__ import annotations

import random

from rose_compiler.base.profile import Span
from rose_compiler.tune.intervals import Intervals


def test_it_finds_what_a_search_through_all_finds() -> None:
    draw = random.Random(0)
    spans = []
    for lane in "abc":
        at = 0.0
        for k in range(60):
            start = at + draw.choice([0.0, 0.5, 1.0])
            at = start + draw.choice([0.5, 1.0, 2.0])
            spans.append(Span(f"{lane}{k}", lane, start, at))
    draw.shuffle(spans)
    index = Intervals(spans, lambda s: s.lane)
    for _ in range(300):
        start = draw.randrange(0, 200) / 2
        end = start + draw.choice([0.0, 0.5, 3.0])
        overlapping = {s for s in spans if s.end_s > start and s.start_s < end}
        assert set(index.overlapping(start, end)) == overlapping
        around = {s for s in spans if s.start_s <= start and s.end_s >= end}
        if end > start:
            assert set(index.around(start, end)) == around
        before = [s.end_s for s in spans if s.end_s <= start]
        found = index.before(start)
        assert (None if found is None else found.end_s) == max(before, default=None)
        after = [s.start_s for s in spans if s.start_s >= end]
        found = index.after(end)
        assert (None if found is None else found.start_s) == min(after, default=None)


def test_nothing_overlaps_nothing() -> None:
    empty: Intervals[Span] = Intervals((), lambda s: s.lane)
    assert list(empty.overlapping(0.0, 1.0)) == []
    assert empty.before(1.0) is None
    assert empty.after(1.0) is None
