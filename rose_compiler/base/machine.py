"""A machine as data, and the time a set of tasks would take on it.

:func:`simulate` is event-driven: it steps from one start or end of a task to the next, and
between two events every running task progresses at a constant rate. Rates come from max-min fair
sharing of the capacity, as in the generalized processor sharing of Parekh and Gallager (1993):
the shares are filled up equally until the capacity is used or every demand is met. An operating
system shares cores among busy threads so, and a GPU its SMs among resident kernels roughly so.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from rose_compiler.base.errors import ConfigError, fail, nearest, register

register(
    "config-machine",
    ConfigError,
    "a machine is named that nothing describes, or its description can't be read",
    'name one of `rose_compiler.base.machine.known_machines()`, or the path of a ".toml" or '
    '".json" file with the fields of `Machine`',
)

#: The descriptions that come with the package, a file each.
_DESCRIPTIONS = Path(__file__).with_name("machines")


@dataclass(frozen=True)
class Machine:
    """What a schedule runs on.

    ``cores`` is the number of CPU cores this process may use. ``sms`` is the number of streaming
    multiprocessors, 0 without a GPU, handed out in steps of ``sm_granularity``.
    ``bandwidth_bytes_per_s`` is that of the device's memory, ``None`` where it is not known.

    ``max_clients`` bounds the processes that share the GPU through MPS. Without MPS they take
    turns: a turn lasts ``slice_s``, and ``switch_s`` pass between two turns of different processes.
    """

    name: str
    cores: int
    sms: int = 0
    sm_granularity: int = 1
    bandwidth_bytes_per_s: float | None = None
    max_clients: int = 48
    slice_s: float = 2e-3
    switch_s: float = 1e-4

    def __post_init__(self) -> None:
        if self.cores < 1 or self.sms < 0 or self.sm_granularity < 1:
            raise ValueError(f"a machine has at least one core and no negative parts: {self}")
        if self.max_clients < 1 or self.slice_s <= 0 or self.switch_s < 0:
            raise ValueError(f"clients and times of a machine are not negative: {self}")

    @property
    def capacity(self) -> int:
        """What tasks share: the SMs of a GPU, else the cores."""
        return self.sms or self.cores

    @property
    def chunks(self) -> int:
        """How many quotas of the least size the device has; SMs that fill no chunk are left."""
        return self.sms // self.sm_granularity if self.sms else self.cores

    @property
    def chunk(self) -> int:
        """SMs (or cores) in the least quota."""
        return self.sm_granularity if self.sms else 1

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` wrote; raises ``TypeError`` for a missing or an unknown field."""
        return cls(**data)


def known_machines() -> tuple[str, ...]:
    """The names that :func:`load_machine` knows."""
    return tuple(sorted(path.stem for path in _DESCRIPTIONS.glob("*.toml")))


def load_machine(name: str | Path) -> Machine:
    """The machine of that name, or the one that a ``.toml`` or ``.json`` file describes.

    Raises ``ConfigError`` (``config-machine``) for an unknown name or a malformed description.
    """
    text = str(name)
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        path = _DESCRIPTIONS / f"{text.lower()}.toml"
        if text.lower() not in known_machines():
            names = known_machines()
            raise fail(
                "config-machine",
                f"no machine is named {text!r}{nearest(text.lower(), names)}",
                expected="one of " + ", ".join(names) + ", or a path",
                found=repr(text),
            )
    try:
        raw = path.read_text(encoding="utf-8")
        data = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw)
        return Machine.from_dict(data)
    except (OSError, ValueError, TypeError) as error:
        raise fail(
            "config-machine",
            f"{path} does not describe a machine",
            expected="the fields " + ", ".join(f.name for f in fields(Machine)),
            found=str(error),
        ) from error


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


T = TypeVar("T", bound=Task)


