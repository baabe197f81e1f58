"""What was measured, as frozen plain data: times in seconds, activity as a share from 0 to 1.

Every class has ``to_dict`` and ``from_dict``; the dictionaries hold only what JSON can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


class _Plain:
    """``to_dict`` and ``from_dict`` for a frozen dataclass of plain fields."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, nested dataclasses as dictionaries and tuples as lists."""
        data = asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses
        return {key: list(v) if isinstance(v, tuple) else v for key, v in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote; raises ``TypeError`` for a missing or an unknown field."""
        return cls(**data)


@dataclass(frozen=True)
class OpTime(_Plain):
    """What one operation takes each time it runs, over ``count`` runs.

    ``median_s`` and ``p90_s`` are of wall time from start to end on its lane; ``cpu_s``, the
    time its lane's thread kept a core busy, and ``wait_s``, for which the coordinator was
    blocked on it, are medians. Means, which add up over an iteration as medians don't, are
    ``mean_s`` of the wall time, ``work_s`` of the core seconds that all threads and processes
    spent on it, ``launch_s`` from issue, its lane being free, to start, and what the
    coordinator itself spends on an operation of another lane: ``submit_s`` for handing it over,
    ``receive_s`` for taking its result in once it is there. ``activity`` is the share of the
    device busy while it runs. ``label`` is for people, ``path`` names the loops around it,
    ``lane`` is empty for the coordinator.
    """

    op: str
    count: int
    median_s: float
    p90_s: float
    cpu_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    activity: float = 1.0
    label: str = ""
    path: tuple[str, ...] = ()
    lane: str = ""
    submit_s: float = 0.0
    receive_s: float = 0.0
    mean_s: float = 0.0
    work_s: float = 0.0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote."""
        return cls(**{**data, "path": tuple(data.get("path", ()))})


@dataclass(frozen=True)
class Span(_Plain):
    """One run of one operation on one lane.

    ``trip`` holds the trip counts of the loops around it and ``path`` their names, outermost
    first. ``cpu_s`` is how long its lane's thread or process kept a core busy, ``work_s`` the core
    seconds of all threads and processes on its behalf, ``issue_s`` when it was handed to its lane;
    all ``None`` where that was not seen. ``label`` is for people.
    ``site`` is the operation's number in the fault map of the code that ran, -1 where there is
    none. What another process runs spans the time from handing over to taking in; ``ran_s`` is
    when that process itself began and ended, where it says so. ``kind`` is ``"phase"`` for a
    stretch inside an operation that its author named (``rose_compiler.phase``).
    """

    op: str
    lane: str
    start_s: float
    end_s: float
    activity: float = 1.0
    trip: tuple[int, ...] = ()
    site: int = -1
    path: tuple[str, ...] = ()
    cpu_s: float | None = None
    issue_s: float | None = None
    label: str = ""
    ran_s: tuple[float, float] | None = None
    work_s: float | None = None
    kind: str = ""

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return self.end_s - self.start_s

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote."""
        lists: dict[str, Any] = {name: tuple(data.get(name, ())) for name in ("trip", "path")}
        if data.get("ran_s") is not None:
            lists["ran_s"] = tuple(data["ran_s"])
        return cls(**{**data, **lists})


@dataclass(frozen=True)
class LoopTime(_Plain):
    """What one loop takes: how often it runs an iteration, its trips and seconds a run, means."""

    loop: str
    runs: float
    trips: float
    seconds: float


@dataclass(frozen=True)
class Activity(_Plain):
    """The share of a device that was busy over an interval, from 0 to 1.

    ``resident`` tells whether anything was running there at all.
    """

    start_s: float
    end_s: float
    device: str
    share: float
    resident: bool = True


@dataclass(frozen=True)
class Timeline(_Plain):
    """One iteration as it ran: spans in any order, times from the iteration's start.

    ``waits`` are the times in which the coordinator was blocked on another lane, by the operation
    waited for, ``handoffs`` those in which it handed one over; ``loops`` the trips of each loop,
    whose ``trip`` ends in the loop's own count; ``activity`` how busy the devices were; ``phases``
    the named stretches inside operations, labelled with the operation that each ran in.
    """

    spans: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()
    handoffs: tuple[Span, ...] = ()
    loops: tuple[Span, ...] = ()
    activity: tuple[Activity, ...] = ()
    phases: tuple[Span, ...] = ()

    @property
    def duration_s(self) -> float:
        """From the first start to the last end; 0 without spans."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    def lanes(self) -> tuple[str, ...]:
        """The lanes in order of their first span."""
        spans = sorted(self.spans, key=lambda s: s.start_s)
        return tuple(dict.fromkeys(s.lane for s in spans))

    def on_lane(self, lane: str) -> tuple[Span, ...]:
        """The spans of one lane by start."""
        return tuple(sorted((s for s in self.spans if s.lane == lane), key=lambda s: s.start_s))

    def overlap_s(self, lane: str, other: str) -> float:
        """How long both lanes were running something at the same time."""
        return sum(
            max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
            for a in self.on_lane(lane)
            for b in self.on_lane(other)
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as lists of dictionaries."""
        return {
            name: [s.to_dict() for s in getattr(self, name)]
            for name in ("spans", "waits", "handoffs", "loops", "activity", "phases")
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote."""
        spans, waits, handoffs, loops, phases = (
            tuple(Span.from_dict(s) for s in data.get(name, ()))
            for name in ("spans", "waits", "handoffs", "loops", "phases")
        )
        activity = tuple(Activity.from_dict(a) for a in data.get("activity", ()))
        return cls(spans, waits, handoffs, loops, activity, phases)


@dataclass(frozen=True)
class Window(_Plain):
    """An interval of low device activity, and the loop level it lies in.

    ``loop`` names the innermost loop around it, empty outside all loops, and ``level`` counts the
    loops around it. ``activity`` is the mean over the interval. ``idle`` tells "nothing resident"
    from "few SMs or cores busy". ``before`` and ``after`` are the operations at its two ends.
    ``path`` names all loops around it, outermost first, and ``trip`` has their counts.
    ``running`` is what runs in it and ``fits`` what could: work of the program that depends on none
    of that and is no longer.
    """

    start_s: float
    end_s: float
    device: str
    activity: float
    loop: str = ""
    level: int = 0
    idle: bool = False
    before: str | None = None
    after: str | None = None
    path: tuple[str, ...] = ()
    trip: tuple[int, ...] = ()
    running: tuple[str, ...] = ()
    fits: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote."""
        lists = {n: tuple(data.get(n, ())) for n in ("path", "trip", "running", "fits")}
        return cls(**{**data, **lists})

    @property
    def duration_s(self) -> float:
        """From start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Profile(_Plain):
    """A few iterations, measured on one machine.

    ``iteration_s`` has the wall time of each iteration; ``timeline`` is one of them in full.
    ``loops`` has the loops by key.
    """

    machine: str
    iteration_s: tuple[float, ...]
    ops: tuple[OpTime, ...] = ()
    timeline: Timeline | None = None
    windows: tuple[Window, ...] = ()
    loops: tuple[LoopTime, ...] = ()

    def op(self, name: str) -> OpTime:
        """The times of one operation; raises ``KeyError`` if it was not measured."""
        for times in self.ops:
            if times.op == name:
                return times
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries and lists."""
        return {
            "machine": self.machine,
            "iteration_s": list(self.iteration_s),
            "ops": [o.to_dict() for o in self.ops],
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
            "windows": [w.to_dict() for w in self.windows],
            "loops": [one.to_dict() for one in self.loops],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote."""
        timeline = data["timeline"]
        return cls(
            data["machine"],
            tuple(data["iteration_s"]),
            tuple(OpTime.from_dict(o) for o in data["ops"]),
            None if timeline is None else Timeline.from_dict(timeline),
            tuple(Window.from_dict(w) for w in data["windows"]),
            tuple(LoopTime.from_dict(one) for one in data.get("loops", ())),
        )
