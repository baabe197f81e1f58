"""A machine as data, and the time a set of tasks would take on it.

:func:`simulate` is event-driven: it steps from one start or end of a task to the next, and
between two events every running task progresses at a constant rate. Rates come from max-min fair
sharing of the capacity, as in the generalized processor sharing of Parekh and Gallager (1993):
the shares are filled up equally until the capacity is used or every demand is met. An operating
system shares cores among busy threads so, and a GPU its SMs among resident kernels roughly so.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rose_compiler.base.errors import fail


@dataclass(frozen=True)
class Machine:
    """What a schedule runs on.

    ``cores`` is the number of CPU cores this process may use. ``sms`` is the number of streaming
    multiprocessors, 0 without a GPU, handed out in steps of ``sm_granularity``.
    ``bandwidth_bytes_per_s`` is that of the device's memory, ``None`` where it is not known.
    """

    name: str
    cores: int
    sms: int = 0
    sm_granularity: int = 1
    bandwidth_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.cores < 1 or self.sms < 0 or self.sm_granularity < 1:
            raise ValueError(f"a machine has at least one core and no negative parts: {self}")

    @property
    def capacity(self) -> int:
        """What tasks share: the SMs of a GPU, else the cores."""
        return self.sms or self.cores

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote; raises ``TypeError`` for a missing or an unknown field."""
        return cls(**data)


def detect_cpu() -> Machine:
    """This machine's processor, with the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return Machine(name=f"{platform.machine() or 'cpu'} with {cores} cores", cores=cores)


@dataclass(frozen=True)
class Task:
    """A piece of work on a lane.

    ``work_s`` is how long it takes with all it can use, ``demand``: that many cores or SMs. It
    starts after the tasks named in ``after`` and after those before it on its lane.
    """

    name: str
    lane: str
    work_s: float
    demand: float = 1.0
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.work_s >= 0 and math.isfinite(self.work_s)):
            raise ValueError(f"work_s of task {self.name!r} is {self.work_s}, not 0 or more")
        if not (self.demand > 0 and math.isfinite(self.demand)):
            raise ValueError(f"demand of task {self.name!r} is {self.demand}, not above 0")


@dataclass(frozen=True)
class Schedule:
    """When each task starts and ends, in seconds from the start of the first."""

    makespan: float
    start: Mapping[str, float] = field(default_factory=dict)
    end: Mapping[str, float] = field(default_factory=dict)


def simulate(tasks: Iterable[Task], machine: Machine) -> Schedule:
    """Run ``tasks`` in simulated time on the machine's :attr:`~Machine.capacity`.

    A lane runs its tasks one at a time, in the order they are given. Raises ``ValueError`` for a
    name given twice or an unknown name in ``after``, and ``VerifyError`` (``verify-deadlock``) if
    tasks wait for each other.
    """
    lanes, by_name = _queues(tasks)
    capacity = float(machine.capacity)
    heads = dict.fromkeys(lanes, 0)
    running: dict[str, float] = {}  # task -> work left, in seconds at full demand
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    now = 0.0
    while len(end) < len(by_name):
        for lane, queue in lanes.items():
            if heads[lane] < len(queue):
                task = queue[heads[lane]]
                if task.name not in running and all(name in end for name in task.after):
                    running[task.name] = task.work_s
                    start[task.name] = now
        if not running:
            raise _deadlock(lanes, heads, end)
        demands = {name: by_name[name].demand for name in running}
        shares = fair_shares(demands, capacity)
        rates = {name: shares[name] / demands[name] for name in running}
        step = min(left / rates[name] for name, left in running.items())
        now += step
        for name, left in list(running.items()):
            # the same quotient as in the minimum, so the task that sets the step ends exactly
            if left / rates[name] <= step:
                del running[name]
                end[name] = now
                heads[by_name[name].lane] += 1
            else:
                running[name] = max(0.0, left - step * rates[name])
    return Schedule(now, start, end)


def fair_shares(demands: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Max-min fair shares of ``capacity``, none above its demand.

    A demand of ``d`` counts as ``ceil(d)`` claimants, as threads do on cores: two threads get
    twice what one gets. All of the capacity is used, or every demand is met.
    """
    claimants = {name: math.ceil(demand) for name, demand in demands.items()}
    # by demand of a claimant: who asks for less than an equal share leaves the rest to the others
    order = sorted(demands, key=lambda name: demands[name] / claimants[name])
    left, unserved = capacity, sum(claimants.values())
    shares: dict[str, float] = {}
    for name in order:
        shares[name] = min(demands[name], left * claimants[name] / unserved)
        left -= shares[name]
        unserved -= claimants[name]
    return shares


def critical_path(tasks: Iterable[Task], machine: Machine) -> float:
    """The time that dependences and lane order take on a machine that is never shared.

    A task whose demand is above the capacity is slowed by that alone. With
    :func:`work_over_capacity` this bounds every makespan from below. Raises as :func:`simulate`.
    """
    lanes, by_name = _queues(tasks)
    before: dict[str, tuple[str, ...]] = {}
    for queue in lanes.values():
        for previous, task in zip([None, *queue[:-1]], queue, strict=True):
            before[task.name] = (*task.after, *([previous.name] if previous else []))
    done: dict[str, float] = {}
    heads = dict.fromkeys(lanes, 0)
    while len(done) < len(by_name):
        progressed = False
        for lane, queue in lanes.items():
            while heads[lane] < len(queue):
                task = queue[heads[lane]]
                if not all(name in done for name in before[task.name]):
                    break
                ready = max((done[name] for name in before[task.name]), default=0.0)
                done[task.name] = ready + task.work_s * max(1.0, task.demand / machine.capacity)
                heads[lane] += 1
                progressed = True
        if not progressed:
            raise _deadlock(lanes, heads, done)
    return max(done.values(), default=0.0)


def work_over_capacity(tasks: Iterable[Task], machine: Machine) -> float:
    """The time that all the work takes with every core or SM busy throughout."""
    return sum(task.work_s * task.demand for task in tasks) / machine.capacity


def _queues(tasks: Iterable[Task]) -> tuple[dict[str, list[Task]], dict[str, Task]]:
    lanes: dict[str, list[Task]] = {}
    by_name: dict[str, Task] = {}
    for task in tasks:
        if task.name in by_name:
            raise ValueError(f"two tasks are named {task.name!r}")
        by_name[task.name] = task
        lanes.setdefault(task.lane, []).append(task)
    for task in by_name.values():
        for name in task.after:
            if name not in by_name:
                raise ValueError(f"task {task.name!r} waits for {name!r}, which does not exist")
    return lanes, by_name


def _deadlock(
    lanes: Mapping[str, list[Task]], heads: Mapping[str, int], done: Mapping[str, float]
) -> Exception:
    waits = []
    for lane, queue in lanes.items():
        if heads[lane] < len(queue):
            task = queue[heads[lane]]
            missing = ", ".join(name for name in task.after if name not in done)
            waits.append(f"{task.name} on lane {lane} waits for {missing}")
    return fail("verify-deadlock", "tasks wait for each other", found="; ".join(waits))
