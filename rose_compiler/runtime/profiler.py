"""Measures an iteration while it trains: what each operation takes, and a timeline over lanes.

An instrumented function (``emit(..., tick=recorder.tick)``) says when the coordinator has done
each thing; lanes say when they ran what. :func:`timeline` puts both together, :func:`summarize`
makes a :class:`~rose_compiler.base.profile.Profile` of several iterations.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rose_compiler.base import phases
from rose_compiler.base.machine import Machine
from rose_compiler.base.marks import Mark, key_of
from rose_compiler.base.profile import Activity, LoopTime, OpTime, Profile, Span, Timeline
from rose_compiler.runtime.activity import Sample, busy_cores, refined, share_of
from rose_compiler.runtime.recorder import Raw


@dataclass
class _Loop:
    """A loop that is being walked through: which trip, since when."""

    trip: int = -1
    since: float = 0.0


@dataclass
class _Walk:
    """Spans of the coordinator, in order, from the ticks of one iteration."""

    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    loops: list[Span] = field(default_factory=list)
    submits: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))


def _walk(marks: Sequence[Mark], ticks: Sequence[int], times: Sequence[float]) -> _Walk:
    found = _Walk()
    around = [tuple(key_of(m.path[:n], name) for n, name in enumerate(m.path)) for m in marks]
    open_loops: dict[str, _Loop] = defaultdict(_Loop)
    for k, start, end in zip(ticks, times[:-1], times[1:], strict=False):
        mark = marks[k]
        trips = [open_loops[key].trip for key in around[k]]
        if mark.kind in ("trip", "leave"):
            loop = open_loops[mark.key]
            if loop.trip >= 0:
                inside = (*trips, loop.trip)
                name = mark.key.rpartition("/")[2]
                path = (*mark.path, name)
                found.loops.append(Span(mark.key, "", loop.since, start, trip=inside, path=path))
            loop.trip, loop.since = (loop.trip + 1, start) if mark.kind == "trip" else (-1, end)
            continue
        if trips:
            trips[-1] -= mark.stage
        span = Span(
            mark.key,
            "",
            start,
            end,
            trip=tuple(trips),
            path=mark.path,
            issue_s=start,
            label=mark.label,
        )
        if mark.kind == "run":
            found.spans.append(span)
        elif mark.kind == "wait":
            found.waits.append(replace(span, lane=mark.lane))
        else:
            found.submits[mark.lane].append(replace(span, lane=mark.lane))
    return found


def timeline(
    marks: Sequence[Mark],
    recorded: Raw,
    lanes: Iterable[Span],
    machine: Machine,
    device: Sequence[Activity] = (),
) -> Timeline:
    """One iteration as it ran, times from its start.

    ``lanes`` are the spans that lanes left, each lane's in its order; the n-th belongs to the n-th
    operation handed to that lane. ``device`` is the activity of an accelerator, times as
    ``perf_counter`` has them, which then is what the spans' own activity means; the cores' activity
    is found from CPU times.
    """
    begin = recorded.times[0]
    walk = _walk(marks, recorded.marks, [t - begin for t in recorded.times])
    samples = [(t - begin, own, mine, theirs) for t, own, mine, theirs in recorded.samples]
    device = [replace(a, start_s=a.start_s - begin, end_s=a.end_s - begin) for a in device]
    by_lane: dict[str, list[Span]] = defaultdict(list)
    inside = []
    for span in lanes:
        if span.kind == phases.KIND:
            inside.append(replace(span, start_s=span.start_s - begin, end_s=span.end_s - begin))
        else:
            by_lane[span.lane].append(span)
    ran: list[Span] = []
    for lane, submits in walk.submits.items():
        for issued, seen in zip(submits, by_lane.pop(lane, ()), strict=False):
            start, end = (t - begin for t in seen.ran_s or (seen.start_s, seen.end_s))
            ran.append(
                replace(
                    issued,
                    start_s=start,
                    end_s=end,
                    # a lane may begin before the coordinator is back from handing over
                    issue_s=min(issued.start_s, start),
                    cpu_s=seen.cpu_s,
                    work_s=seen.cpu_s,
                )
            )
    # what the coordinator did, waits and hand-overs too
    pieces = [(s.start_s, s.end_s, s.op) for s in walk.spans]
    pieces += [(s.start_s, s.end_s, f"wait {s.op}") for s in walk.waits]
    samples = refined(samples, pieces)
    cores = busy_cores(samples, machine)
    everything = [*_with_cpu(walk.spans, samples, ran), *ran]
    shares = share_of([(s.start_s, s.end_s) for s in everything], device or cores)
    return Timeline(
        tuple(replace(s, activity=share) for s, share in zip(everything, shares, strict=True)),
        tuple(walk.waits),
        tuple(s for submits in walk.submits.values() for s in submits),
        tuple(walk.loops),
        (*device, *cores),
        _labelled(inside, everything),
    )


def _labelled(inside: Sequence[Span], everything: Sequence[Span]) -> tuple[Span, ...]:
    """Phases with the operation of their lane that each began in."""
    found = []
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(everything, key=lambda s: s.start_s) if inside else ():
        by_lane[span.lane].append(span)
    starts = {lane: [s.start_s for s in spans] for lane, spans in by_lane.items()}
    for phase in inside:
        at = bisect_right(starts.get(phase.lane, ()), phase.start_s) - 1
        of = by_lane[phase.lane][at] if at >= 0 else None
        if of is None or of.end_s < phase.start_s:
            found.append(replace(phase, label=phase.op))
            continue
        label = f"{of.label or of.op}: {phase.op}"
        found.append(replace(phase, label=label, path=of.path, trip=of.trip, site=of.site))
    return tuple(found)


def _with_cpu(
    spans: Sequence[Span], samples: Sequence[Sample], lanes: Sequence[Span]
) -> list[Span]:
    """The coordinator's spans with the CPU time of its thread, and of all that worked for them.

    Between two samples CPU time goes to the operations that ran, by how long. What lanes account
    for themselves is not the coordinator's.
    """
    if len(samples) < 2:
        return list(spans)
    found: list[Span] = []
    at = 0
    group: list[Span] = []
    timed = sorted((s for s in lanes if s.cpu_s is not None), key=lambda s: s.start_s)
    starts = [s.start_s for s in timed]
    longest = max((s.duration_s for s in timed), default=0.0)

    def flush(first: Sample, last: Sample) -> None:
        total = sum(s.duration_s for s in group)
        own = last[1] - first[1]
        both = last[2] - first[2] + last[3] - first[3]
        others = sum(
            (s.cpu_s or 0.0) * _part(s, first[0], last[0]) / max(s.duration_s, 1e-9)
            for s in timed[bisect_left(starts, first[0] - longest) : bisect_left(starts, last[0])]
        )
        rate = min(1.0, own / total) if total > 0 else 0.0
        # while it waited, others' work was not on behalf of what it ran
        share = min(1.0, total / max(last[0] - first[0], 1e-9))
        more = max(0.0, both - own - others) * share / total if total > 0 else 0.0
        found.extend(
            replace(s, cpu_s=s.duration_s * rate, work_s=s.duration_s * (rate + more))
            for s in group
        )
        group.clear()

    first = samples[0]
    for span in spans:
        while at + 1 < len(samples) - 1 and samples[at + 1][0] < span.end_s:
            at += 1
            flush(first, samples[at])
            first = samples[at]
        group.append(span)
    flush(first, samples[-1])
    return found


def _part(span: Span, start: float, end: float) -> float:
    return max(0.0, min(end, span.end_s) - max(start, span.start_s))


def summarize(
    timelines: Sequence[Timeline], iteration_s: Sequence[float], machine: Machine
) -> Profile:
    """The medians of each operation over several iterations, and the last iteration's timeline."""
    runs: dict[str, list[Span]] = defaultdict(list)
    waits: dict[str, list[Span]] = defaultdict(list)
    handoffs: dict[str, list[Span]] = defaultdict(list)
    for one in timelines:
        for spans, into in ((one.spans, runs), (one.waits, waits), (one.handoffs, handoffs)):
            for span in spans:
                into[span.op].append(span)
    ops = tuple(_times(op, spans, waits[op], handoffs[op]) for op, spans in runs.items())
    last = timelines[-1] if timelines else None
    loops = _loops(timelines)
    return Profile(machine.name, tuple(iteration_s), ops, last, loops=loops)


