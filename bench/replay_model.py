"""Published stage times as programs on the virtual GPU, under stated assumptions.

A row says how long simulation, inference and training take, not how many SMs they use. What is not
published is an :class:`Assumptions` with a low, a middle and a high value and where it comes from.
None of them is fitted to anybody's results.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from rose_compiler.base.gpu import GpuRun, Group, Kernel, VirtualGpu, simulate_gpu
from rose_compiler.base.machine import Machine, load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.tune.slack import tune

DATA = Path(__file__).with_name("data") / "stage_times.csv"
#: Steps of a rollout that are simulated; real ones have more, which only shortens the ramps.
STEPS = 8
#: A stage with this share of an iteration leaves nothing to gain from overlapping the others.
DOMINANT = 0.98


@dataclass(frozen=True)
class Range:
    """An assumption: least, middle and greatest value, and where they come from."""

    low: float
    middle: float
    high: float
    source: str


RANGES: dict[str, Range] = {
    "sim_sms": Range(
        0.25,
        0.54,
        1.0,
        "share of the SMs a simulator on the GPU can use. Middle: simulation and rendering at the "
        "same time reached up to 1.85x of taking turns (VUDA), so that two such phases ask for "
        "little more than one device. Ends: no measurement found",
    ),
    "sim_serial": Range(
        0.2,
        0.4,
        0.7,
        "share of its time without a kernel. GPU utilization of 80%, 60% and 30% is reported for "
        "Isaac Gym and Isaac Lab (IsaacLab issues 738 and 3043)",
    ),
    "sim_fixed": Range(
        0.27,
        0.34,
        0.42,
        "share of a step that half the environments don't save. 10 environments at 44 steps/s and "
        "100 at 21 (ManiSkill issue 355): 20 ms and 0.28 ms an environment",
    ),
    "infer_sms": Range(
        0.5, 0.75, 1.0, "share of the SMs that inference can use: no measurement found"
    ),
    "infer_serial": Range(
        0.0,
        0.25,
        0.5,
        "share of its time without a kernel. CUDA graphs halve the time of a pi0 call (arXiv "
        "2510.26742); 0 is with them",
    ),
    "infer_fixed": Range(
        0.1,
        0.3,
        0.5,
        "share of a call that half the batch does not save: weights are read once whatever the "
        "batch. No measurement found",
    ),
    "memory": Range(
        0.2,
        0.5,
        0.8,
        "share of the bandwidth that inference uses at full rate; a simulator half of that, "
        "training as much. Vision-language backbones are bound by compute, action experts by "
        "memory (arXiv 2604.24447); the values are assumed",
    ),
    "grain": Range(
        1.0,
        3.0,
        8.0,
        "how much longer the kernels of inference and training last than a simulator's: no "
        "measurement found",
    ),
    "render": Range(
        0.0,
        0.25,
        0.5,
        "share of a simulator's time in a graphics context, where it renders: such contexts take "
        "turns with CUDA (VUDA). The share is assumed",
    ),
    "late": Range(
        0.0,
        0.1,
        0.25,
        "share of training that only reads the rollout (log-probabilities, values): one forward "
        "pass against 3 an epoch is 1/(1 + 3 E), 0.25 for one epoch and 0.1 for three; 0 where "
        "the rollout computes them itself",
    ),
    "apart": Range(
        0.0,
        0.0,
        1.0,
        "1 where the simulator has to live in a process of its own: stage one takes turns with it, "
        "stage two shares through MPS. 0 where it is a component like any other",
    ),
    "env_share": Range(
        0.48,
        0.65,
        0.96,
        "simulation's share of a rollout where only their sum is published: the least, a middling "
        "and the greatest of the rows that say both",
    ),
}
#: What makes training use the device well, for all rows: dense kernels, few launches.
TRAIN_SMS, TRAIN_SERIAL = 1.0, 0.05


@dataclass(frozen=True)
class Assumptions:
    """One point in :data:`RANGES`; the middle by default."""

    sim_sms: float = RANGES["sim_sms"].middle
    sim_serial: float = RANGES["sim_serial"].middle
    sim_fixed: float = RANGES["sim_fixed"].middle
    infer_sms: float = RANGES["infer_sms"].middle
    infer_serial: float = RANGES["infer_serial"].middle
    infer_fixed: float = RANGES["infer_fixed"].middle
    memory: float = RANGES["memory"].middle
    grain: float = RANGES["grain"].middle
    render: float = RANGES["render"].middle
    late: float = RANGES["late"].middle
    apart: float = RANGES["apart"].middle
    env_share: float = RANGES["env_share"].middle


NAMES = tuple(f.name for f in fields(Assumptions))


@dataclass(frozen=True)
class Row:
    """One published workload; times in the row's own unit, None where they are not published."""

    id: str
    workload: str
    hardware: str
    machine: str
    unit: str
    rollout: float | None
    env: float | None
    infer: float | None
    train: float | None
    invariant: float | None  # of the simulation: the same on every step, and done again
    sim: str
    renders: bool
    note: str
    source: str

    @property
    def why_not(self) -> str | None:
        """Why there is nothing to schedule in this row, None if there is."""
        if self.rollout is None and self.env is None:
            return "only inference is published"
        return None

    @property
    def published(self) -> dict[str, float]:
        """Stages as published: a rollout that is not split counts as one."""
        if self.env is not None and self.infer is not None:
            found = {"simulation": self.env, "inference": self.infer}
        elif self.rollout is not None and self.infer is not None:
            found = {"simulation": self.rollout - self.infer, "inference": self.infer}
        elif self.rollout is not None and self.env is not None:
            found = {"simulation": self.env, "inference": self.rollout - self.env}
        else:
            found = {"rollout": self.rollout or self.env or 0.0}
        return found | ({"training": self.train} if self.train is not None else {})

    @property
    def no_gain(self) -> bool:
        """Whether one stage takes so much that no gain is predicted, before anything is run."""
        if self.why_not:
            return False
        return max(self.published.values()) / sum(self.published.values()) >= DOMINANT

    @property
    def split(self) -> bool:
        """Whether simulation and inference are published apart."""
        return "simulation" in self.published

    def assumed(self) -> tuple[str, ...]:
        """The assumptions that matter to this row."""
        left_out = {
            "sim_sms": self.sim == "cpu",
            "sim_serial": self.sim == "cpu",
            "sim_fixed": self.sim == "cpu",
            "apart": self.sim == "cpu",
            "render": not self.renders,
            "late": self.train is None,
            "env_share": self.split,
        }
        return tuple(name for name in NAMES if not left_out.get(name, False))


