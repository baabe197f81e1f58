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
from rose_compiler.base.profile import Profile, Span, Timeline
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
        """The lanes that may get a quota, in order of their first task."""
        lanes = dict.fromkeys(task.lane for task in self.tasks)
        return tuple(lane for lane in lanes if not lane.startswith(_WAY))


#: Responses of operations by key: in cores, of what nothing ran beside, or in chunks of SMs.
Alone = Mapping[str, Response]
#: Seconds by operation from handing a call over to its start, and from its end to its result.
HandOffs = Mapping[str, tuple[float, float]]
#: Lanes of what goes from one lane to another: each has one of its own.
_WAY = "way of "


def alone_in(
    profiles: Mapping[int, Sequence[Profile]],
    inside: Mapping[int, Sequence[Mapping[str, float]]] | None = None,
) -> Alone:
    """Responses fitted to profiles in program order, by the number of cores of each side.

    ``inside`` has, for each profile, the seconds of operations whose span there is longer than they
    ran: calls of components in processes. Of several profiles with one number the shortest time
    counts: disturbances only add.
    """
    points: dict[str, dict[int, float]] = {}
    for count, found in profiles.items():
        for profile, known in zip(found, (inside or {}).get(count, [{}] * len(found)), strict=True):
            for one in profile.ops:
                at = points.setdefault(one.op, {})
                at[count] = min(at.get(count, math.inf), known.get(one.op, one.median_s))
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


def branches(
    timeline: Timeline,
    chunks: int,
    alone: Alone | None = None,
    hand_offs: HandOffs | None = None,
) -> Branches:
    """The graph of one iteration on a device of so many chunks.

    With ``alone``, an operation is planned with the response that was measured of it: what it takes
    by itself on cores, a chunk being a core, since quotas end the fight for them. With
    ``hand_offs`` a call starts so much later than what it waits for ended, and what waits for its
    result so much later than that, whatever the quotas: who has work of its own meanwhile waits for
    neither.
    """
    ways = hand_offs or {}
    taken_in = _taken_in(timeline, ways)
    spans = sorted(timeline.spans, key=lambda s: (s.start_s, s.end_s))
    ended: dict[str, tuple[list[float], list[str]]] = {}
    tasks: list[Task] = []
    curves: dict[str, Response] = {}

    def way(name: str, seconds: float, after: list[str]) -> str:
        tasks.append(Task(name, _WAY + name, max(0.0, seconds), after=tuple(after)))
        curves[name] = Response(max(0.0, seconds), 0.0)
        return name

    for number, span in enumerate(spans):
        lane, name = span.lane or COORDINATOR, f"{number} {span.label or span.op}"
        latest = span.start_s + _EARLY * span.duration_s
        if span.op in ways and span.issue_s is not None:
            latest = span.issue_s  # what ended on its way it did not wait for
        after = []
        for other, (ends, names) in ended.items():
            if other != lane and (at := bisect.bisect_right(ends, latest)):
                after.append(names[at - 1])
        curve = (alone or {}).get(span.op)
        busy = max(1e-3, span.activity) * chunks
        if curve is None:
            curve = Response(0.0, max(0.0, span.duration_s) * busy, busy)
        if span.op in ways:
            after = [way(f"{name}, sent", ways[span.op][0], after)]
        tasks.append(Task(name, lane, curve.seconds(chunks), busy, tuple(after)))
        curves[name] = curve
        if span.op in ways:
            name = way(f"{name}, taken in", ways[span.op][1], [name])
        ends, names = ended.setdefault(lane, ([], []))
        end = taken_in.get(span, span.end_s)
        # ends of a lane that runs in order increase; where clocks disagree, the later one counts
        ends.append(max(end, ends[-1] if ends else end))
        names.append(name)
    return Branches(tuple(tasks), curves)


def _taken_in(timeline: Timeline, hand_offs: HandOffs) -> dict[Span, float]:
    """When the results of calls were here: nothing waited for those that were not."""
    found: dict[Span, float] = {}
    for op in hand_offs:
        runs = sorted((s for s in timeline.spans if s.op == op), key=lambda s: s.start_s)
        waits = sorted((s for s in timeline.waits if s.op == op), key=lambda s: s.start_s)
        if len(runs) == len(waits):
            found |= {
                run: max(run.end_s, wait.end_s) for run, wait in zip(runs, waits, strict=True)
            }
    return found


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