def _loops(timelines: Sequence[Timeline]) -> tuple[LoopTime, ...]:
    trips: dict[str, int] = defaultdict(int)
    runs: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for one in timelines:
        # behind the last trip a loop that is spread over several finishes what they began
        late = {trip.op: set[int]() for trip in one.loops}
        for span in one.spans:
            key = "/".join(span.path)
            if key in late and span.trip:
                late[key].add(span.trip[-1])
        for trip in one.loops:
            runs[trip.op] += trip.trip[-1] == 0
            trips[trip.op] += not late[trip.op] or trip.trip[-1] in late[trip.op]
            seconds[trip.op] += trip.duration_s
    return tuple(
        LoopTime(op, runs[op] / len(timelines), trips[op] / runs[op], seconds[op] / runs[op])
        for op in trips
        if runs[op]
    )


def _times(
    op: str, spans: Sequence[Span], waits: Sequence[Span], handoffs: Sequence[Span]
) -> OpTime:
    times = sorted(s.duration_s for s in spans)
    # what waiting takes once the result is there
    received = [
        w.end_s - max(w.start_s, s.end_s)
        for s, w in zip(spans, waits, strict=False)
        if s.end_s <= w.end_s
    ]
    launches = [
        max(0.0, s.start_s - max(s.issue_s, free))
        for s, free in zip(spans, _free(spans), strict=True)
        if s.issue_s is not None
    ]
    busy = [s.cpu_s for s in spans if s.cpu_s is not None]
    return OpTime(
        op,
        len(times),
        statistics.median(times),
        times[min(len(times) - 1, int(0.9 * len(times)))],
        _median(busy),
        _mean(launches),
        _median(w.duration_s for w in waits),
        statistics.fmean(s.activity for s in spans),
        spans[0].label,
        spans[0].path,
        spans[0].lane,
        _mean(h.duration_s for h in handoffs),
        _mean(received),
        statistics.fmean(times),
        statistics.fmean(s.work_s if s.work_s is not None else s.duration_s for s in spans),
    )


def _free(spans: Sequence[Span]) -> list[float]:
    """Since when the lane was free of an earlier run of the same operation."""
    ends = [s.end_s if s.end_s <= n.start_s else float("-inf") for s, n in pairwise(spans)]
    return [float("-inf"), *ends]


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0
