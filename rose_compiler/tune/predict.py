"""How long an iteration of a schedule takes: event-driven, over lanes, cores and hand-overs.

A body whose coordinator does everything takes the sum of it. One that hands work to lanes is
simulated trip by trip (:func:`rose_compiler.base.machine.simulate`): the coordinator is a lane of
its own, handing over and taking in cost it time, lanes run in order, and all share the cores. Where
the single times of an operation, and of handing it over, are known, trips take these one after the
other, since who waits for two waits for the longer one. Inner loops are simulated by themselves and
take their time in the body around them. After :data:`TRIPS` trips a loop goes on as in its last
half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rose_compiler.base.machine import Machine, Task, simulate
from rose_compiler.base.quota import SHARDS
from rose_compiler.tune.nest import Cost, Nest, Step

#: Trips that are simulated one by one.
TRIPS = 64
#: The coordinator's lane in a simulation.
COORDINATOR = ""
#: Cores that a task takes which does nothing but wait.
_IDLE = 1e-6


@dataclass(frozen=True)
class Prediction:
    """Seconds of an iteration, and of one run of each loop by key."""

    seconds: float
    loops: Mapping[str, float] = field(default_factory=dict)


def predict(
    nest: Nest,
    costs: Mapping[str, Cost],
    machine: Machine,
    *,
    contention: bool = True,
    shard_cores: float | None = None,
) -> Prediction:
    """The time of one iteration.

    Args:
        costs: of each operation by key, on cores that it has for itself.
        contention: whether the operations share the machine's cores. ``False`` for costs that were
            measured while others ran beside.
        shard_cores: the cores that all lanes of shards are kept to, together; ``None`` for none.
    """
    found = _Predictor(costs, machine, contention, shard_cores)
    seconds = found.body(nest)
    return Prediction(seconds, found.loops)


class _Predictor:
    def __init__(
        self,
        costs: Mapping[str, Cost],
        machine: Machine,
        contention: bool,
        shard_cores: float | None = None,
    ) -> None:
        self.costs, self.machine, self.contention = costs, machine, contention
        self.shard_cores = shard_cores
        self.loops: dict[str, float] = {}

    def body(self, nest: Nest) -> float:
        """Seconds of one run of a body with all its trips."""
        inner = {s.key: self.body(s.inner) for s in nest.steps if s.inner is not None}
        if not nest.lanes:
            one = sum(s.times * self._own(s, inner) for s in nest.steps)
            seconds = nest.trips * one
        else:
            seconds = self._lanes(nest, inner)
        if nest.key:
            self.loops[nest.key] = seconds
        return seconds

    def _own(self, step: Step, inner: Mapping[str, float]) -> float:
        """What a step takes of the coordinator's time."""
        cost = self.costs[step.key]
        if step.what == "loop":
            return inner[step.key]
        return {"run": cost.run_s, "submit": cost.submit_s, "wait": cost.receive_s}[step.what]

    def _lanes(self, nest: Nest, inner: Mapping[str, float]) -> float:
        whole = max(0, round(nest.trips))
        if whole <= TRIPS:
            return self._simulated(nest, inner, whole)
        if any(self.costs[s.key].varies or self.costs[s.key].handed for s in nest.steps):
            # a half would stand for its own trips only
            return nest.trips / TRIPS * self._simulated(nest, inner, TRIPS)
        half, all_ = (self._simulated(nest, inner, n) for n in (TRIPS // 2, TRIPS))
        return all_ + (nest.trips - TRIPS) * (all_ - half) / (TRIPS - TRIPS // 2)

    def _simulated(self, nest: Nest, inner: Mapping[str, float], trips: int) -> float:
        tasks = list(self._tasks(nest, inner, trips))
        if not self.contention:
            tasks = [Task(t.name, t.lane, t.work_s, _IDLE, t.after) for t in tasks]
        bound = {}
        if self.shard_cores is not None:
            part = SHARDS, self.shard_cores
            bound = {lane: part for lane in nest.lanes if lane.startswith("shard:")}
        return simulate(tasks, self.machine, bound).makespan

    def _tasks(self, nest: Nest, inner: Mapping[str, float], trips: int) -> Iterator[Task]:
        before: tuple[str, ...] = ()  # what the coordinator did last
        for round_ in range(trips + nest.depth):
            for position, step in enumerate(nest.steps):
                trip = round_ - step.stage
                if not 0 <= trip < trips:
                    continue
                cost = self.costs[step.key]
                name = f"{position} {round_}"
                handed = cost.handed_in(trip)
                seconds = {
                    "loop": inner.get(step.key, 0.0),
                    "run": cost.run_of(trip),
                    "submit": handed.submit_s,
                    "wait": handed.receive_s,
                }
                after = (f"{step.key} {trip}",) if step.what == "wait" else ()
                own = step.times * seconds[step.what]
                demand = cost.demand if step.what == "run" else 1.0
                yield Task(name, COORDINATOR, own, max(_IDLE, demand), after)
                # what is handed over may begin before the coordinator is back from that
                since, before = before, (name,)
                if step.what != "submit":
                    continue
                start = since
                if handed.launch_s > 0:
                    start = (f"{name} on its way",)
                    yield Task(start[0], start[0], handed.launch_s, _IDLE, since)
                far = step.times * cost.run_of(trip)
                yield Task(f"{step.key} {trip}", step.lane, far, max(_IDLE, cost.demand), start)
