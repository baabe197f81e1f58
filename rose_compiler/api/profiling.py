"""Which iterations of a unit are profiled, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rose_compiler.api.awaiting import Awaiting
from rose_compiler.api.costing import CostModel
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import ConfigError, fail, register
from rose_compiler.base.machine import Machine, detect_cpu
from rose_compiler.base.marks import Mark
from rose_compiler.base.profile import Activity, Profile, Span, Timeline
from rose_compiler.base.remarks import Remark
from rose_compiler.codegen.emit import emit
from rose_compiler.codegen.load import load
from rose_compiler.ir.program import Program
from rose_compiler.runtime.clocks import SHARE
from rose_compiler.runtime.device_times import on_device
from rose_compiler.runtime.kernels import KernelTrace, Nvml, busy_sms, compared
from rose_compiler.runtime.memory import Peaks
from rose_compiler.runtime.profiler import summarize, timeline
from rose_compiler.runtime.recorder import Raw, Recorder, record
from rose_compiler.runtime.support import Runtime
from rose_compiler.tune.fits import Fits
from rose_compiler.tune.memory import Stretch
from rose_compiler.tune.spared import spared
from rose_compiler.tune.windows import Windows, find_windows

#: Iterations of a schedule that run before any of them is profiled.
WARM_UP = 1
#: Iterations of a schedule in force that are profiled.
PROFILED = 3

register(
    "not-profiled",
    ConfigError,
    "times were asked for before an iteration was profiled",
    "call the function a few times more; `profile_next()` has the next iteration profiled",
)


@dataclass(frozen=True)
class _Ran:
    """What one profiled iteration left behind."""

    raw: Raw
    spans: Sequence[Span]
    trace: KernelTrace
    nvml: Nvml | None


class Instrumented:
    """A schedule's program emitted once more, with ticks; what its profiled iterations took."""

    def __init__(
        self,
        program: Program,
        machine: Machine,
        *,
        stretches: bool = False,
        awaiting: Callable[[Program], None] | None = None,
    ) -> None:
        self.program = program
        self.machine = machine
        self._await = awaiting or Awaiting()
        self.recorder = Recorder()
        self.peaks = Peaks()
        #: What the first iteration took of memory, stretch by stretch, if that was asked for.
        self.stretches: list[Stretch] = []
        self._passed: list[str] = []
        self._due = 0.0
        self._looks = stretches  # at memory; a look takes as long as many operations
        self.recorder.look = self._looking if stretches else None
        emitted = emit(program, tick=self.recorder.tick)
        self._outer = {k: m.key for k, m in enumerate(emitted.marks) if not m.path}
        self.marks: tuple[Mark, ...] = emitted.marks
        self.plan = emitted.plan
        self._run = load(emitted)
        self.iteration_s: list[float] = []
        # not looked at before somebody asks
        self._raw: list[_Ran] = []
        self._checks: list[str] = []
        self._timelines: list[Timeline] = []
        self._on_device: Timeline | None = None

    def run(self, runtime: Runtime, *args: Any) -> Any:
        """Run one iteration, as the schedule itself does, and note what it took. It lasts until the
        devices are through with it, so that no kernel of it is left out."""

        def whole() -> Any:
            result = self._run(runtime, *args)
            self._await(self.program)
            return result

        self._await(self.program)  # what came before is no part of it
        trace = KernelTrace()
        nvml = Nvml() if trace.why is None else None
        self.recorder.prepare()
        if self._looks:
            self.stretches.clear()
            self._passed.clear()
            self.peaks.begin()
            self._due = 0.0
        with nvml or nullcontext(), trace:
            started = perf_counter()
            result, spans = record(self.recorder, runtime, whole)
            self.iteration_s.append(perf_counter() - started)
        if self._looks:
            self._stretch()
            self._looks = False
            self.recorder.look = None
        self._raw.append(_Ran(self.recorder.raw(), spans, trace, nvml))
        return result

    def _looking(self, k: int) -> None:
        """Look at memory behind operations of the outermost body; the rarer, the longer that
        takes."""
        if (key := self._outer.get(k)) is None:
            return
        self._passed.append(key)
        now = perf_counter()
        if now >= self._due:
            self._stretch()
            after = perf_counter()
            self._due = after + (after - now) / SHARE

    def _stretch(self) -> None:
        self.stretches.append(Stretch(tuple(dict.fromkeys(self._passed)), self.peaks.take()))
        self._passed.clear()

    @property
    def timelines(self) -> list[Timeline]:
        """The profiled iterations as they ran."""
        for ran in self._raw:
            device: list[Activity] = []
            kernels, times = ran.trace.kernels, ran.raw.times
            for number in sorted({k.device for k in kernels})[:1]:
                device = busy_sms(kernels, times[0], times[-1], number)
            self._timelines.append(timeline(self.marks, ran.raw, ran.spans, self.machine, device))
            self._on_device = on_device(self._timelines[-1], kernels, times[0])
            if ran.nvml is not None:
                self._checks.append(compared(device, ran.trace.why, ran.nvml))
        self._raw.clear()
        return self._timelines

    @property
    def on_device(self) -> Timeline | None:
        """The last profiled iteration as the device ran it; ``None`` where no kernel was seen."""
        return self._on_device if self.timelines else None

    @property
    def device_check(self) -> str | None:
        """How the kernels that were seen in the last iteration compare with what NVML says of it;
        ``None`` without a CUDA device."""
        return self._checks[-1] if self.timelines and self._checks else None

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return summarize(self.timelines, self.iteration_s, self.machine)

    @property
    def latest(self) -> Profile:
        """What was measured in the last iteration."""
        return summarize(self.timelines[-1:], self.iteration_s[-1:], self.machine)

    @property
    def typical(self) -> Profile:
        """The iteration whose time is the median, by itself (of two in the middle the shorter one).

        What its operations took adds up to what it took. Means over several iterations do not add
        up to their median: one that was disturbed is in all of the means.
        """
        order = sorted(range(len(self.iteration_s)), key=self.iteration_s.__getitem__)
        k = order[(len(order) - 1) // 2]
        return summarize(self.timelines[k : k + 1], self.iteration_s[k : k + 1], self.machine)


class Profiling:
    """The profiled iterations of one unit.

    Before anything is tuned one iteration is profiled in program order; a schedule in force is
    profiled in its second iteration and the two after that. :meth:`ask` asks for more.
    """

    def __init__(self) -> None:
        self.machine = detect_cpu()
        self.of: dict[Decision, Instrumented] = {}
        self.latest: Decision | None = None
        self.baseline_done = False
        self._runs: dict[Decision, int] = {}
        self._asked = 0
        self._old: set[Decision] = set()  # whose profile is no longer what iterations take

    def ask(self, iterations: int) -> None:
        """Profile the next iterations that run a schedule."""
        self._asked = iterations

    def anew(self) -> None:
        """Iterations have changed: what is settled on next is profiled as if it were new. Program
        order is not, since predictions start from what was measured beside it."""
        self._runs.clear()
        self._old = {one for one in self.of if one != Decision()}

    def wanted(self, decision: Decision, settled: bool) -> bool:
        """Whether the iteration that is about to run this schedule is to be profiled."""
        if self._asked:
            self._asked -= 1
            return True
        if not settled:
            return False
        runs = self._runs[decision] = self._runs.get(decision, 0) + 1
        return WARM_UP < runs <= WARM_UP + PROFILED

    def pending(self, decision: Decision) -> bool:
        """Whether an iteration of a schedule in force is still to be profiled."""
        return bool(self._asked) or self._runs.get(decision, 0) < WARM_UP + PROFILED

    def runner(self, decision: Decision, program: Program) -> Callable[..., Any]:
        """A function that runs one iteration of a schedule and notes what it takes."""
        found = self.of.get(decision)
        if found is None or found.program is not program or decision in self._old:
            self._old.discard(decision)
            # program order is what all schedules are compared with, in memory too
            whole = decision != Decision()
            found = self.of[decision] = Instrumented(program, self.machine, stretches=not whole)
        self.latest = decision
        return found.run

    @property
    def last(self) -> Instrumented:
        """The schedule whose iterations were profiled last.

        Raises:
            ConfigError: when none was.
        """
        found = None if self.latest is None else self.of[self.latest]
        if found is None or not found.iteration_s:
            raise fail("not-profiled", "no iteration was profiled yet")
        return found

    def cost(self) -> CostModel:
        """The cost model of the schedule that was profiled last."""
        last = self.last
        assert last.plan is not None
        return CostModel.of(last.plan, last.program, last.typical, last.machine)

    def remarks(self, *, pipelined: bool) -> list[Remark]:
        """What bounds the trips of loops in the schedule that was profiled last, of pipelined loops
        alone, if asked, and what hoisted parts of graphs are worth; nothing where none was."""
        found = None if self.latest is None else self.of[self.latest]
        if found is None or not found.iteration_s:
            return []
        worth = spared(found.program, found.profile)
        return [*self.cost().remarks(pipelined=pipelined), *worth]

    def windows(self) -> Windows:
        """The windows of the iteration that was profiled last."""
        last = self.last
        profile = last.profile
        return find_windows(profile, fits=Fits(last.program, profile))
