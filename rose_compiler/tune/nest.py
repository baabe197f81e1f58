"""What a scheduled program launches, as plain nested data, and what each launch costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rose_compiler.base.profile import OpTime, Profile

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
class Cost:
    """Seconds of one operation each time it runs, on cores that it has for itself.

    ``run_s`` is its wall time and ``work_s`` the core seconds spent on it. For one on another lane,
    ``submit_s`` and ``receive_s`` are the coordinator's, and ``launch_s`` is how long after the
    begin of handing it over it begins. ``varies`` are its wall times one after the other, in units
    of ``run_s``: two that wait for each other take the longer of both every time, which is more
    than the longer mean.
    """

    run_s: float
    work_s: float
    submit_s: float = 0.0
    receive_s: float = 0.0
    launch_s: float = 0.0
    varies: tuple[float, ...] = ()

    def run_of(self, trip: int) -> float:
        """Its wall time in one trip."""
        return self.run_s * self.varies[trip % len(self.varies)] if self.varies else self.run_s

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
        """As profiled."""
        runs: dict[str, list[float]] = {}
        for span in () if profile.timeline is None else profile.timeline.spans:
            runs.setdefault(span.op, []).append(span.duration_s)
        found = {}
        for times in profile.ops:
            # evenly over the iteration: they stand for all trips where only some are simulated
            all_ = runs.get(times.op, [])
            step = max(1, len(all_) // SAMPLES)
            seen = all_[::step][:SAMPLES]
            mean = sum(seen) / len(seen) if seen else 0.0
            varies = tuple(s / mean for s in seen) if mean > 0 else ()
            found[times.op] = replace(Cost.of(times), varies=varies)
        return cls(found)

    def __getitem__(self, key: str) -> Cost:
        return self.by_key.get(key, NOTHING)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)
