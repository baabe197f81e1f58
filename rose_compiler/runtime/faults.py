"""Which exception a failed run ends in, and what its notes say.

Several operations may have failed by the time that everything has come to rest. The one to report
is the earliest in program order: the only one that would have happened in eager order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rose_compiler.base.faultmap import FaultMap, Level
from rose_compiler.runtime.lanes import Task

Key = tuple[tuple[int, int], ...]  # (program trip, position in program order) a body


@dataclass(frozen=True)
class Frontier:
    """How far the coordinator had come: one level a body, with the emitted trips begun in each.

    ``trip`` is the emitted trip under way, ``whole`` the number of trips of the loop where it is
    known, that is behind the loop.
    """

    line: int
    levels: tuple[Level, ...]
    trip: tuple[int, ...]
    whole: tuple[int | None, ...]


def frontier(error: BaseException, faults: FaultMap) -> Frontier | None:
    """Where the coordinator stood when ``error`` reached it; None if not in emitted code."""
    tb: TracebackType | None = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == faults.filename and tb.tb_lineno in faults.lines:
            return _frontier(tb.tb_lineno, tb.tb_frame.f_locals, faults)
        tb = tb.tb_next
    return None


def _frontier(line: int, variables: Mapping[str, Any], faults: FaultMap) -> Frontier:
    levels = faults.lines[line]
    trips: list[int] = []
    whole: list[int | None] = []
    for level in levels:
        count = int(variables.get(faults.trips[faults.sites[level.site].body], 0))
        trips.append(count + level.epilogue - 1 if level.epilogue else count)
        whole.append(count if level.epilogue else None)
    return Frontier(line, levels, tuple(trips), tuple(whole))


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
            trip = _issued(at, depth, site.order) - site.stage
            return (*key[:depth], (trip, site.position))
    return None


def _issued(at: Frontier, depth: int, order: int) -> int:
    """The last emitted trip in which what has this order was issued."""
    return at.trip[depth] - (0 if order < at.levels[depth].order else 1)


def earliest(
    error: BaseException, tasks: Iterable[Task], faults: FaultMap
) -> tuple[BaseException, Key | None, Frontier | None]:
    """The exception to raise, its place in program order, and how far the coordinator had come.

    ``error`` is what reached the coordinator, ``tasks`` all that failed. An interrupt wins always.
    """
    at = frontier(error, faults)
    if at is None:
        return error, None, None
    best, best_key = error, line_key(at, faults)
    if not isinstance(error, Exception):
        return error, best_key, at
    for task in tasks:
        if task.error is None or task.error is error:
            continue
        key = task_key(task.site, at, faults)
        if key is not None and key < best_key:
            best, best_key = task.error, key
    return best, best_key, at


def drift(key: Key, at: Frontier, lost: Counter[int], faults: FaultMap) -> dict[str, int]:
    """Writes done minus writes that eager order would have done before ``key``, by state.

    ``lost`` counts by site the tasks that failed or were skipped.
    """
    found: Counter[str] = Counter()
    for depth, (trip, position) in enumerate(key):
        level = at.levels[depth]
        body = faults.sites[level.site].body
        for index, site in enumerate(faults.sites):
            if site.body != body or site.position == position or not site.writes:
                continue
            done = max(0, _issued(at, depth, site.order) - site.stage + 1)
            whole = at.whole[depth]
            if whole is not None:
                done = min(done, whole)
            if index == level.site and depth == len(key) - 1 < len(at.levels) - 1:
                done += 1  # the loop or branch that the coordinator was in: some of it is done
            eager = max(0, trip + (1 if site.position < position else 0))
            difference = done - lost[index] - eager
            for state in site.writes:
                found[state] += difference
    return {state: n for state, n in found.items() if n}


def notes(key: Key | None, at: Frontier | None, lost: Counter[int], faults: FaultMap) -> list[str]:
    """What to add to the exception: where it comes from, and the states that are not as in eager
    order."""
    if key is None or at is None:
        return []
    body = faults.sites[at.levels[len(key) - 1].site].body
    position = key[-1][1]
    site = next(s for s in faults.sites if s.body == body and s.position == position)
    place = f" at {site.where}" if site.where is not None else ""
    lines = [f"raised by {site.name}{place}, line {at.line} of the emitted {faults.filename}"]
    drifted = drift(key, at, lost, faults)
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
