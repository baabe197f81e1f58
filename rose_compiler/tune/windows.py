"""Windows: stretches of an iteration in which the device is hardly active, and what could fit.

A window is a run of activity below a threshold, cut where a loop begins or ends, so that it lies on
one level of the program, and where an operation of some length does. Where nothing at all is
resident it is ``idle``, apart from stretches in which few cores or SMs are busy. Windows shorter
than moving work there would cost are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import overload

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rose_compiler.base.marks import key_of
from rose_compiler.base.profile import Activity, Profile, Span, Timeline, Window
from rose_compiler.tune.intervals import Intervals

#: Activity below which a device has room for more.
THRESHOLD = 0.75
#: Seconds below which a window is not worth a hand-over there and back.
LEAST_S = 2e-4
#: What covers less of a window than this does not count as running in it.
COVERS = 0.05

#: Given the path of a window, the keys that run in it, and its seconds: labels of what could.
Fits = Callable[[tuple[str, ...], tuple[str, ...], float], tuple[str, ...]]


class Windows(Sequence[Window]):
    """The windows of one iteration by time; ``print`` shows a table, a line a kind.

    ``iteration_s`` is how long the iteration was.
    """

    def __init__(self, windows: Iterable[Window], iteration_s: float) -> None:
        self._windows = tuple(windows)
        self.iteration_s = iteration_s

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows)

    @overload
    def __getitem__(self, index: int) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> Windows: ...
    def __getitem__(self, index: int | slice) -> Window | Windows:
        if isinstance(index, slice):
            return Windows(self._windows[index], self.iteration_s)
        return self._windows[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Windows):
            return NotImplemented
        return (self._windows, self.iteration_s) == (other._windows, other.iteration_s)

    __hash__ = None  # type: ignore[assignment]

    @property
    def total_s(self) -> float:
        """Seconds of the iteration that lie in windows, all devices together."""
        return sum(w.duration_s for w in self)

    @property
    def unused_s(self) -> float:
        """Seconds of the whole device that the windows leave unused, all devices together."""
        return sum(w.duration_s * (1 - w.activity) for w in self)

    def kinds(self) -> list[Kind]:
        """Windows of the same device, loop, sort and work as one, the longest in all first."""
        groups: dict[tuple[object, ...], list[Window]] = defaultdict(list)
        for w in self:
            groups[w.device, w.path, w.idle, w.running[:1]].append(w)
        found = [Kind(tuple(group)) for group in groups.values()]
        return sorted(found, key=lambda k: -k.total_s)

    def table(self, title: str = "windows of low activity", *, least_share: float = 0.01) -> Table:
        """The kinds of windows as a table for ``rich``; those that are less than ``least_share`` of
        the iteration in all are only counted."""
        table = Table(title=title, title_justify="left")
        devices = list(dict.fromkeys(w.device for w in self))
        if len(devices) > 1:
            table.add_column("device")
        for name in ("where", "what", "windows", "ms each", "ms in all", "share", "active"):
            table.add_column(name, justify="left" if name in ("where", "what") else "right")
        table.add_column("running", overflow="fold")
        table.add_column("could fit", overflow="fold")
        kinds = self.kinds()
        shown = [k for k in kinds if k.total_s >= least_share * self.iteration_s]
        for kind in shown:
            share = kind.total_s / self.iteration_s if self.iteration_s > 0 else 0.0
            table.add_row(
                *([kind.first.device] if len(devices) > 1 else []),
                " > ".join(kind.first.path) or "outside loops",
                "nothing resident" if kind.first.idle else "few busy",
                str(len(kind.windows)),
                f"{1e3 * kind.total_s / len(kind.windows):.2f}",
                f"{1e3 * kind.total_s:.1f}",
                f"{share:.0%}",
                f"{kind.activity:.0%}",
                _some(kind.first.running),
                _some(kind.first.fits) or "-",
            )
        parts = []
        for device in devices:
            own = Windows((w for w in self if w.device == device), self.iteration_s)
            name = f"{device}: " if len(devices) > 1 else ""
            parts.append(
                f"{name}{1e3 * own.total_s:.1f} of {1e3 * self.iteration_s:.1f} ms lie in windows,"
                f" and {1e3 * own.unused_s:.1f} ms of the whole device go unused there"
            )
        table.caption = "; ".join(parts)
        if len(shown) < len(kinds):
            rest = sum(k.total_s for k in kinds) - sum(k.total_s for k in shown)
            table.caption += f"; {len(kinds) - len(shown)} sorts with {1e3 * rest:.1f} ms not shown"
        table.caption_justify = "left"
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        if not self:
            return "no windows of low activity"
        console = Console(width=150, record=True, force_terminal=False, color_system=None)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get().rstrip()


def _some(labels: Sequence[str], most: int = 2) -> str:
    more = f", {len(labels) - most} more" if len(labels) > most else ""
    return escape(", ".join(labels[:most]) + more)


@dataclass(frozen=True)
class Kind:
    """Windows that are alike."""

    windows: tuple[Window, ...]

    @property
    def first(self) -> Window:
        """The longest of them."""
        return max(self.windows, key=lambda w: w.duration_s)

    @property
    def total_s(self) -> float:
        """Seconds of all together."""
        return sum(w.duration_s for w in self.windows)

    @property
    def activity(self) -> float:
        """The mean activity over all of them."""
        return sum(w.duration_s * w.activity for w in self.windows) / max(self.total_s, 1e-12)


def find_windows(
    profile: Profile,
    *,
    threshold: float = THRESHOLD,
    least_s: float = LEAST_S,
    fits: Fits | None = None,
) -> Windows:
    """The windows of a profile's timeline, by time.

    Args:
        threshold: activity, from 0 to 1, below which the device has room.
        least_s: windows shorter than this many seconds are left out.
        fits: what could run in a window (:class:`rose_compiler.tune.fits.Fits`).
    """
    timeline = profile.timeline
    if timeline is None:
        return Windows((), 0.0)
    iteration = profile.iteration_s[-1] if profile.iteration_s else timeline.duration_s
    finder = _Finder(timeline, least_s)
    found: list[Window] = []
    known: dict[tuple[object, ...], tuple[str, ...]] = {}
    for low in _low(timeline.activity, threshold):
        for start, end in finder.cut(low.start_s, low.end_s):
            window, running = finder.window(low, start, end)
            if fits is not None:
                kind = (window.path, running, round(end - start, 4))
                if kind not in known:
                    known[kind] = fits(window.path, running, end - start)
                window = replace(window, fits=known[kind])
            found.append(window)
    return Windows(sorted(found, key=lambda w: w.start_s), iteration)


def loop_runs(timeline: Timeline) -> list[Span]:
    """Each run of each loop, all of its trips together, as one span."""
    found: list[Span] = []
    last: dict[tuple[object, ...], Span] = {}
    for trip in sorted(timeline.loops, key=lambda s: s.start_s):
        key = (trip.path, trip.trip[:-1])
        before = last.get(key)
        if before is not None and trip.trip[-1] > before.trip[-1]:
            last[key] = replace(trip, start_s=before.start_s)
            continue
        if before is not None:
            found.append(before)
        last[key] = trip
    return sorted([*found, *last.values()], key=lambda s: s.start_s)


def _low(activity: Sequence[Activity], threshold: float) -> Iterator[Activity]:
    """Stretches below the threshold, neighbouring ones of the same sort joined, a device a time."""
    devices: dict[str, list[Activity]] = defaultdict(list)
    for one in sorted(activity, key=lambda a: a.start_s):
        devices[one.device].append(one)
    for parts in devices.values():
        open_: Activity | None = None
        for part in parts:
            if part.share >= threshold:
                if open_ is not None:
                    yield open_
                open_ = None
            elif (
                open_ is not None
                and open_.resident == part.resident
                and part.start_s - open_.end_s < 1e-9
            ):
                open_ = replace(open_, end_s=part.end_s)
            else:
                if open_ is not None:
                    yield open_
                open_ = part
        if open_ is not None:
            yield open_


class _Finder:
    """Knows what runs when in one timeline."""

    def __init__(self, timeline: Timeline, least_s: float) -> None:
        self.least_s = least_s
        self.labels = {s.op: s.label or s.op for s in timeline.spans}
        self.spans = Intervals(timeline.spans, lambda s: s.lane)
        # phases in phases: those of one depth do not overlap
        self.phases = Intervals(timeline.phases, lambda s: (s.lane, s.op.count("/")))
        self.runs = Intervals(loop_runs(timeline), lambda s: s.path)
        self.trips = Intervals(timeline.loops, lambda s: s.path)
        self.activity = Intervals(timeline.activity, lambda a: a.device)

    def cut(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The interval in pieces of at least ``least_s``, none of which a loop begins or ends in.

        Where an operation or a named phase of that length begins or ends a piece ends too; what is
        shorter stays with the piece in front of it.
        """
        hard = {start, end, *_edges(self.runs, start, end, 0.0)}
        for left, right in pairwise(sorted(hard)):
            points = [left]
            edges = {
                *_edges(self.spans, left, right, self.least_s),
                *_edges(self.phases, left, right, self.least_s),
            }
            for edge in sorted(edges):
                if edge - points[-1] >= self.least_s:
                    points.append(edge)
            if len(points) > 1 and right - points[-1] < self.least_s:
                points.pop()
            if right - left >= self.least_s:
                yield from pairwise([*points, right])

    def window(self, low: Activity, start: float, end: float) -> tuple[Window, tuple[str, ...]]:
        """The window of a piece, and the keys of what runs in it."""
        path = max((r.path for r in self.runs.around(start, end)), key=len, default=())
        running = self._running(start, end)
        before, after = self.spans.before(start), self.spans.after(end)
        window = Window(
            start,
            end,
            low.device,
            self._mean(low.device, start, end),
            path[-1] if path else "",
            len(path),
            not low.resident,
            None if before is None else self.labels[before.op],
            None if after is None else self.labels[after.op],
            path,
            self._trip(path, start),
            (*(self.labels.get(key, key) for key in running), *self._phases(start, end)),
        )
        return window, running

    def _mean(self, device: str, start: float, end: float) -> float:
        weight = total = 0.0
        for one in self.activity.overlapping(start, end):
            if one.device == device:
                part = min(end, one.end_s) - max(start, one.start_s)
                weight += part
                total += part * one.share
        return total / weight if weight > 0 else 0.0

    def _running(self, start: float, end: float) -> tuple[str, ...]:
        """What ran in an interval, by how much of it was covered."""
        covered: dict[str, float] = defaultdict(float)
        for span in self.spans.overlapping(start, end):
            covered[span.op] += min(end, span.end_s) - max(start, span.start_s)
        ordered = sorted(covered, key=lambda op: -covered[op])
        return tuple(op for op in ordered if covered[op] >= COVERS * (end - start))

    def _phases(self, start: float, end: float) -> tuple[str, ...]:
        """The named phases that ran in an interval, by how much of it they covered."""
        covered: dict[str, float] = defaultdict(float)
        for one in self.phases.overlapping(start, end):
            covered[one.label or one.op] += min(end, one.end_s) - max(start, one.start_s)
        ordered = sorted(covered, key=lambda name: -covered[name])
        return tuple(name for name in ordered if covered[name] >= COVERS * (end - start))

    def _trip(self, path: tuple[str, ...], at: float) -> tuple[int, ...]:
        for trip in self.trips.around(at, at):
            if trip.path == path and at < trip.end_s:
                return trip.trip
        return ()


def _edges(spans: Intervals[Span], start: float, end: float, least_s: float) -> Iterator[float]:
    for span in spans.overlapping(start, end):
        if span.duration_s >= least_s:
            yield from (e for e in (span.start_s, span.end_s) if start < e < end)


def loop_times(timeline: Timeline) -> dict[str, float]:
    """Mean seconds of a run of each loop, by the loop's key."""
    runs: dict[str, list[float]] = defaultdict(list)
    for run in loop_runs(timeline):
        runs[key_of(run.path[:-1], run.path[-1])].append(run.duration_s)
    return {key: sum(times) / len(times) for key, times in runs.items()}
