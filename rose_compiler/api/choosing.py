"""What one program's schedules are chosen from, and what is known of each before it has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rose_compiler.api import objects
from rose_compiler.api.building import Building
from rose_compiler.api.cache import Entry, folder
from rose_compiler.api.cores import CoreQuotas, shard_cores
from rose_compiler.api.costing import forecast
from rose_compiler.api.options import Options
from rose_compiler.api.profiling import Profiling
from rose_compiler.api.tuning import Tuning
from rose_compiler.api.wrappers import with_wrappers
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir.program import Program
from rose_compiler.passes.accumulate import accumulates
from rose_compiler.passes.interleave import interleaves
from rose_compiler.passes.next_reset import resetting
from rose_compiler.passes.overlap import overlapping
from rose_compiler.passes.versions import copying


class Choosing(Building):
    """Schedules of one unit: which are tried, what is predicted of them, where the best is kept."""

    def __init__(self, program: Program, options: Options, log: RemarkLog) -> None:
        super().__init__(program, options, log)
        self.profiling = Profiling()
        self.cores = CoreQuotas(log)
        self.make: Any = None  # of the arguments: types, shapes, devices
        self.together = 1  # trips of the user's loop that one run makes
        self.trips = 0  # iterations that are known to come, as far as loops say
        self._tuning: Tuning | None = None

    def tuning(self, eager: bool = True) -> Tuning:
        """Which schedule comes next; made when the first iteration has been seen."""
        if self._tuning is None:
            shards = max((len(s) for s in self.shards().values()), default=1)
            beside = bool(self.asynchronous())
            fusable = None in self.optimizers().values()
            self._tuning = Tuning(
                self.options,
                shards,
                beside,
                self.log,
                eager,
                fusable,
                self._entry,
                hosted=bool(objects.hosted(self.program.objects)),
                overlap=lambda: overlapping(self.program) or resetting(self.program),
                streams=self.streamable,
                accumulate=lambda: accumulates(self.program) or interleaves(self.program),
                copies=lambda: copying(self.program),
                compilable=self._compilable,
                plans=self.cores.plans,
                wrappers=self._batches(),
            )
            self._tuning.progress.name = self.program.name
            self._tuning.verdicts.forecast = self.forecast
            found, ahead = self.program.objects, self.forecast
            self._tuning.follow_ups.bound = lambda one: self.cores.with_shards(one, found, ahead)
            self._tuning.follow_ups.foreseen = self.cores.foresee
            self._tuning.limit(self._runs())
        return self._tuning

    def _batches(self) -> bool:
        """Whether wrappers of any simulator's environments can advance at once."""
        return any(names for shards in self.wrappers().values() for names, _, _ in shards)

    def _runs(self) -> int:
        """How many runs are to be expected in all; 0 where that is not known."""
        return -(-(self.options.iterations or self.trips) // self.together)

    def expect(self, trips: int) -> None:
        """A loop is about to make this many trips of the unit."""
        self.trips += trips
        if self._tuning is not None:
            self._tuning.limit(self._runs())

    def _entry(self, space: Sequence[Decision | None]) -> Entry | None:
        """Where the schedule that is settled on is kept for later runs, if anywhere."""
        where = folder(knobs.current())
        if where is None:
            return None
        about = {
            "program": self.text,
            "make": self.make,
            "shards": self.shards(),
            "asynchronous": sorted(self.asynchronous()),
            "processes": self.cores.lanes(self.program.objects),
            "options": self.options.asked(),
            "passes": [repr(one) for one in self.options.pipeline],
            "candidates": [str(one) for one in space],
        }
        return Entry(where, self.program.name, about, self.log)

    def memory_of(self, decision: Decision, width: int) -> str:
        """What is known of the memory of all schedules built so far, and of one in full."""
        for one in (*self.schedules.values(), self.build(decision)):
            self.memory.estimate(one.decision, self.program, one.program)
        return self.memory.render(decision, width)

    def forecast(self, decision: Decision) -> float | None:
        """Seconds of an iteration of a schedule, predicted from the profile of program order;
        ``None`` where program order was not profiled."""
        base = self.profiling.of.get(Decision())
        if base is None or not base.iteration_s:
            return None
        cores = shard_cores(decision)  # which change nothing of the program
        plan = self.build(decision if cores is None else replace(decision, cores=())).emitted.plan
        if plan is None:
            return None
        shards = max((len(s) for s in self.shards().values()), default=1)
        profile = base.profile
        if decision.wrappers:
            profile = with_wrappers(profile, base.program, self.wrappers())
        return forecast(profile, base.program, plan, base.machine, shards, cores, self.local)
