"""Which exception a failed run ends in, what its notes say, and how it is raised.

Several operations may have failed by the time that everything has come to rest. The one to report
is the earliest in program order: the only one that would have happened in eager order. What comes
before it in program order and was still to be issued is finished first (``recovery.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, NoReturn

from rose_compiler.base.faultmap import FaultMap, Level
from rose_compiler.runtime.lanes import Task

Key = tuple[tuple[int, int], ...]  # (program trip, position in program order) a body


@dataclass(frozen=True)
class Frontier:
    """How far the coordinator had come, by body, outermost first.

    ``trip`` is the emitted trip under way in each, ``whole`` the number of trips of its loop where
    that is known, behind the loop. ``frame`` is the emitted function's.
    """

    line: int
    levels: tuple[Level, ...]
    trip: tuple[int, ...]
    whole: tuple[int | None, ...]
    frame: FrameType

    def issued(self, depth: int, order: int) -> int:
        """The last emitted trip in which what has this order in a body was issued."""
        return self.trip[depth] - (0 if order < self.levels[depth].order else 1)


@dataclass(frozen=True)
class Verdict:
    """The exception to raise and its place in program order."""

    error: BaseException
    key: Key
    at: Frontier


def frontier(error: BaseException, faults: FaultMap) -> Frontier | None:
    """Where the coordinator stood when ``error`` reached it; None if not in emitted code."""
    tb: TracebackType | None = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == faults.filename and tb.tb_lineno in faults.lines:
            return _frontier(tb.tb_lineno, tb.tb_frame, faults)
        tb = tb.tb_next
    return None


def _frontier(line: int, frame: FrameType, faults: FaultMap) -> Frontier:
    levels = faults.lines[line]
    variables: Mapping[str, Any] = frame.f_locals
    trips: list[int] = []
    whole: list[int | None] = []
    for level in levels:
        count = int(variables.get(faults.bodies[faults.sites[level.site].body].trips, 0))
        trips.append(count + level.epilogue - 1 if level.epilogue else count)
        whole.append(count if level.epilogue else None)
    return Frontier(line, levels, tuple(trips), tuple(whole), frame)


def line_key(at: Frontier, faults: FaultMap) -> Key:
    """The place in program order of what the coordinator was doing."""
    return tuple(
        (trip - level.stage, faults.sites[level.site].position)
        for level, trip in zip(at.levels, at.trip, strict=True)
    )


def task_key(site_index: int, at: Frontier, faults: FaultMap) -> Key | None:
    """The place in program order of the latest task of a site; None if it can't be told."""
    site = faults.sites[site_index]
    key = line_key(at, faults)
    for depth, level in enumerate(at.levels):
        if faults.sites[level.site].body == site.body:
            trip = at.issued(depth, site.order) - site.stage
            return (*key[:depth], (trip, site.position))
    return None


def earliest(error: BaseException, tasks: Iterable[Task], faults: FaultMap) -> Verdict | None:
    """The exception that comes first in program order; None if that can't be told.

    ``error`` is what reached the coordinator, ``tasks`` all that failed. An interrupt wins always.
    """
    at = frontier(error, faults)
    if at is None:
        return None
    best, best_key = error, line_key(at, faults)
    if isinstance(error, Exception):
        for task in tasks:
            if task.error is None or task.error is error:
                continue
            key = task_key(task.site, at, faults)
            if key is not None and key < best_key:
                best, best_key = task.error, key
    return Verdict(best, best_key, at)


def drift(
    verdict: Verdict, lost: Mapping[int, int], finished: Mapping[int, int], faults: FaultMap
) -> dict[str, int]:
    """Writes done minus writes that eager order would have done before the fault, by state.

    ``lost`` counts by site the tasks that failed or were skipped, ``finished`` what was done after
    the fault.
    """
    key, at = verdict.key, verdict.at
    found: Counter[str] = Counter()
    for depth, (trip, position) in enumerate(key):
        level = at.levels[depth]
        body = faults.sites[level.site].body
        for index, site in enumerate(faults.sites):
            if site.body != body or site.position == position or not site.writes:
                continue
            done = max(0, at.issued(depth, site.order) - site.stage + 1)
            whole = at.whole[depth]
            if whole is not None:
                done = min(done, whole)
            if index == level.site and depth == len(key) - 1 < len(at.levels) - 1:
                done += 1  # the loop or branch that the coordinator was in: some of it is done
            done += finished.get(index, 0) - lost.get(index, 0)
            eager = max(0, trip + (1 if site.position < position else 0))
            for state in site.writes:
                found[state] += done - eager
    return {state: n for state, n in found.items() if n}


def notes(
    verdict: Verdict, lost: Mapping[int, int], finished: Mapping[int, int], faults: FaultMap
) -> list[str]:
    """What to add to the exception: where it comes from, and the states that are not as in eager
    order."""
    index = _site_of(verdict, faults)
    site = faults.sites[index]
    place = f" at {site.where}" if site.where is not None else ""
    line = _line_of(index, verdict, faults)
    lines = [f"raised by {site.name}{place}, line {line} of the emitted {faults.filename}"]
    drifted = drift(verdict, lost, finished, faults)
    for word, sign in (("ahead of", 1), ("behind", -1)):
        states = [
            f"{state} by {abs(n)} write{'' if abs(n) == 1 else 's'}"
            for state, n in sorted(drifted.items())
            if n * sign > 0
        ]
        if states:
            lines.append(f"{word} eager order: " + ", ".join(states))
    if not drifted:
        lines.append("every other state is as eager order left it")
    return lines


def _site_of(verdict: Verdict, faults: FaultMap) -> int:
    depth = len(verdict.key) - 1
    body = faults.sites[verdict.at.levels[depth].site].body
    position = verdict.key[depth][1]
    return next(k for k, s in enumerate(faults.sites) if (s.body, s.position) == (body, position))


def _line_of(site: int, verdict: Verdict, faults: FaultMap) -> int:
    """The emitted line that issued an operation."""
    if verdict.at.levels[-1].site == site:
        return verdict.at.line
    order = faults.sites[site].order
    lines = (
        line
        for line, levels in faults.lines.items()
        if levels[-1].site == site and levels[-1].order == order
    )
    return min(lines, default=verdict.at.line)


def apart(error: BaseException | None, other: BaseException) -> None:
    """Take ``other`` out of the context of an exception that was raised while it was handled."""
    while error is not None and error is not other:
        if error.__context__ is other:
            error.__context__ = None
        error = error.__context__


def raise_as_it_was(error: BaseException) -> NoReturn:
    """Raise an exception without what raising it beside another one adds to it."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
