"""Published stage times as programs on the virtual GPU, under stated assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from bench.replay_assumptions import TRAIN_SERIAL, TRAIN_SMS, Assumptions
from bench.replay_rows import Row
from rose_compiler.base.gpu import GpuRun, Group, Kernel, VirtualGpu, simulate_gpu
from rose_compiler.base.machine import Machine, load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.tune.slack import tune

#: Steps of a rollout that are simulated; real ones have more, which only shortens the ramps.
STEPS = 8


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
