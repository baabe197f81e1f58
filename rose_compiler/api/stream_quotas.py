"""Quotas of SMs for the stream lanes of a schedule, in this process: green contexts.

Once a schedule with lanes ``stream:<name>`` is settled on and profiled on a CUDA device, every lane
gets SMs of its own in a few plans, one after the other, and the kernels of an iteration under each
tell what every operation takes with how many. The plan that follows from these responses and from
the slack at the joins meets the schedule without quotas in blocks of iterations
(:mod:`rose_compiler.tune.blocks`), and stays if it is faster beyond doubt. After a drift this is
done once more, against the plan in force. Nothing is started anew: between two iterations a lane is
lent another stream.

The coordinator's own stream stays the caller's, and has what lanes leave: components may launch on
a stream that they found when they were built, which no stream of ours would be ordered with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch

from rose_compiler.api.cache import Entry
from rose_compiler.api.process_quotas import PASS, ProcessQuotas
from rose_compiler.api.profiling import Instrumented, Profiling
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import Machine, detect_cpu
from rose_compiler.base.profile import Timeline
from rose_compiler.base.quota import COORDINATOR, QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.runtime.device_times import STREAM
from rose_compiler.runtime.quotas import GreenContexts, Probe
from rose_compiler.runtime.support import Runtime
from rose_compiler.tune.blocks import Blocks, Budget, least_s, spent
from rose_compiler.tune.branches import branches, divide, responses
from rose_compiler.tune.levels import MOST, to_measure, too_few
from rose_compiler.tune.slack import profile_quotas

#: Iterations under each: the last one counts, before it torch's allocator gets memory for streams
#: that it has not seen yet.
RUNS = 2


class Lever(Protocol):
    """What is asked of :class:`~rose_compiler.runtime.quotas.GreenContexts`."""

    def probe(self) -> Probe:
        """Whether the machine has it."""

    def groups(self, chunk: int) -> int:
        """How many groups of so many SMs there are to give."""

    def lasting(self, plan: QuotaPlan) -> Any:
        """What has a ``stream(lane)`` for each lane of the plan, to the end of the process."""


@cache
def lever(device: int) -> Lever:
    """The green contexts of one device, shared by all compiled functions."""
    return GreenContexts(device=device)


def gpu(device: torch.device) -> Machine | None:
    """A CUDA device as data; ``None`` for any other device. Chunks are those of its compute
    capability: 8 SMs from 9.0 on, 4 before."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    known = torch.cuda.get_device_properties(device)
    chunk = 8 if (known.major, known.minor) >= (9, 0) else 4
    return Machine(known.name, detect_cpu().cores, known.multi_processor_count, chunk)


@dataclass
class _Points:
    """Iterations under several plans: those that are left, and what was found."""

    made: Instrumented
    base: Timeline  # the profiled iteration without any of them
    machine: Machine
    todo: deque[tuple[QuotaPlan, bool]]  # whether what is seen counts
    found: list[tuple[dict[str, int], Timeline]] = field(default_factory=list)

    def plan(self) -> QuotaPlan:
        """The best plan under the responses that were found, with what it should take."""
        machine = self.machine
        graph = branches(self.base, machine.chunks, responses(self.found))
        made = divide(graph, machine.chunks)
        note = f"from {len(self.found)} profiled plans; the coordinator has what lanes leave"
        return QuotaPlan.divide(
            "green-context",
            machine,
            made.chunks,
            why=made.why,
            predicted_s=made.predicted_s + _idle(self.base),
            notes=(note,),
        )


@dataclass
class _Trial:
    """A plan, or none, that meets what is in force."""

    old: QuotaPlan | None
    new: QuotaPlan | None
    blocks: Blocks = field(default_factory=Blocks)