@dataclass(frozen=True)
class Schedule:
    """When each task starts and ends, in seconds from the start of the first."""

    makespan: float
    start: Mapping[str, float] = field(default_factory=dict)
    end: Mapping[str, float] = field(default_factory=dict)


def simulate(
    tasks: Iterable[Task], machine: Machine, bound: Mapping[str, tuple[str, float]] | None = None
) -> Schedule:
    """Run ``tasks`` in simulated time on the machine's :attr:`~Machine.capacity`.

    A lane runs its tasks one at a time, in the order they are given. ``bound`` has lanes that are
    kept to a part of the machine: the name of the part, and its cores, which all lanes of that name
    share; others may use these too. Raises ``ValueError`` for a name given twice or an unknown name
    in ``after``, and ``VerifyError`` (``verify-deadlock``) if tasks wait for each other.
    """
    capacity = float(machine.capacity)
    parts = bound or {}

    def rates(running: Sequence[Task]) -> dict[str, float]:
        demands = {task.name: task.demand for task in running}
        kept = dict(demands)
        inside: dict[tuple[str, float], dict[str, float]] = {}
        for task in running:
            if task.lane in parts:
                inside.setdefault(parts[task.lane], {})[task.name] = task.demand
        for (_, cores), members in inside.items():
            kept |= fair_shares(members, cores)
        shares = fair_shares(kept, capacity)
        return {name: shares[name] / demand for name, demand in demands.items()}

    return run_lanes(tasks, rates)


def run_lanes(
    tasks: Iterable[T],
    rates: Callable[[Sequence[T]], Mapping[str, float]],
    passed: Callable[[float, float], None] = lambda start, end: None,
) -> Schedule:
    """Run ``tasks`` in simulated time, each lane its own in order.

    ``rates`` says how fast the tasks run that are on the machine at the same time, by name, 1 being
    as fast as their ``work_s`` says; one of them at least must run. It holds from one begin or end
    of a task to the next: ``passed(start, end)`` tells of each such stretch of time. Raises as
    :func:`simulate`.
    """
    lanes, by_name = task_queues(tasks)
    heads = dict.fromkeys(lanes, 0)
    running: dict[str, float] = {}  # task -> work left, in seconds at full speed
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
            raise deadlock(lanes, heads, end)
        rate = rates([by_name[name] for name in running])
        step = min(left / rate[name] for name, left in running.items() if rate[name] > 0)
        if step > 0:
            passed(now, now + step)
        now += step
        for name, left in list(running.items()):
            # the same quotient as in the minimum, so the task that sets the step ends exactly
            if rate[name] > 0 and left / rate[name] <= step:
                del running[name]
                end[name] = now
                heads[by_name[name].lane] += 1
            else:
                running[name] = max(0.0, left - step * rate[name])
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
    lanes, by_name = task_queues(tasks)
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
            raise deadlock(lanes, heads, done)
    return max(done.values(), default=0.0)


def work_over_capacity(tasks: Iterable[Task], machine: Machine) -> float:
    """The time that all the work takes with every core or SM busy throughout."""
    return sum(task.work_s * task.demand for task in tasks) / machine.capacity


def task_queues(tasks: Iterable[T]) -> tuple[dict[str, list[T]], dict[str, T]]:
    """Tasks by lane in order, and by name. Raises ``ValueError`` as :func:`simulate`."""
    lanes: dict[str, list[T]] = {}
    by_name: dict[str, T] = {}
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


def deadlock(
    lanes: Mapping[str, Sequence[Task]], heads: Mapping[str, int], done: Mapping[str, float]
) -> Exception:
    """The error for tasks that wait for each other. ``heads`` is each lane's next task."""
    waits = []
    for lane, queue in lanes.items():
        if heads[lane] < len(queue):
            task = queue[heads[lane]]
            missing = ", ".join(name for name in task.after if name not in done)
            waits.append(f"{task.name} on lane {lane} waits for {missing}")
    return fail("verify-deadlock", "tasks wait for each other", found="; ".join(waits))
