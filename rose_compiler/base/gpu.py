"""A GPU in simulated time: who runs on which SMs, and how fast.

The model is fluid. Between two starts or ends of kernels every running kernel progresses at a
constant rate; a task may stand for thousands of kernels of one stage. Its rules:

1. *Streams.* A lane runs its kernels one at a time, in order; a kernel also waits for those named
   in ``after``.
2. *Response.* A kernel given ``s`` of the ``demand`` SMs it can use takes
   ``work_s * (serial + (1 - serial) * demand / s)`` (Amdahl's law, with what SMs can't shorten,
   launches and tails, in ``serial``).
3. *Sharing.* Kernels of one process share the SMs: those of higher priority (the lower number) are
   served first. Equals that together ask for more than there is get shares in proportion to what
   they can use and to their ``grain``: blocks wait in one queue, so that a stage of long kernels
   holds up one of short kernels. A task claims SMs only while a kernel of it runs: in its serial
   part the others fill the gap.
4. *Time slicing.* Without MPS the kernels of different processes take turns, each turn with the
   whole device; a switch costs ``Machine.switch_s``.
5. *MPS.* With it they share as those of one process do. A group with ``sms`` is a cap, rounded
   down to chunks, at least one. Caps may add up to more than the device has.
6. *Exclusive groups* (static MPS partitions, green contexts from one split) own their SMs: nobody
   else runs there, and they run nowhere else. Together they fit the device.
7. *Memory.* A kernel at full rate uses ``bandwidth``, a share of the device's. Where the kernels
   running at the same time ask for more than all of it, max-min fairness slows those that ask for
   the most.
8. *Graphics.* Processes named in ``graphics`` (Vulkan, OpenGL) take turns with all others even
   under MPS, as in rule 4: a graphics context never shares SMs with CUDA.
9. *CPU.* Kernels with ``device="cpu"`` share the machine's cores as in :func:`fair_shares`.

What it leaves out: caches, the granularity of thread blocks, and copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rose_compiler.base.errors import QuotaError, fail, register
from rose_compiler.base.machine import (
    Machine,
    Schedule,
    Task,
    fair_shares,
    run_lanes,
)

register(
    "quota-overcommitted",
    QuotaError,
    "exclusive quotas add up to more than the device has",
    "lower the quotas, or share the device through percentages, which are caps",
)
register(
    "quota-minimum",
    QuotaError,
    "a quota is below the least that the device can hand out",
    "give each lane at least one chunk of SMs or one core, or let lanes share a quota",
)
register(
    "quota-clients",
    QuotaError,
    "more processes would share the GPU than MPS serves",
    "put several components into one process",
)

#: The group, and the process, of lanes that nothing else was said about.
MAIN = "main"


@dataclass(frozen=True)
class Kernel(Task):
    """Work on a lane of a GPU, or of a CPU.

    ``demand`` is in SMs (cores). ``serial`` is the share of ``work_s`` that does not get shorter
    with more of them, ``bandwidth`` the share of the device's memory bandwidth used at full rate.
    ``grain`` says how long its kernels last, relative to those of others.
    """

    serial: float = 0.0
    bandwidth: float = 0.0
    device: Literal["gpu", "cpu"] = "gpu"
    grain: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.serial <= 1 and 0 <= self.bandwidth <= 1):
            raise ValueError(f"serial and bandwidth of {self.name!r} are shares from 0 to 1")
        if not self.grain > 0:
            raise ValueError(f"grain of {self.name!r} is {self.grain}, not above 0")

    def speed(self, units: float) -> float:
        """Progress a second with that many SMs or cores, 1 with all it can use."""
        if units <= 0:
            return 0.0
        parallel = (1 - self.serial) * self.demand / min(units, self.demand)
        return 1.0 / (self.serial + parallel)


@dataclass(frozen=True)
class Group:
    """Lanes that are limited together: a process under a quota, or the streams of one context.

    ``sms`` is their limit, None for the whole device. ``exclusive`` SMs are theirs alone.
    """

    name: str
    process: str = MAIN
    sms: int | None = None
    exclusive: bool = False


@dataclass(frozen=True)
class VirtualGpu:
    """A machine and how its GPU is divided.

    ``lanes`` maps a lane to its group (``"main"`` without limits if it is not named), ``priority``
    a lane to its stream's priority, 0 by default and more urgent below. ``mps``: processes run at
    the same time instead of in turns; without it caps have no effect. ``graphics`` names the
    processes that take turns in any case.

    Raises ``QuotaError`` for exclusive groups that don't fit, a quota below one chunk, or more
    processes than MPS serves; ``ValueError`` for an unknown group.
    """

    machine: Machine
    groups: tuple[Group, ...] = ()
    lanes: Mapping[str, str] = field(default_factory=dict)
    priority: Mapping[str, int] = field(default_factory=dict)
    mps: bool = False
    graphics: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = {group.name for group in self.groups} | {MAIN}
        for lane, name in self.lanes.items():
            if name not in names:
                raise ValueError(f"lane {lane!r} is in group {name!r}, which does not exist")
        for group in self.groups:
            if group.sms is not None and group.sms < self.machine.chunk:
                raise fail(
                    "quota-minimum",
                    f"group {group.name!r} would have {group.sms} SMs",
                    expected=f"at least one chunk of {self.machine.chunk}",
                )
        for shared in self._sharers():
            self._check_exclusive(shared)
        processes = {group.process for group in self.groups}
        if self.mps and len(processes) > self.machine.max_clients:
            raise fail(
                "quota-clients",
                f"{len(processes)} processes would share {self.machine.name}",
                expected=f"{self.machine.max_clients} at most",
            )

    def _sharers(self) -> list[list[Group]]:
        """The groups that are on the device at the same time."""
        parties = dict.fromkeys(self.party(group.process) for group in self.groups)
        return [[g for g in self.groups if self.party(g.process) == one] for one in parties]

    def party(self, process: str) -> str:
        """Who a process takes its turn with: itself, or all that share through MPS."""
        return "mps" if self.mps and process not in self.graphics else f"process {process}"

    def _check_exclusive(self, groups: Sequence[Group]) -> None:
        taken = sum(self.limit(g) for g in groups if g.exclusive)
        if taken > self.machine.sms:
            raise fail(
                "quota-overcommitted",
                f"exclusive groups take {taken} SMs of {self.machine.name}",
                expected=f"{self.machine.sms} at most",
                found=", ".join(f"{g.name}: {self.limit(g)}" for g in groups if g.exclusive),
            )

    def limit(self, group: Group) -> int:
        """The SMs a group may use: its quota in whole chunks, as the driver rounds it."""
        if group.sms is None or group.sms >= self.machine.sms:
            return self.machine.sms
        return max(1, group.sms // self.machine.chunk) * self.machine.chunk

    def group_of(self, lane: str) -> Group:
        """The group that a lane belongs to."""
        name = self.lanes.get(lane, MAIN)
        for group in self.groups:
            if group.name == name:
                return group
        return Group(MAIN)


@dataclass(frozen=True)
class Interval:
    """A stretch of time with the same kernels running. ``activity`` is the share of SMs active."""

    start: float
    end: float
    activity: float


@dataclass(frozen=True)
class GpuRun(Schedule):
    """A schedule and how active the GPU was: the time average of SMs with a resident warp."""

    intervals: tuple[Interval, ...] = ()

    @property
    def activity(self) -> float:
        """The mean share of SMs active, from 0 to 1."""
        if not self.makespan:
            return 0.0
        return sum(i.activity * (i.end - i.start) for i in self.intervals) / self.makespan


@dataclass(frozen=True)
class Progress:
    """A running kernel's rate (1: as if alone with all it can use) and the SMs it keeps active."""

    rate: float
    active: float