class StreamQuotas:
    """The quotas of one unit's stream lanes. ``close`` says whether results may differ in rounding.

    ``machine`` describes a device, ``levers`` what divides it, ``on_device`` tells what of a
    profiled iteration ran on it when.
    """

    def __init__(
        self,
        log: RemarkLog,
        close: bool = True,
        machine: Callable[[torch.device], Machine | None] = gpu,
        levers: Callable[[int], Lever] = lever,
        on_device: Callable[[Instrumented], Timeline | None] = lambda made: made.on_device,
    ) -> None:
        self._log = log
        self._close = close
        self._machine = machine
        self._levers = levers
        self._on_device = on_device
        #: The plan in force, if any.
        self.plan: QuotaPlan | None = None
        self._decision: Decision | None = None  # the schedule that this is about
        self._lever: Lever | None = None
        self._points: _Points | None = None
        self._trial: _Trial | None = None
        self._done = False
        self._drifts = 0  # those that quotas were planned anew after
        self._looked = False  # for what an earlier run has kept
        self._news = False  # a comparison has ended since
        self._lent: tuple[QuotaPlan | None, dict[str, Any]] = (None, {})

    @property
    def comparing(self) -> bool:
        """Whether plans take turns, so that lengths of iterations say nothing of the schedule."""
        return self._points is not None or self._trial is not None

    def between(
        self,
        schedule: Schedule | None,
        runtime: Runtime,
        tuning: Tuning,
        profiling: Profiling,
        processes: ProcessQuotas,
    ) -> None:
        """An iteration of ``schedule`` begins; ``None`` for the user's own statements. Other
        quotas are tried once those of ``processes`` are settled."""
        if tuning.drifts != self._drifts:
            self._drifts, self._done = tuning.drifts, False
            profiling.anew()
        if schedule is None or not tuning.settled or schedule.decision != tuning.best:
            self._interrupted()
            runtime.lend({})  # schedules are compared without
            return
        if schedule.decision != self._decision:
            self.forget()
            self._decision = schedule.decision
        if not self._looked:
            self._looked = True
            self._earlier(schedule, tuning.entry, processes)
        if self.comparing and not tuning.allows(0.0):
            if self._points is not None:
                self._missed(spent("quotas of SMs for streams are not compared"))
            self._interrupted(late=True)
            self._done = True
        before = self.plan
        if not self._done and not processes.comparing and not profiling.pending(tuning.best):
            self._done = True
            if not runtime.serial and not schedule.emitted.edited:
                self._points = self._begun(schedule, profiling, processes, tuning)
        if self._points is not None and not self._points.todo:
            self._trial, self._points = self._planned(self._points), None
        if self._trial is not None and self._trial.blocks.decided:
            self._tell(self._trial)
        self.lend(runtime)
        if self.plan is not before and not self.comparing:
            tuning.steady()
        if self._news and tuning.entry is not None:
            tuning.entry.keep("streams", self.plan)
        self._news = False

    def _earlier(self, schedule: Schedule, entry: Entry | None, processes: ProcessQuotas) -> None:
        """Put the plan into force that an earlier run has found."""
        plan = None if entry is None else entry.sms.get("streams")
        device = torch.device(schedule.device)
        machine = self._machine(device)
        if entry is None or plan is None or machine is None:
            return
        self._lever = self._levers(device.index or 0)
        blocker = self._unfit(schedule.decision, processes)
        try:
            groups = 0 if blocker else self._lever.groups(machine.chunk)
        except QuotaError as error:
            blocker = Blocker("not-available", error.what, error.help)
        if blocker is not None:
            self._missed(blocker)
            return
        lanes = {COORDINATOR, *(schedule.emitted.plan.lanes if schedule.emitted.plan else ())}
        if plan.machine != replace(machine, sms=groups * machine.chunk):
            given = f"{plan.machine.sms} SMs to give"
            entry.forget("streams", f"is one for {plan.machine.name} with {given}")
        elif not {share.lane for share in plan.shares} <= lanes:
            entry.forget("streams", "is not one for the lanes of its schedule")
        else:
            self.plan, self._done = plan, True
            what = ", ".join(f"{lane} {units}" for lane, units in _units(plan))
            why = f"SMs by green contexts ({what} of {plan.capacity}), which won earlier"
            self._log.add(Remark("applied", PASS, (), "sm-quotas", why))

    def runner(self, schedule: Schedule) -> Callable[..., Any]:
        """What runs the iteration that begins."""
        return schedule.run if self._points is None else self._measured

    def record(self, seconds: float) -> None:
        """An iteration of the schedule took so long."""
        if self._trial is not None:
            self._trial.blocks.record(seconds)

    def lend(self, runtime: Runtime) -> None:
        """Let the lanes run on streams of the plan whose turn it is, on their own without one."""
        plan = self._turn()
        if plan is not self._lent[0]:
            try:
                self._lent = plan, {} if plan is None else self._streams(plan)
            except (QuotaError, RuntimeError) as error:  # torch's own for a stream that it refuses
                self.plan = self._points = self._trial = None
                self._lent = None, {}
                self._news = True  # a later run need not be refused the same
                what = error.what if isinstance(error, QuotaError) else str(error)
                allow = error.help if isinstance(error, QuotaError) else None
                self._missed(Blocker("not-available", f"the plan was refused: {what}", allow))
        runtime.lend(self._lent[1])

    def release(self) -> None:
        """Nothing is compared any more. Lanes that are made later run under the plan in force."""
        if self.comparing:
            self._points, self._trial, self._done = None, None, False
        self._lent = None, {}

    def forget(self) -> None:
        """The program, or its schedule, is another one."""
        self.release()
        self.plan, self._decision, self._done = None, None, False

    def _turn(self) -> QuotaPlan | None:
        if self._points is not None:
            return self._points.todo[0][0]
        if self._trial is not None:
            return self._trial.new if self._trial.blocks.new else self._trial.old
        return self.plan

    def _streams(self, plan: QuotaPlan) -> dict[str, Any]:
        """A stream for each lane that has one. Raises ``QuotaError`` where the device refuses."""
        assert self._lever is not None
        shares = tuple(share for share in plan.shares if share.lane.startswith(STREAM))
        applied = self._lever.lasting(replace(plan, shares=shares))
        return {share.lane: applied.stream(share.lane) for share in shares}

    def _measured(self, runtime: Runtime, *inputs: Any) -> Any:
        """Run one iteration under the plan whose turn it is, and keep what its operations took."""
        points = self._points
        assert points is not None
        result = points.made.run(runtime, *inputs)
        plan, counts = points.todo[0]
        seen = self._on_device(points.made) if counts else None
        if seen is not None:
            points.found.append(({s.lane: s.units // plan.chunk for s in plan.shares}, seen))
        elif counts:
            self._points = None
            self._missed(Blocker("not-measured", "no kernels were seen under a plan of SMs"))
        points.todo.popleft()
        return result

    def _interrupted(self, late: bool = False) -> None:
        """A search has begun, or the time for it is over, ``late``: what is known must do."""
        if self._points is not None:
            self._points, self._done = None, False
        if self._trial is not None:
            self._trial.blocks.stop(late)
            self._tell(self._trial)

    def _begun(
        self, schedule: Schedule, profiling: Profiling, processes: ProcessQuotas, budget: Budget
    ) -> _Points | None:
        """Plans to measure responses under; ``None``, with a remark where there is a device and
        anything to divide, if that can't be."""
        device = torch.device(schedule.device)
        machine, made = self._machine(device), profiling.of.get(schedule.decision)
        if machine is None or made is None or not made.timelines:
            return None
        if not any(lane.startswith(STREAM) for lane in made.timelines[-1].lanes()):
            return None
        self._lever = self._levers(device.index or 0)
        blocker = self._unfit(schedule.decision, processes)
        base = self._on_device(made)
        if blocker is None and not budget.allows(least_s(min(made.iteration_s))):
            blocker = spent("quotas of SMs for streams are not compared")
        if blocker is None and base is None:
            blocker = Blocker("not-measured", "no kernels were seen in a profiled iteration")
        if blocker is not None:
            self._missed(blocker)
            return None
        assert base is not None
        lanes = [lane or COORDINATOR for lane in base.lanes()]
        try:
            groups = self._lever.groups(machine.chunk)
        except QuotaError as error:
            self._missed(Blocker("not-available", error.what, error.help))
            return None
        if len(lanes) < 2 or groups < len(lanes):
            of = f"{groups} groups of {machine.chunk} SMs"
            why = f"{', '.join(lanes)} can't share {of}, one each at least"
            self._missed(Blocker("over-committed" if groups < len(lanes) else "too-small", why))
            return None
        machine = replace(machine, sms=groups * machine.chunk)
        different: list[dict[str, int]] = []
        for chunks in profile_quotas(lanes, groups, MOST):  # with two lanes some are the same
            if chunks not in different:
                different.append(chunks)
        if too_few(different, groups):
            different = to_measure(lanes, groups)
        plans = [QuotaPlan.divide("green-context", machine, chunks) for chunks in different]
        todo = deque((plan, run == RUNS - 1) for plan in plans for run in range(RUNS))
        anew = Instrumented(schedule.program, profiling.machine)
        return _Points(anew, base, machine, todo)

    def _unfit(self, decision: Decision, processes: ProcessQuotas) -> Blocker | None:
        """Why streams of this schedule get no SMs of their own, or None."""
        assert self._lever is not None
        if not self._close:
            why = "libraries may choose their algorithms by the number of SMs, so sums may differ"
            return Blocker("switched-off", why, 'numerics="close"')
        if decision.cuda_graphs:
            why = "kernels of a CUDA graph keep the SMs of the stream that it was captured on"
            return Blocker("unsupported-shape", why)
        if processes.plan is not None:
            return Blocker("over-committed", "components in processes have quotas of SMs already")
        probe = self._lever.probe()
        if not probe.available:
            return Blocker("not-available", f"green contexts are passed over: {probe.why}")
        return None

    def _planned(self, points: _Points) -> _Trial:
        """What is in force against the plan that follows from the points; where that is the same,
        against no quotas, since a drift may have made that the better choice."""
        made = points.plan()
        if few := too_few([chunks for chunks, _ in points.found], points.machine.chunks):
            self._log.add(Remark("note", PASS, (), "few-points", few))
        if self.plan is None or _units(made) != _units(self.plan):
            return _Trial(self.plan, made)
        why = "quotas of SMs planned anew are those in force: they meet the schedule without any"
        self._log.add(Remark("note", PASS, (), "replanned", why))
        return _Trial(self.plan, None)

    def _tell(self, trial: _Trial) -> None:
        """The comparison is over: the winner is in force from here on."""
        self._trial, self._news = None, True
        blocks, new = trial.blocks, trial.new
        what = "streams without quotas of SMs"
        if new is not None:
            given = ", ".join(f"{lane} {units}" for lane, units in _units(new))
            what = f"SMs by green contexts ({given} of {new.capacity})"
        if pairs := len(blocks.speedups):
            before, after = blocks.seconds(False), blocks.seconds(True)
            text = f"{what}: {blocks.interval} times the speed in {pairs} pairs of blocks, "
            text += f"{1e3 * after:.3g} ms an iteration"
            if new is not None and new.predicted_s is not None:
                text += f" ({1e3 * new.predicted_s:.3g} ms predicted)"
            if blocks.won:
                self.plan = None if new is None else replace(new, before_s=before)
                gain = before - after
                self._log.add(Remark("applied", PASS, (), "sm-quotas", text, gain=gain))
                return
        else:
            text = f"{what}: not compared to the end"
        text += ", and taken back"
        self._missed(spent(text) if blocks.late else Blocker("measured-slower", text))

    def _missed(self, blocker: Blocker) -> None:
        self._log.add(Remark.from_blocker(PASS, blocker))


def _units(plan: QuotaPlan) -> list[tuple[str, int]]:
    return [(share.lane, share.units) for share in plan.shares]


def _idle(base: Timeline) -> float:
    """Seconds from the iteration's start to the last kernel's end in which no operation ran."""
    ended = busy = 0.0
    for span in sorted(base.spans, key=lambda s: s.start_s):
        busy += max(0.0, span.end_s - max(span.start_s, ended))
        ended = max(ended, span.end_s)
    return max(0.0, ended - busy)
