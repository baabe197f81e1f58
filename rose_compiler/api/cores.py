"""Core quotas of schedules: found from a profile, tried like any other schedule, and in force while
an iteration of theirs runs.

A schedule with components in processes of their own may be faster when each side keeps to cores of
its own, with as many threads. That is proposed only where they would start more threads than there
are cores; whether it pays is decided on whole iterations, in pairs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from rose_compiler.api.objects import in_processes, simulators
from rose_compiler.api.points import Points
from rose_compiler.api.profiling import Instrumented
from rose_compiler.api.quotas import plan_quotas
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import QuotaError, RoseError
from rose_compiler.base.machine import detect_cpu
from rose_compiler.base.quota import COORDINATOR, SHARDS, QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.runtime.hosts.moving import starts_with
from rose_compiler.runtime.quotas.cores import AppliedCores, Cores
from rose_compiler.runtime.quotas.moves import move
from rose_compiler.runtime.quotas.planned import CORES as BY
from rose_compiler.tune.levels import LEAST

PASS = "quota"
_AGAIN = (
    "iterations have changed their length for good: operations are measured anew, and cores planned"
)


class CoreQuotas:
    """The quotas in force for one unit; :meth:`bind` changes them, :meth:`entered` holds them."""

    def __init__(self, log: RemarkLog) -> None:
        self._log = log
        self._asked = False
        self._drifts = 0  # those that quotas were planned anew after
        self._again = False  # it is a search that is over that they are looked for in
        self._beside: Decision | None = None  # the schedule that quotas are looked for
        self._points = Points(frozenset({0}))
        self._made: tuple[Decision, Instrumented] | None = None
        #: What was planned, by the schedule that is tried with it.
        self.plans: dict[Decision, QuotaPlan] = {}
        self._applied: AppliedCores | None = None
        self._key: Any = ()
        self._before: dict[str, tuple[Any, frozenset[int]]] = {}
        self._fixed: dict[str, Any] = {}  # whose threads are counted as their libraries are loaded
        self._renewed: set[tuple[str, int]] = set()
        self._counted: list[
            Any
        ] = []  # components whose next process has a thread count as variable
        self._told: set[tuple[tuple[str, int], ...]] = set()

    # -- finding -----------------------------------------------------------------------------------

    def wanted(self, tuning: Tuning, objects: dict[str, Any], close: bool) -> Decision | None:
        """The schedule to be profiled next, so that quotas can be proposed: program order with
        several numbers of cores, then the first one whose components run beside the rest."""
        if self._beside is not None:
            if not self._looking(tuning):  # the budget ended while points were taken
                self.give_up()
                return None
            return Decision() if self._points.count is not None else self._beside
        if not tuning.tuned:
            return None
        again = self._again = tuning.settled and tuning.drifts > self._drifts
        if again:
            self._drifts = tuning.drifts
        elif self._asked:
            return None
        decision = tuning.again() if again else tuning.beside
        if decision is None or not crowded(in_processes(objects)):
            return None
        self._asked = True
        if not close:
            why = 'numerics="bitwise" keeps the thread counts of eager execution: sums hang on them'
            if not again:
                self._miss(Blocker("switched-off", why, 'numerics="close"'))
            return None
        if again:
            self.release()  # who is bound already can't be given more cores
            self._log.add(Remark("note", PASS, (), "replanned", _AGAIN))
        self._beside = decision
        self._points = Points(frozenset(os.sched_getaffinity(0)))
        return Decision()

    def _looking(self, tuning: Tuning) -> bool:
        """Whether there is still a search that quotas can join."""
        return (tuning.again() if self._again else tuning.beside) is not None

    def profiled(
        self, schedule: Schedule, run: Callable[[Instrumented], Any], objects: dict[str, Any]
    ) -> Any:
        """Run one iteration of the schedule that was wanted, and note what it took."""
        decision = schedule.decision
        if self._made is None or self._made[0] != decision:
            self._made = decision, Instrumented(schedule.program, detect_cpu())
        made = self._made[1]
        if decision == self._beside:
            return run(made)
        with self._points.held(in_processes(objects)):
            result = run(made)
        if self._points.took(made.latest):
            self._points.release()
        return result

    def propose(self, tuning: Tuning) -> None:
        """Have a schedule tried with the cores that profiles speak for, once all are there."""
        if self._points.count is not None or self._made is None or self._made[0] != self._beside:
            return
        decision, made = self._made
        self.give_up()
        if not self._looking(tuning):  # the last of the profiles took the rest of the budget
            return
        profile = made.latest
        alone, ways = self._points.responses(profile.timeline)
        plan = plan_quotas(profile, "cpu", alone, self._points.outside(), hand_offs=ways)
        predicted_s = plan.predicted_s
        if not plan.shares or predicted_s is None or profile.timeline is None:
            why = "; ".join(plan.notes) or "nothing runs beside anything"
            self._miss(Blocker("no-lane", f"no core quotas are tried: {why}"))
            return
        if self._points.levels < LEAST:
            few = f"responses from {self._points.levels} numbers of cores: there are no more"
            plan = replace(plan, notes=(*plan.notes, few))
            self._log.add(Remark("note", PASS, (), "few-points", few))
        cores = tuple((share.lane, share.units) for share in plan.shares)
        spans = profile.timeline.spans
        without = max(s.end_s for s in spans) - min(s.start_s for s in spans)
        decision = replace(decision, cores=cores)
        self.plans[decision] = plan
        put = tuning.reconsider if self._again else tuning.offer
        put(decision, without, predicted_s)

    def give_up(self) -> None:
        """Nothing more is profiled for quotas."""
        if self._beside is not None:
            self._points.release()
        self._beside = self._made = None

    def with_shards(
        self,
        decision: Decision | None,
        objects: dict[str, Any],
        forecast: Callable[[Decision], float | None] = lambda _: None,
    ) -> Decision | None:
        """A schedule with the processes of simulators kept to cores of their own, each or all
        together, so that the coordinator has the others while they step; None where that is no
        question. The coordinator itself is bound to none: it has all of them once nothing steps.

        Of several numbers of cores the one with the least ``forecast`` is taken, without any as
        many as there are shards.
        """
        if decision is None or decision.cores or decision.lanes != "native" or decision.groups < 2:
            return None
        found = _shards(objects)
        cores = len(os.sched_getaffinity(0))
        threads = decision.rollout_threads or torch.get_num_threads()
        if len(found) < 2 or cores < 2 or threads + len(found) <= cores:
            return None
        most = min(len(found), cores - 1)
        counts = sorted({most, math.ceil(most / 2), 1}, reverse=True)
        made = [replace(decision, cores=((SHARDS, count),)) for count in counts]
        if len(found) < cores and len(simulators(objects)) == 1:
            each = tuple((f"shard:{k}", 1) for k in range(len(found)))
            made[0] = replace(decision, cores=each)
        ahead = [math.inf if s is None else s for s in map(forecast, made)]
        return made[ahead.index(min(ahead))]

    def foresee(self, decision: Decision, without_s: float, with_s: float) -> None:
        """The plan of a schedule with bound shards, by the seconds of an iteration that are
        expected without and with their cores."""
        self.plans[decision] = QuotaPlan.divide(
            "cores",
            detect_cpu(),
            dict(decision.cores),
            before_s=without_s,
            predicted_s=with_s,
            notes=("the coordinator is bound to none",),
        )

    def lanes(self, objects: dict[str, Any]) -> list[str]:
        """The lanes of processes that can be bound, with the threads that each asks for."""
        found = _members(objects)
        return [f"{lane}: {[one.rose_threads for one in of]}" for lane, of in found.items()]

    # -- in force ----------------------------------------------------------------------------------

    def bind(self, objects: dict[str, Any], decision: Decision | None) -> Blocker | None:
        """Bind the processes as a schedule wants it, or let them go; why that can't be, or None.

        Where the machine refuses, nobody is bound.
        """
        cores = () if decision is None else decision.cores
        if not cores and not self._key:
            return None
        members = _members(objects)
        pids = tuple((lane, *(one.pid for one in of)) for lane, of in members.items())
        key = (cores, pids) if cores else ()
        if key == self._key:
            return None
        self.release()
        if not cores:
            return None
        try:
            plan = QuotaPlan.divide("cores", detect_cpu(), dict(cores))
            self._applied = Cores(cgroups=None).apply(plan)
            for lane, count in cores:
                for number, one in enumerate(members.get(lane, ())):
                    self._bind(f"{lane} {number}", one, self._applied.cores[lane], count)
        except (QuotaError, OSError) as error:
            self.release()
            what = error.what if isinstance(error, RoseError) else str(error)
            allow = error.help if isinstance(error, RoseError) else None
            return Blocker("not-available", f"[{decision}] can't be had: {what}", allow)
        self._key = key
        return None

    def _bind(self, name: str, component: Any, cores: frozenset[int], count: int) -> None:
        self._before[name] = component, frozenset(os.sched_getaffinity(component.pid))
        lane = name.rpartition(" ")[0]
        assert self._applied is not None
        variables = self._applied.environment(lane)
        under = getattr(component, "rose_planned", None)
        started = under is not None and under.environment(lane) == variables
        if component.rose_limit(cores, count) or started:
            return
        starts_with(component, variables, BY)  # whenever another takes over
        self._counted.append(component)
        if (lane, count) not in self._renewed:
            self._fixed[lane] = component

    def renew(self) -> None:
        """Let components whose libraries count their threads as they are loaded go on in new
        processes, all together, in which they count the cores of the quotas in force; once each.
        Between iterations of a schedule that is settled on."""
        fixed, self._fixed = self._fixed, {}
        applied = self._applied
        if not fixed or applied is None:
            return
        self._renewed |= {(lane, len(applied.cores[lane])) for lane in fixed}
        environments = {lane: applied.environment(lane) for lane in fixed}
        self._log.extend(move(fixed, environments, BY, applied.started))

    def tell(self, decision: Decision, blocker: Blocker) -> None:
        """Say once that a schedule runs without its quotas."""
        if decision.cores not in self._told:
            self._told.add(decision.cores)
            self._miss(blocker)

    def release(self) -> None:
        """Let every process have its cores and threads back."""
        before, self._before = self._before, {}
        counted, self._counted = self._counted, []
        for component in counted:
            starts_with(component, {}, BY)
        self._fixed = {}  # of the schedule that was bound
        self._applied, self._key = None, ()
        for component, cores in before.values():
            with suppress(RoseError, OSError):  # it may be gone
                component.rose_limit(cores, component.rose_threads)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Hold the coordinator to its cores and threads while an iteration runs."""
        applied = self._applied
        if applied is None or COORDINATOR not in applied.cores:
            yield
            return
        with applied.entered(COORDINATOR):
            yield

    def _miss(self, blocker: Blocker) -> None:
        self._log.add(Remark.from_blocker(PASS, blocker))


