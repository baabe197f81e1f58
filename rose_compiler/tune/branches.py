"""A profiled iteration as a graph of branches, and quotas for its lanes from that alone.

A profile shows when each operation ran and how much of the device it kept busy, under the quotas
of that iteration only. So two things are taken from it that more measurements would replace: an
operation waits for whatever had ended on other lanes before it began, and it gets slower once it
has less of the device than it kept busy, in proportion.

Where lanes had more threads than there are cores, times of that iteration say little: at the
barriers of OpenMP a thread spins until the others have had their turn on a core, and what spins
looks like work. What an operation takes is then taken from iterations in program order, in which
nothing ran beside it, with several numbers of cores: a response is fitted to these points.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rose_compiler.base.machine import Task
from rose_compiler.base.profile import Profile, Timeline
from rose_compiler.base.quota import COORDINATOR
from rose_compiler.tune.critical import lane_slack, timing
from rose_compiler.tune.response import Response, fit
from rose_compiler.tune.slack import WORTH, Planner, apportion

#: Share of an operation's time that its start may lie before the end of what it waited for: clocks
#: of different processes are read one after the other.
_EARLY = 0.02


@dataclass(frozen=True)
class Branches:
    """Tasks by lane with what they waited for, and each one's response to a quota in chunks."""

    tasks: tuple[Task, ...]
    curves: Mapping[str, Response]

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes in order of their first task."""
        return tuple(dict.fromkeys(task.lane for task in self.tasks))


#: Responses of operations by key: in cores, of what nothing ran beside, or in chunks of SMs.
Alone = Mapping[str, Response]


def alone_in(profiles: Mapping[int, Sequence[Profile]]) -> Alone:
    """Responses fitted to profiles in program order, by the number of cores of each side.

    Of several profiles with one number the shortest time counts: disturbances only add.
    """
    points: dict[str, dict[int, float]] = {}
    for count, found in profiles.items():
        for one in (op for profile in found for op in profile.ops):
            known = points.setdefault(one.op, {})
            known[count] = min(known.get(count, math.inf), one.median_s)
    return {op: fit([*known.items()]) for op, known in points.items()}


def responses(
    measured: Sequence[tuple[Mapping[str, int] | None, Timeline]], chunks: int = 0
) -> Alone:
    """Responses fitted to iterations under other quotas each, in chunks by lane.

    In one without any, None, an operation has of the ``chunks`` of the device what it keeps busy,
    which is a little other in each run, so that its medians are one point: as others ran beside it
    there, that counts only until two others are known.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    shared: dict[str, list[tuple[float, float]]] = {}
    for quotas, timeline in measured:
        taken: dict[tuple[str, float | None], list[tuple[float, float]]] = {}
        for span in timeline.spans:
            lane = span.lane or COORDINATOR
            if quotas is None:
                units = max(1e-3, span.activity) * chunks
            elif lane in quotas:
                units = float(quotas[lane])
            else:
                continue
            key = span.op, None if quotas is None else units
            taken.setdefault(key, []).append((units, span.duration_s))
        into = shared if quotas is None else points
        for (op, _), runs in taken.items():
            units, seconds = (statistics.median(each) for each in zip(*runs, strict=True))
            into.setdefault(op, []).append((units, seconds))
    for op, found in shared.items():
        if len({units for units, _ in points.get(op, ())}) < 2:
            points.setdefault(op, []).extend(found)
    return {op: fit(found) for op, found in points.items()}


def branches(timeline: Timeline, chunks: int, alone: Alone | None = None) -> Branches:
    """The graph of one iteration on a device of so many chunks.

    With ``alone``, an operation is planned with the response that was measured of it: what it takes
    by itself on cores, a chunk being a core, since quotas end the fight for them.
    """
    spans = sorted(timeline.spans, key=lambda s: (s.start_s, s.end_s))
    ended: dict[str, tuple[list[float], list[str]]] = {}
    tasks: list[Task] = []
    curves: dict[str, Response] = {}
    for number, span in enumerate(spans):
        lane, name = span.lane or COORDINATOR, f"{number} {span.label or span.op}"
        latest = span.start_s + _EARLY * span.duration_s
        after = []
        for other, (ends, names) in ended.items():
            if other != lane and (at := bisect.bisect_right(ends, latest)):
                after.append(names[at - 1])
        curve = (alone or {}).get(span.op)
        busy = max(1e-3, span.activity) * chunks
        if curve is None:
            curve = Response(0.0, max(0.0, span.duration_s) * busy, busy)
        tasks.append(Task(name, lane, curve.seconds(chunks), busy, tuple(after)))
        curves[name] = curve
        ends, names = ended.setdefault(lane, ([], []))
        # ends of a lane that runs in order increase; where clocks disagree, the later one counts
        ends.append(max(span.end_s, ends[-1] if ends else span.end_s))
        names.append(name)
    return Branches(tuple(tasks), curves)


@dataclass(frozen=True)
class Divided:
    """Chunks by lane, the iteration's predicted time with equal and with these quotas, and why."""

    chunks: Mapping[str, int]
    equal_s: float
    predicted_s: float
    why: Mapping[str, str]
    predict: Callable[[Mapping[str, int]], float]  # the time with other quotas


def divide(graph: Branches, chunks: int) -> Divided:
    """Quotas with the least predicted time; raises ``ValueError`` for fewer chunks than lanes."""
    if chunks < len(graph.lanes):
        raise ValueError(f"{chunks} chunks are not enough for {len(graph.lanes)} lanes")
    planner = Planner(graph.tasks, graph.curves, chunks, graph.lanes)
    equal = apportion(dict.fromkeys(graph.lanes, 1.0), chunks)
    found = planner.improve(equal)
    timed = timing(graph.tasks, planner.seconds(found))
    slack = lane_slack(graph.tasks, timed)
    why = {
        lane: "critical" if s <= WORTH * timed.makespan else f"slack {s:.3g} s"
        for lane, s in slack.items()
    }
    return Divided(found, planner.predict(equal), timed.makespan, why, planner.predict)
