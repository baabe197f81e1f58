"""The critical path through a graph of branches, and who waits for it at which join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rose_compiler.base.machine import Task, deadlock, task_queues


@dataclass(frozen=True)
class Timing:
    """When tasks start and end if nothing contends, and by how much each may end later.

    ``slack`` is the total float of the critical-path method: an increase within it does not
    lengthen the iteration.
    """

    makespan: float
    start: Mapping[str, float]
    end: Mapping[str, float]
    slack: Mapping[str, float]
    path: tuple[str, ...]  # one longest path, first task first


def timing(tasks: Iterable[Task], seconds: Mapping[str, float]) -> Timing:
    """Critical-path method over lane order and ``after``; raises as ``simulate``."""
    before, order = _order(tasks)
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    cause: dict[str, str | None] = {}
    for name in order:
        latest = max(before[name], key=lambda other: end[other], default=None)
        cause[name] = latest
        start[name] = 0.0 if latest is None else end[latest]
        end[name] = start[name] + seconds[name]
    makespan = max(end.values(), default=0.0)
    must_end = dict.fromkeys(order, makespan)
    for name in reversed(order):
        for other in before[name]:
            must_end[other] = min(must_end[other], must_end[name] - seconds[name])
    slack = {name: max(0.0, must_end[name] - end[name]) for name in order}
    path: list[str] = []
    at = max(order, key=lambda name: end[name], default=None)
    while at is not None:
        path.append(at)
        at = cause[at]
    return Timing(makespan, start, end, slack, tuple(reversed(path)))


def longest_through(
    tasks: Iterable[Task], seconds: Mapping[str, float], most: int = 32
) -> tuple[float, list[tuple[str, ...]]]:
    """The makespan, and of the longest paths through each task the ``most`` longest, none twice,
    the longest of all first. Raises as ``simulate``."""
    before, order = _order(tasks)
    to: dict[str, float] = {}  # the longest path that ends with a task, and from it on to an end
    on: dict[str, float] = {}
    cause: dict[str, str | None] = {}
    follower: dict[str, str | None] = {}
    for name in order:
        cause[name] = max(before[name], key=lambda other: to[other], default=None)
        to[name] = max((to[other] for other in before[name]), default=0.0) + seconds[name]
    for name in reversed(order):
        on[name] = on.get(name, 0.0) + seconds[name]
        follower.setdefault(name, None)
        for other in before[name]:
            if on[name] > on.get(other, -1.0):
                on[other], follower[other] = on[name], name
    found: list[tuple[str, ...]] = []
    seen: set[str] = set()  # what lies on a longer path has its own in that one
    for name in sorted(order, key=lambda name: seconds[name] - to[name] - on[name]):
        if name in seen or len(found) == most:
            continue
        back, ahead = [name], [name]
        while (earlier := cause[back[-1]]) is not None:
            back.append(earlier)
        while (later := follower[ahead[-1]]) is not None:
            ahead.append(later)
        found.append((*reversed(back), *ahead[1:]))
        seen.update(found[-1])
    return max(to.values(), default=0.0), found


@dataclass(frozen=True)
class Wait:
    """``branch`` ended ``slack`` seconds before the last of those that ``join`` waits for."""

    join: str
    branch: str
    lane: str
    slack: float


def joins(tasks: Sequence[Task], end: Mapping[str, float]) -> list[Wait]:
    """Who waits at which join, by measured or predicted ends: the longest wait first."""
    lane_of = {task.name: task.lane for task in tasks}
    before, order = _order(tasks)
    found = []
    for name in order:
        if len(before[name]) < 2:
            continue
        last = max(end[other] for other in before[name])
        found += [Wait(name, other, lane_of[other], last - end[other]) for other in before[name]]
    return sorted(found, key=lambda wait: -wait.slack)


def lane_slack(tasks: Iterable[Task], timed: Timing) -> dict[str, float]:
    """The least slack of each lane's tasks: by so much all of it may run later."""
    found: dict[str, float] = {}
    for task in tasks:
        slack = timed.slack[task.name]
        found[task.lane] = min(found.get(task.lane, slack), slack)
    return found


def _order(tasks: Iterable[Task]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """What each task waits for, and the tasks in an order that respects it."""
    lanes, by_name = task_queues(tasks)
    before: dict[str, tuple[str, ...]] = {}
    for queue in lanes.values():
        for previous, task in zip([None, *queue[:-1]], queue, strict=True):
            own = [previous.name] if previous else []
            before[task.name] = tuple(dict.fromkeys([*task.after, *own]))
    order: list[str] = []
    done: dict[str, float] = {}
    heads = dict.fromkeys(lanes, 0)
    while len(done) < len(by_name):
        progressed = False
        for lane, queue in lanes.items():
            while heads[lane] < len(queue):
                name = queue[heads[lane]].name
                if not all(other in done for other in before[name]):
                    break
                done[name] = 0.0
                order.append(name)
                heads[lane] += 1
                progressed = True
        if not progressed:
            raise deadlock(lanes, heads, done)
    return before, order