def shard_cores(decision: Decision) -> int | None:
    """The cores that all shards together are kept to; None where nothing is bound, or hosts are."""
    if not decision.cores or not all(lane.startswith("shard") for lane, _ in decision.cores):
        return None
    return sum(count for _, count in decision.cores)


def crowded(processes: Mapping[str, Any]) -> bool:
    """Whether this process and those of components would start more threads than there are cores,
    of which there must be two to be divided."""
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads() + sum(h.rose_threads for h in processes.values())
    return bool(processes) and 1 < cores < threads


def _members(objects: dict[str, Any]) -> dict[str, list[Any]]:
    """What lives in processes, by lane; the shards of all simulators by :data:`SHARDS` too."""
    found = {lane: [one] for lane, one in in_processes(objects).items()}
    shards = _shards(objects)
    if len(simulators(objects)) == 1:
        found |= {f"shard:{number}": [one] for number, one in enumerate(shards)}
    return found | ({SHARDS: shards} if shards else {})


def _shards(objects: dict[str, Any]) -> list[Any]:
    """Shards in processes of their own, of simulators all of whose shards are."""
    found: list[Any] = []
    for env in simulators(objects).values():
        parts = env.shards() if callable(getattr(env, "shards", None)) else ()
        if all(hasattr(one, "rose_limit") for one in parts):
            found += parts
    return found