def simulate_gpu(kernels: Iterable[Kernel], gpu: VirtualGpu) -> GpuRun:
    """Run ``kernels`` in simulated time.

    Raises as :func:`rose_compiler.base.machine.simulate`, and ``QuotaError``
    (``quota-minimum``) if a kernel has no SM to run on because exclusive groups own them all.
    """
    intervals: list[Interval] = []
    known: dict[object, dict[str, Progress]] = {}  # by what runs on which lane
    active = 0.0

    def rates_of(running: Sequence[Kernel]) -> dict[str, float]:
        nonlocal active
        key = frozenset(
            (k.lane, k.demand, k.serial, k.bandwidth, k.device, k.grain) for k in running
        )
        by_lane = known.get(key)
        if by_lane is None:  # a steady state runs the same kernels again and again
            found = rates(running, gpu)
            by_lane = known[key] = {k.lane: found[k.name] for k in running}
        if not any(p.rate > 0 for p in by_lane.values()):
            raise fail(
                "quota-minimum",
                f"{', '.join(k.name for k in running)} can't run: other groups own every SM",
                expected="a quota for each lane, or SMs left over",
            )
        active = sum(p.active for p in by_lane.values()) / max(1, gpu.machine.sms)
        return {k.name: by_lane[k.lane].rate for k in running}

    def passed(start: float, end: float) -> None:
        intervals.append(Interval(start, end, active))

    run = run_lanes(kernels, rates_of, passed)
    return GpuRun(run.makespan, run.start, run.end, tuple(intervals))


def rates(kernels: Sequence[Kernel], gpu: VirtualGpu) -> dict[str, Progress]:
    """How fast kernels run that are on the machine at the same time, by name."""
    on_cpu = [k for k in kernels if k.device == "cpu"]
    on_gpu = [k for k in kernels if k.device == "gpu"]
    found: dict[str, Progress] = {}
    cores = fair_shares({k.name: k.demand for k in on_cpu}, gpu.machine.cores)
    for kernel in on_cpu:
        found[kernel.name] = Progress(kernel.speed(cores[kernel.name]), 0.0)
    party = {k.name: gpu.party(gpu.group_of(k.lane).process) for k in on_gpu}
    parties = list(dict.fromkeys(party.values()))
    if len(parties) <= 1:
        return found | _together(on_gpu, gpu)
    machine = gpu.machine
    turn = machine.slice_s / (machine.slice_s + machine.switch_s) / len(parties)
    for one in parties:
        mine = [k for k in on_gpu if party[k.name] == one]
        for name, progress in _together(mine, gpu).items():
            found[name] = Progress(progress.rate * turn, progress.active * turn)
    return found


