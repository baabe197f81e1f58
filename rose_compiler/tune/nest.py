"""What a scheduled program launches, as plain nested data, and what each launch costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rose_compiler.base.profile import OpTime, Profile, Span, Timeline

#: Wall times of an operation that are kept one by one.
SAMPLES = 64

What = Literal["run", "submit", "wait", "loop"]


@dataclass(frozen=True)
class Step:
    """One thing that a body's coordinator does, in issue order.

    It runs the operation ``key``, hands it to ``lane`` (``submit``), waits for it, or runs the loop
    ``inner``. What has ``stage`` s runs s trips later than its own. ``times`` is how often it runs
    a trip, below 1 in an arm of a branch.
    """

    what: What
    key: str
    lane: str = ""
    stage: int = 0
    times: float = 1.0
    inner: Nest | None = None


@dataclass(frozen=True)
class Nest:
    """A body: the whole program (empty ``key``, one trip), or a loop with its trips a run."""

    key: str
    steps: tuple[Step, ...]
    trips: float = 1.0

    @property
    def depth(self) -> int:
        """Over how many further trips the stages spread."""
        return max((s.stage for s in self.steps), default=0)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes other than the coordinator that the body itself hands work to."""
        return tuple(dict.fromkeys(s.lane for s in self.steps if s.what == "submit"))

    def walk(self) -> Iterator[Nest]:
        """This body and those of all loops below, outermost first."""
        yield self
        for step in self.steps:
            if step.inner is not None:
                yield from step.inner.walk()

    def name(self) -> str:
        """The loop's own name; ``iteration`` for the whole."""
        return self.key.rpartition("/")[2] or "iteration"


@dataclass(frozen=True)
class HandOver:
    """Seconds that one run on another lane adds: the coordinator's for handing it over, from the
    begin of that to its own begin, and the coordinator's for taking it in once it is there."""

    submit_s: float
    launch_s: float
    receive_s: float


@dataclass(frozen=True)
class Cost:
    """Seconds of one operation each time it runs, on cores that it has for itself.

    ``run_s`` is its wall time and ``work_s`` the core seconds spent on it. For one on another lane,
    ``submit_s`` and ``receive_s`` are the coordinator's, and ``launch_s`` is how long after the
    begin of handing it over it begins. ``varies`` are its wall times one after the other, in units
    of ``run_s``, and ``handed`` what it took to hand it over each time: two that wait for each
    other take the longer of both every time, which is more than the longer mean.
    """

    run_s: float
    work_s: float
    submit_s: float = 0.0
    receive_s: float = 0.0
    launch_s: float = 0.0
    varies: tuple[float, ...] = ()
    handed: tuple[HandOver, ...] = ()

    def run_of(self, trip: int) -> float:
        """Its wall time in one trip."""
        return self.run_s * self.varies[trip % len(self.varies)] if self.varies else self.run_s

    def handed_in(self, trip: int) -> HandOver:
        """What it takes to hand it over and to take it in, in one trip."""
        if self.handed:
            return self.handed[trip % len(self.handed)]
        return HandOver(self.submit_s, self.launch_s, self.receive_s)

    @property
    def demand(self) -> float:
        """Cores busy while it runs."""
        return self.work_s / self.run_s if self.run_s > 0 else 0.0

    @classmethod
    def of(cls, times: OpTime) -> Cost:
        """As profiled."""
        return cls(times.mean_s, times.work_s, times.submit_s, times.receive_s, times.launch_s)


NOTHING = Cost(0.0, 0.0)


@dataclass(frozen=True)
class Costs(Mapping[str, Cost]):
    """Costs by key; an operation that was not profiled costs nothing."""

    by_key: Mapping[str, Cost] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile) -> Costs:
        """As profiled: means, and how they varied over the trips of the iteration whose timeline
        is there."""
        line = profile.timeline or Timeline()
        free = _free(line.spans)
        runs, waits, submits = (_by_op(s) for s in (line.spans, line.waits, line.handoffs))
        found = {}
        for times in profile.ops:
            all_ = runs.get(times.op, [])
            spans = _some(all_)
            mean = sum(s.duration_s for s in spans) / len(spans) if spans else 0.0
            varies = tuple(s.duration_s / mean for s in spans) if mean > 0 else ()
            handed: tuple[HandOver, ...] = ()
            issued, awaited = submits.get(times.op, []), waits.get(times.op, [])
            if len(all_) == len(issued) == len(awaited):
                trips = zip(spans, _some(issued), _some(awaited), strict=True)
                handed = tuple(_handed(s, i, w, free[id(s)]) for s, i, w in trips)
            found[times.op] = replace(Cost.of(times), varies=varies, handed=handed)
        return cls(found)

    def __getitem__(self, key: str) -> Cost:
        return self.by_key.get(key, NOTHING)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)


def _by_op(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.op, []).append(span)
    return found


def _some(spans: Sequence[Span]) -> Sequence[Span]:
    """:data:`SAMPLES` of them at most, evenly over the iteration: they stand for all trips where
    only some are simulated."""
    return spans[:: max(1, len(spans) // SAMPLES)][:SAMPLES]


def _free(spans: Iterable[Span]) -> dict[int, float]:
    """Since when its lane was free as each span began, by ``id``."""
    ends: dict[str, float] = {}
    found = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        found[id(span)] = min(ends.get(span.lane, float("-inf")), span.start_s)
        ends[span.lane] = span.end_s
    return found


def _handed(span: Span, issued: Span, awaited: Span, free_s: float) -> HandOver:
    """How one run was handed over to a lane, free since ``free_s``, and taken in."""
    began = max(issued.start_s, free_s)
    received = awaited.end_s - max(awaited.start_s, span.end_s)
    return HandOver(issued.duration_s, max(0.0, span.start_s - began), max(0.0, received))