def rows(path: Path = DATA) -> list[Row]:
    """The table's rows."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            times: dict[str, Any] = {
                name: float(line[name]) if line[name] else None
                for name in ("rollout", "env", "infer", "train", "invariant")
            }
            texts: dict[str, Any] = {
                name: line[name] for name in ("id", "workload", "hardware", "machine", "unit")
            }
            found.append(
                Row(
                    **texts,
                    **times,
                    sim=line["sim"],
                    renders=line["renders"] == "yes",
                    note=line["note"],
                    source=line["source"],
                )
            )
    return found


@dataclass(frozen=True)
class Result:
    """An iteration under one schedule: its time in the row's unit, and the mean SM activity."""

    time: float
    activity: float
    what: str


class Replay:
    """One row under one set of assumptions."""

    def __init__(self, row: Row, assumed: Assumptions) -> None:
        self.row = row
        self.assumed = assumed
        self.machine: Machine = _machine(row.machine)
        stages = row.published
        if row.split:
            self.env, self.infer = stages["simulation"], stages["inference"]
        else:
            self.env = stages["rollout"] * assumed.env_share
            self.infer = stages["rollout"] - self.env
        self.train = stages.get("training", 0.0)
        # what of the rollout is neither: transfers and waiting, on no SM
        rollout = row.rollout if row.rollout is not None else self.env + self.infer
        self.other = max(0.0, rollout - self.env - self.infer)
        self.invariant = row.invariant or 0.0
        if row.no_gain and not row.split:  # one stage: nothing is known of what is inside
            self.env, self.infer = stages["rollout"], 0.0

    def rollout(self, shards: int, late: float = 0.0, by_hand: bool = False) -> list[Kernel]:
        """The kernels of a rollout, of which ``shards`` advance apart.

        ``late``: seconds of training's work done beside it. ``by_hand``: rendering does not run
        beside the physics of the next shard, and what never changes is done on every step.
        """
        found: list[Kernel] = []
        hoisted = 0.0 if by_hand else self.invariant
        if hoisted:  # one step's share of it is done once
            demand = self.assumed.sim_sms * self.machine.sms
            found.append(Kernel("hoisted", "sim", hoisted / STEPS, demand))
        env = self.env - hoisted
        ready: dict[int, tuple[str, ...]] = dict.fromkeys(range(shards), ())
        for t in range(STEPS):
            for g in range(shards):
                if self.infer:
                    ready[g] = (self._infer(found, t, g, shards, ready[g]),)
                ready[g] = (self._step(found, t, g, shards, ready[g], by_hand, env),)
                if late:
                    work = late / STEPS / shards
                    found.append(self._train(f"late {t} {g}", "late", work, ready[g]))
        return found

    def _infer(
        self, into: list[Kernel], t: int, g: int, shards: int, after: tuple[str, ...]
    ) -> str:
        a = self.assumed
        name = f"act {t} {g}"
        work, shrunk = _part(self.infer / STEPS, a.infer_fixed, shards)
        demand = a.infer_sms * self.machine.sms * shrunk
        into.append(Kernel(name, "infer", work, demand, after, a.infer_serial, a.memory * shrunk))
        return name

    def _step(
        self,
        into: list[Kernel],
        t: int,
        g: int,
        shards: int,
        after: tuple[str, ...],
        by_hand: bool,
        env: float,
    ) -> str:
        a = self.assumed
        name = f"step {t} {g}"
        if self.row.sim == "cpu":
            work = env / STEPS / shards  # cores are full with any number of environments
            into.append(Kernel(name, "sim", work, self.machine.cores, after, device="cpu"))
            return name
        work, shrunk = _part(env / STEPS, a.sim_fixed, shards)
        demand = a.sim_sms * self.machine.sms * shrunk
        memory = a.memory / 2 * shrunk
        drawn = a.render if self.row.renders else 0.0
        if drawn < 1:
            into.append(
                Kernel(name, "sim", work * (1 - drawn), demand, after, a.sim_serial, memory)
            )
        if drawn:
            after, name = (name,), f"render {t} {g}"
            lane = "sim" if by_hand else "render"
            into.append(Kernel(name, lane, work * drawn, demand, after, a.sim_serial, memory))
        return name

    def _train(self, name: str, lane: str, work: float, after: tuple[str, ...] = ()) -> Kernel:
        demand = TRAIN_SMS * self.machine.sms
        a = self.assumed
        return Kernel(name, lane, work, demand, after, TRAIN_SERIAL, a.memory, grain=a.grain)

    def _iteration(self, run: GpuRun, late: float, what: str) -> Result:
        """A rollout, what belongs to no SM, and the rest of training on the whole device."""
        rest = self.train - late
        training = (
            simulate_gpu([self._train("train", "train", rest)], VirtualGpu(self.machine))
            if rest > 0
            else GpuRun(0.0)
        )
        time = run.makespan + self.other + training.makespan
        active = run.activity * run.makespan + training.activity * training.makespan
        return Result(time, active / time, what)

    # -- the four schedules ----------------------------------------------------------------------

    def sequential(self) -> Result:
        """Inference and simulation of all environments in turn, then training."""
        run = simulate_gpu(self.rollout(1, by_hand=True), VirtualGpu(self.machine))
        return self._iteration(run, 0.0, "sequential")

    def by_hand(self) -> Result:
        """Two halves, simulator and policy in processes of their own, as today's systems do."""
        gpu = VirtualGpu(
            self.machine,
            (Group("sim", "sim"), Group("infer", "infer")),
            {"sim": "sim", "infer": "infer"},
        )
        run = simulate_gpu(self.rollout(2, by_hand=True), gpu)
        return self._iteration(run, 0.0, "two halves, taking turns")

    def stage_one(self) -> tuple[Result, int, float]:
        """The fastest of 1, 2 or 4 shards on streams, with or without late work in the windows,
        with or without a higher priority for the simulator's stream.
        """
        found: list[tuple[Result, int, float]] = [(self.sequential(), 1, 0.0)]
        for shards in (1, 2, 4):
            for late in dict.fromkeys((0.0, self.assumed.late * self.train)):
                kernels = self.rollout(shards, late)
                for first in (0, -1) if shards > 1 else (0,):
                    run = simulate_gpu(kernels, self._streams(first))
                    what = _shards(shards) + (", late work in windows" if late else "")
                    what += ", simulator first" if first else ""
                    found.append((self._iteration(run, late, what), shards, late))
        return min(found, key=lambda one: one[0].time)

    def stage_two(self) -> Result:
        """Stage one with processes that share, and quotas from slack: caps or exclusive SMs.

        The fastest of them, and of stage one itself.
        """
        best, shards, late = self.stage_one()
        for count in dict.fromkeys((shards, 2)):
            kernels = self.rollout(count, late)
            if self.assumed.apart:
                run = simulate_gpu(kernels, replace(self._streams(0), mps=True))
                shared = self._iteration(run, late, f"{_shards(count)}, MPS without quotas")
                best = min(best, shared, key=lambda one: one.time)
            lanes = [
                lane
                for lane in dict.fromkeys(k.lane for k in kernels if k.device == "gpu")
                if lane != "render"
            ]
            if len(lanes) < 2 or (count == 1 and not late):
                continue
            for backend in ("green-context", "mps-percentage"):
                tuned = self._tuned(kernels, lanes, backend, late, _shards(count))
                best = min(best, tuned, key=lambda one: one.time)
        return best

    def _tuned(
        self, kernels: list[Kernel], lanes: list[str], backend: str, late: float, what: str
    ) -> Result:
        def run(chunks: Mapping[str, int]) -> GpuRun:
            plan = QuotaPlan.divide(backend, self.machine, chunks)  # type: ignore[arg-type]
            # rendering is in no plan: it has the whole device in its turn
            gpu = replace(plan.virtual_gpu(), graphics=frozenset({"render"}), priority={"late": 1})
            groups = (*gpu.groups, Group("render", "render"))
            return simulate_gpu(
                kernels, replace(gpu, groups=groups, lanes={**gpu.lanes, "render": "render"})
            )

        tuned = tune(kernels, run, self.machine.chunks, lanes=lanes, points=3, rounds=3)
        part = ", ".join(f"{lane} {n}/{self.machine.chunks}" for lane, n in tuned.chunks.items())
        return self._iteration(run(tuned.chunks), late, f"{what}, {backend}: {part}")

    def _streams(self, first: int) -> VirtualGpu:
        """Streams share, late work has the lowest priority; graphics take turns, and so does a
        simulator in a process of its own.
        """
        groups = [Group("render", "render")]
        lanes = {"render": "render"}
        if self.assumed.apart:
            groups.append(Group("sim", "sim"))
            lanes["sim"] = "sim"
        return VirtualGpu(
            self.machine,
            tuple(groups),
            lanes,
            {"late": 1, "sim": first},
            graphics=frozenset({"render"}),
        )


def _shards(count: int) -> str:
    return f"{count} shard" + ("s" if count > 1 else "")


def _part(work: float, fixed: float, shards: int) -> tuple[float, float]:
    """A shard's time, and how much smaller its demand is: SM-seconds are divided, not added to."""
    longer = fixed + (1 - fixed) / shards
    return work * longer, 1 / shards / longer


@cache
def _machine(name: str) -> Machine:
    return load_machine(name)