def _together(kernels: Sequence[Kernel], gpu: VirtualGpu) -> dict[str, Progress]:
    """Kernels that are resident at the same time: SMs first, then bandwidth."""
    units = _resident_units(kernels, gpu)
    speeds = {k.name: k.speed(units[k.name]) for k in kernels}
    asked = {k.name: k.bandwidth * speeds[k.name] for k in kernels if k.bandwidth * speeds[k.name]}
    granted = fair_shares(asked, 1.0)
    found = {}
    for kernel in kernels:
        rate = speeds[kernel.name]
        if kernel.name in asked:
            rate *= granted[kernel.name] / asked[kernel.name]
        # SMs stay active while their warps wait for memory, and are idle in the serial part
        active = units[kernel.name] * (1 - kernel.serial * rate) if rate else 0.0
        found[kernel.name] = Progress(rate, active)
    return found


def _resident_units(kernels: Sequence[Kernel], gpu: VirtualGpu) -> dict[str, float]:
    """SMs by kernel while it has some.

    How many depends on how often the others have a kernel running, which depends on what they get:
    a fixed point, reached in a few rounds since each round moves presences by less than the last.
    """
    presence = {k.name: 1.0 - k.serial for k in kernels}
    units: dict[str, float] = {}
    groups = [gpu.group_of(k.lane) for k in kernels]
    pools = [group.name if group.exclusive else "" for group in groups]
    crowded = len(set(pools)) < len(pools) and any(k.serial for k in kernels)
    rounds = 8 if crowded else 1
    for _ in range(rounds):
        for kernel in kernels:
            seen = {**presence, kernel.name: 1.0}
            units[kernel.name] = _units(kernels, seen, gpu)[kernel.name]
        presence = {k.name: 1.0 - k.serial * k.speed(units[k.name]) for k in kernels}
    return units


def _units(
    kernels: Sequence[Kernel], presence: Mapping[str, float], gpu: VirtualGpu
) -> dict[str, float]:
    """SMs by kernel, for kernels that claim them for a part of the time."""
    claims = {k.name: (k.demand * presence[k.name], k.grain) for k in kernels}
    groups = {k.name: gpu.group_of(k.lane) for k in kernels}
    parties = {gpu.party(group.process) for group in groups.values()}
    here = [g for g in gpu.groups if gpu.party(g.process) in parties]
    free = float(gpu.machine.sms - sum(gpu.limit(g) for g in here if g.exclusive))
    left = {
        g.name: float(gpu.limit(g) if g.exclusive or gpu.mps else gpu.machine.sms)
        for g in groups.values()
    }
    units: dict[str, float] = {}
    for level in sorted({gpu.priority.get(k.lane, 0) for k in kernels}):
        by_group: dict[str, list[str]] = {}
        for kernel in kernels:
            if gpu.priority.get(kernel.lane, 0) == level:
                by_group.setdefault(groups[kernel.name].name, []).append(kernel.name)
        owners = {name for name, members in by_group.items() if groups[members[0]].exclusive}
        shared = {
            name: (
                min(sum(claims[k][0] for k in members), left[name]),
                _mean_grain([claims[k] for k in members]),
            )
            for name, members in by_group.items()
            if name not in owners
        }
        parts = weighted_shares(shared, free)
        for name, members in by_group.items():
            room = left[name] if name in owners else parts[name]
            given = weighted_shares({k: claims[k] for k in members}, room)
            units |= given
            used = sum(given.values())
            left[name] -= used
            if name not in owners:
                free = max(0.0, free - used)
    return units


def _mean_grain(claims: Sequence[tuple[float, float]]) -> float:
    total = sum(demand for demand, _ in claims)
    return sum(demand * grain for demand, grain in claims) / total if total else 1.0


def weighted_shares(claims: Mapping[str, tuple[float, float]], capacity: float) -> dict[str, float]:
    """Shares of ``capacity`` in proportion to demand times weight, none above its demand.

    ``claims`` are pairs of demand and weight. All of it is used, or every demand is met.
    """
    left = max(0.0, capacity)
    waiting = sum(demand * weight for demand, weight in claims.values())
    shares: dict[str, float] = {}
    # who weighs most gets all it asks for first; the rest is divided among the others
    for name in sorted(claims, key=lambda name: -claims[name][1]):
        demand, weight = claims[name]
        fair = left * demand * weight / waiting if waiting > 0 else 0.0
        shares[name] = min(demand, fair)
        left -= shares[name]
        waiting -= demand * weight
    return shares
