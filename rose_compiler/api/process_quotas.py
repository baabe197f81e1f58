"""Quotas that a process gets when it starts, for components in hosts: changed between iterations.

Once a schedule is settled on and profiled, its plan of SMs is tried, where the machine has MPS:
components that have no state, or can hand it over, go on in new processes, all moved together.
First an iteration is profiled under a few plans, so that each lane is seen with three quotas or
more, where there are as many; the responses of the operations are fitted to these points. What is
in force and the plan that follows take turns in blocks of iterations
(:mod:`rose_compiler.tune.blocks`); the plan stays if it is faster beyond doubt, else all go back.
An iteration of each that was tried is one more point, so that the next plan may be better. After a
drift the schedule is profiled anew, and all of this is done once more, against the plan in force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from rose_compiler.api.cache import Entry
from rose_compiler.api.objects import in_processes
from rose_compiler.api.profiling import Instrumented, Profiling
from rose_compiler.api.quota_trial import Measured, Plan, Trial, misfit, parts_of, units
from rose_compiler.api.quotas import plan_quotas
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.started_quotas import StartedQuotas
from rose_compiler.api.tuning import Tuning
from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import detect_cpu
from rose_compiler.base.profile import Timeline
from rose_compiler.base.quota import BY_PROCESS, COORDINATOR, QuotaPlan
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.runtime.hosts.moving import starts_with
from rose_compiler.runtime.quotas import Applied, Device, QuotaBackend, all_backends, devices
from rose_compiler.runtime.quotas.moves import move
from rose_compiler.runtime.quotas.planned import SMS as BY
from rose_compiler.tune.blocks import COLD, MARGIN, Budget, least_s, spent
from rose_compiler.tune.levels import too_few

PASS = "quota"


class ProcessQuotas:
    """The process quotas of one unit. ``available`` says whether there is a device to share,
    ``found`` which there are."""

    def __init__(
        self,
        log: RemarkLog,
        available: Callable[[], bool] = torch.cuda.is_available,
        backends: Callable[[], Sequence[QuotaBackend]] = all_backends,
        found: Callable[[], Sequence[Device]] = devices,
    ) -> None:
        self._log = log
        self._available = available
        self._backends = backends
        self._found = found
        #: The plan in force, if any.
        self.plan: QuotaPlan | None = None
        #: Seconds of a profiled iteration of the schedule, 0 before there is one.
        self.iteration_s = 0.0
        #: The plan that not all could be moved to: for the next start.
        self.pending: QuotaPlan | None = None
        self._started = StartedQuotas(log)
        self._applied: Applied | None = None
        self._holds: QuotaPlan | None = None  # what was applied last
        self._moved: dict[str, Any] = {}  # components that went to other processes, by lane
        self._given: dict[str, dict[str, str]] = {}  # the variables that these have there
        self._trial: Trial | None = None
        self._measured = Measured()
        self._made: Instrumented | None = None
        self._done = False
        self._drifts = 0  # those that quotas were planned anew after
        self._looked = False  # for what an earlier run has kept
        self._known: QuotaPlan | None = None  # that was in force earlier, and is to be again
        self._news = False  # a comparison has ended since
        self._told = False  # that this process takes turns with others

    @property
    def comparing(self) -> bool:
        """Whether plans take turns, so that lengths of iterations say nothing of the schedule."""
        return self._trial is not None

    def between(
        self,
        objects: dict[str, Any],
        tuning: Tuning,
        profiling: Profiling,
        backend: str,
        schedule: Schedule | None,
    ) -> None:
        """:meth:`boundary` for the schedules of one unit, of which ``schedule`` runs; ``backend``
        is ``compile``'s."""
        if self._started.between(objects, tuning, profiling, backend):
            self.plan, self.pending = self._started.plan, self._started.pending
            return
        if tuning.settled:
            self._earlier(objects, tuning.entry, schedule)
        if tuning.drifts != self._drifts:
            self._drifts = tuning.drifts
            profiling.anew()
            self.again()
        before = self.plan
        profiled = tuning.settled and not profiling.pending(tuning.best)
        if profiled and not self._measured and not self._done and profiling.latest is not None:
            self.seen(profiling.last.profile.timeline)
        if profiled and profiling.latest is not None:
            self.iteration_s = min(profiling.last.iteration_s)
        self.boundary(
            objects,
            lambda alone, than: plan_quotas(profiling.last.profile, backend, alone, than=than),
            profiled,
            tuning,
        )
        if self.plan is not before and not self.comparing:
            tuning.steady()
        if self._news and tuning.entry is not None:
            tuning.entry.keep("processes", self.plan)
            tuning.entry.keep("pending", self.pending if self.plan is None else None)
        self._news = False

    def _earlier(
        self, objects: dict[str, Any], entry: Entry | None, schedule: Schedule | None
    ) -> None:
        """Put the plan into force that an earlier run has found, or this one before `close()`."""
        if schedule is None or (self._looked and self._known is None):
            return
        kept: dict[str, QuotaPlan | None] = {"processes": self._known}
        if entry is not None and not self._looked:
            kept = {**entry.sms}
        self._looked, self._known = True, None
        if not any(kept.values()) or not self._available():
            return
        try:
            gpu = self._found()[0]
        except (QuotaError, IndexError) as error:
            self._missed(f"the GPU can't be described: {error}", None)
            return
        lanes = {COORDINATOR, *(schedule.emitted.plan.lanes if schedule.emitted.plan else ())}
        for kind in ("processes", "pending"):
            one = kept.get(kind)
            if one is not None and (why := misfit(one, gpu.machine(), lanes, objects)):
                kept[kind] = None
                if entry is not None:
                    entry.forget(kind, why)
        plan, self.pending = kept.get("processes"), kept.get("pending")
        if plan is None or self._backend(plan) is None:
            return
        parts, self._done = parts_of(objects, plan), True
        trial = self._trial = Trial(self.plan, plan.on(gpu.uuid), parts)
        trial.blocks.won = True
        if not self._change(trial):  # nor will it be taken the next time
            self._done = False
            if entry is not None:
                entry.forget("processes", "was refused")
        if self._trial is not None:
            self._trial = None
            what = f"{', '.join(parts)} in processes with quotas of SMs"
            self._note([Remark("applied", PASS, (), "moved", f"{what}, which won earlier")])

    def boundary(
        self,
        objects: dict[str, Any],
        plan: Plan,
        profiled: bool,
        budget: Budget,
    ) -> None:
        """An iteration begins. ``profiled``: its schedule is settled on, and was profiled. Moving
        components takes of the ``budget``; iterations are for the caller to count."""
        self._check()
        if self._trial is None:
            if self._done or not profiled:
                return
            self._done = True
            self._trial = self._begun(objects, plan, budget)
        elif not profiled or not budget.allows(0.0):
            # a search has begun, or the time for it is over: what is known must do
            self._trial.stop(late=profiled)
        trial = self._trial
        if trial is not None and not trial.ready and not trial.survey:
            self._planned(trial, plan)
        for _ in range(2):  # the first change may be the last one
            if trial is not None and trial.wanted is not self.plan:
                began = perf_counter()
                self._change(trial)
                budget.spend(perf_counter() - began, None)
                trial = self._trial
                if trial is not None and not budget.allows(0.0):
                    trial.stop(late=True)
        if trial is not None and trial.blocks.decided:
            self._tell(trial)
            self._trial = self._next(trial, objects, plan, budget) if profiled else None

    @property
    def watching(self) -> bool:
        """Whether the iteration that begins is to be profiled: the last one that is not compared
        behind the first change to a plan."""
        trial = self._trial
        if trial is None or self.plan is None or trial.blocks.decided:
            return False
        return trial.last_cold and not self._measured.knows(self.plan)

    def seen(self, timeline: Timeline | None) -> None:
        """An iteration was profiled under what is in force."""
        if timeline is not None:
            self._measured.add(self.plan, self._moved, timeline)

    def runner(self, schedule: Schedule, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs the iteration that begins: ``run``, or a profiled one."""
        if not self.watching or schedule.emitted.edited:
            return run
        made = self._made
        if made is None or made.program is not schedule.program:
            made = self._made = Instrumented(schedule.program, detect_cpu())

        def measured(runtime: Any, *inputs: Any) -> Any:
            result = made.run(runtime, *inputs)
            self.seen(made.timelines[-1])
            return result

        return measured

    def _planned(self, trial: Trial, plan: Plan) -> None:
        """The iterations that a comparison begins with are profiled: what follows from them is the
        plan that is compared."""
        measured, trial.ready = self._measured, True
        chunks = trial.new.machine.chunks
        few = too_few(measured.quotas, chunks)
        if few:
            self._note([Remark("note", PASS, (), "few-points", few)])
        made = plan(measured.alone(chunks), trial.old)
        trial.new = replace(made, notes=(*made.notes, *self._grounds(few)))
        if self.pending is not None:
            self.pending = trial.new
        if trial.old is not None and units(made) == units(trial.old):
            trial.blocks.won = False
            trial.same = True

    def _grounds(self, few: str) -> list[str]:
        """What a plan rests on."""
        note = f"responses from iterations profiled under {len(self._measured.quotas)} plans"
        return [note, few] if few else [note]

    def _next(
        self, over: Trial, objects: dict[str, Any], plan: Plan, budget: Budget
    ) -> Trial | None:
        """The comparison that follows: of the plan that all points speak for, if it is a new one
        and better than the one that was just tried, as these have it."""
        measured, chunks = self._measured, over.new.machine.chunks
        if measured.full or not measured.knows(over.new):
            return None
        made = plan(measured.alone(chunks), over.new)
        if measured.knows(made):
            return None
        if made.predicted_s is None or made.before_s is None:
            return None
        if made.predicted_s > (1 - MARGIN) * made.before_s:
            return None
        notes = (*made.notes, *self._grounds(too_few(measured.quotas, chunks)))
        return self._begun(objects, lambda *_: replace(made, notes=notes), budget, survey=False)

    def record(self, seconds: float) -> None:
        """An iteration of the schedule that is settled on took so long."""
        if self._trial is not None:
            self._trial.record(seconds)

    def again(self) -> None:
        """Iterations have changed their length for good: once the schedule is settled on and
        profiled anew, the plan that follows from that meets the one in force."""
        self._done = False
        self._measured = Measured()

    def release(self) -> None:
        """Take the quotas back: whoever was moved goes on in a process without them, before the
        daemon that they rest on ends. Iterations that follow have them again."""
        in_force = self.plan if self._trial is None else self._trial.old
        self._known = in_force or self._known
        self.plan = self._trial = None
        self._leave()
        self._moved = {}

    def _leave(self) -> None:
        """Nobody rests on what was applied any more, and it ends."""
        held = {lane: self._moved[lane] for lane, given in self._given.items() if given}
        self._given = {}
        if held:
            self._note(move(held, {lane: {} for lane in held}, BY))
        for component in held.values():  # those that could not be moved too
            starts_with(component, {}, BY)
        applied, self._applied, self._holds = self._applied, None, None
        if applied is not None:
            with suppress(QuotaError, OSError):
                applied.close()

    def _check(self) -> None:
        """Whether what quotas rest on is still there; training goes on without."""
        if self._applied is None:
            return
        try:
            self._applied.check()
        except QuotaError as error:
            applied, self._applied, self._holds = self._applied, None, None
            with suppress(QuotaError, OSError):
                applied.close()
            self.plan, self._trial, self._done = None, None, True
            for lane in self._given:  # a process that takes over has no quota
                starts_with(self._moved[lane], {}, BY)
            self._missed(f"quotas have gone: {error.what}", error.help)

    def _begun(
        self, objects: dict[str, Any], plan: Plan, budget: Budget, survey: bool = True
    ) -> Trial | None:
        """What is in force against the plan of the latest profile, if that is another one, or
        against what points that are measured first speak for."""
        if not in_processes(objects) or not self._available():
            return None
        made = plan(None, None)
        parts = parts_of(objects, made)
        if made.backend not in BY_PROCESS or not parts or self._backend(made) is None:
            return None
        todo = self._measured.survey(made) if survey and self._measured else deque()
        if not todo and self.plan is not None and units(made) == units(self.plan):
            self._same()
            return None
        if not budget.allows(least_s(self.iteration_s) + len(todo) * COLD * self.iteration_s):
            what = f"quotas of SMs for {', '.join(parts)} are not compared"
            self._note([Remark.from_blocker(PASS, spent(what))])
            return None
        return Trial(self.plan, made, parts, survey=todo, ready=not todo)

    def _same(self) -> None:
        why = "quotas of SMs planned anew are those in force"
        self._note([Remark("note", PASS, (), "replanned", why)])

    def _backend(self, plan: QuotaPlan) -> QuotaBackend | None:
        return next((b for b in self._backends() if b.name == plan.backend), None)

    def _change(self, trial: Trial) -> bool:
        """Put the plan into force whose turn it is: who needs another process for that is moved,
        all together. False where the machine refuses it: then none is in force."""
        plan = trial.wanted
        try:
            environments = self._environments(trial, plan)
        except QuotaError as error:
            self.release()
            self._missed(f"the plan was refused: {error.what}", error.help)
            return False
        anew = {n: e for n, e in environments.items() if e != self._given.get(n, {})}
        pids = {lane: trial.parts[lane].pid for lane in anew}
        started = _nothing if plan is None or self._applied is None else self._applied.started
        missed = move({lane: trial.parts[lane] for lane in anew}, anew, BY, started)
        self._note(missed)
        for lane, environment in anew.items():
            if trial.parts[lane].pid != pids[lane]:
                self._moved[lane], self._given[lane] = trial.parts[lane], environment
            else:  # it stays as it is under either plan
                del trial.parts[lane]
        self.plan = plan
        if missed:
            self.pending = trial.new
        if not trial.parts:
            self.plan = trial.old
            self._trial = None
            self._news = True
            if trial.old is None:
                self.release()
        elif missed and trial.changed:
            trial.stop()
        trial.changed = True
        return True

    def _environments(self, trial: Trial, plan: QuotaPlan | None) -> dict[str, dict[str, str]]:
        """The variables that each component's process is to have. Raises ``QuotaError`` where the
        machine refuses the plan."""
        if plan is None:
            return {lane: {} for lane in trial.parts}
        if self._applied is not None and self._holds is not plan:
            try:
                self._applied.replan(plan)
            except QuotaError:  # not while processes rest on it
                self._leave()
        if self._applied is None:
            backend = self._backend(plan)
            assert backend is not None
            self._applied = backend.apply(plan)
            daemon = getattr(self._applied, "daemon", None)
            if daemon is not None and not self._told:
                self._told = self._tell_of_turns(daemon.owned)
        self._holds = plan
        return {lane: self._applied.environment(lane) for lane in trial.parts}

    def _tell_of_turns(self, owned: bool) -> bool:
        """Whether it was said that this process is no client of the daemon that was started."""
        if not owned or not torch.cuda.is_initialized():
            return False
        why = (
            "this process used the GPU before there was an MPS daemon: it has no quota, and takes "
            "turns with components in processes; `nvidia-cuda-mps-control -d` before the training "
            "lets all share it"
        )
        self._note([Remark("note", PASS, (), "turns", why)])
        return True

    def _tell(self, trial: Trial) -> None:
        """The comparison is over, and the winner in force."""
        self._trial, self._news = None, True
        if trial.same:
            self._same()
            return
        blocks, names = trial.blocks, ", ".join(trial.parts)
        pairs = len(blocks.speedups)
        text = f"{blocks.interval} times the speed in {pairs} pairs of blocks" if pairs else ""
        if blocks.won:
            after = blocks.seconds(True)
            what = f"{names} in processes with quotas of SMs"
            why = f"{what}: {text}, {1e3 * after:.3g} ms an iteration"
            gain = blocks.seconds(False) - after
            self._note([Remark("applied", PASS, (), "moved", why, gain=gain)])
            return
        self.pending = None
        why = f"quotas of SMs for {names}: {text or 'not compared to the end'}, and taken back"
        lost = spent(why) if blocks.late else Blocker("measured-slower", why)
        self._note([Remark.from_blocker(PASS, lost)])
        if trial.old is None:
            self.release()

    def _missed(self, why: str, help: str | None) -> None:
        self._note([Remark.from_blocker(PASS, Blocker("not-available", why, help))])

    def _note(self, remarks: Sequence[Remark]) -> None:
        self._log.extend(remarks)


def _nothing(lane: str, pid: int) -> None:
    """A process that has no quota started."""
