"""One training iteration: recorded once, scheduled, and run again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rose_compiler.api import objects
from rose_compiler.api.awaiting import Awaiting
from rose_compiler.api.checking import Checker
from rose_compiler.api.choosing import Choosing
from rose_compiler.api.options import Options
from rose_compiler.api.orders import OrderCheck
from rose_compiler.api.pipelining import Pipelining
from rose_compiler.api.process_quotas import ProcessQuotas
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.searching import arrange
from rose_compiler.api.stream_quotas import StreamQuotas
from rose_compiler.api.tracing import Trace, Tracer
from rose_compiler.api.tuning import Tuning
from rose_compiler.api.worlds import World
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker, Remark, RemarkLog
from rose_compiler.ir import interp
from rose_compiler.ir.program import Program
from rose_compiler.runtime.memory import Peaks
from rose_compiler.runtime.support import Runtime


class Unit(Choosing):
    """What is recorded, scheduled and run again and again: one training iteration.

    ``program`` is the program as captured, effects and graphs included once it has run: the whole
    function, or one trip of its loop over iterations.
    """

    def __init__(
        self, program: Program, options: Options, log: RemarkLog, tracer: Tracer | None = None
    ) -> None:
        super().__init__(program, options, log)
        self.tracer = tracer or Tracer()
        self.recorded = False
        self.checked = 0  # comparisons of the last iteration in checking mode
        self.orders_checked = 0  # iterations whose lanes were run and compared, in that mode
        self.iterations = 0  # in that mode
        self.last: Schedule | None = None
        self._hosted: bool | None = None  # whether any component lives in a host
        self.awaiting = Awaiting()
        self.processes = ProcessQuotas(log)
        self.streams = StreamQuotas(log, close=options.numerics == "close")
        self.pipelining = Pipelining(log)

    def run(
        self,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        runtime: Runtime,
        eager: Callable[[], Any] | None,
    ) -> Any:
        """Run one iteration: watched and in program order the first time, by a schedule afterwards.

        ``eager`` runs the user's own statements, where that is possible.
        """
        self._boundary()
        # what may change from one trip of the user's loop to the next is no guard's to see
        known = self.recorded and self.watch.settled
        if known and (changed := self.watch.renumbered(states)) is not None:
            known = False
            why = f"captured anew: {changed}"
            self.log.add(Remark("note", "guards", (), "re-captured", why))
        if not known or (eager is None and self.watches(values)):
            return self._watched(values, states)
        result = self._scheduled(values, states, runtime, eager)
        self.catch_up()
        return result

    def between(self, runtime: Runtime) -> None:
        """A batch of iterations of the last schedule begins: what is seen to in front of each by
        itself is seen to in front of all of them."""
        self._boundary()
        self._quotas(self.tuning(eager=False), runtime)

    def _boundary(self) -> None:
        for component in self.hosts():
            component.rose_boundary()

    def _quotas(self, tuning: Tuning, runtime: Runtime) -> None:
        self.processes.between(
            self.program.objects, tuning, self.profiling, self.options.backend, self.last
        )
        self.streams.between(self.last, runtime, tuning, self.profiling, self.processes)

    def hosts(self) -> Sequence[Any]:
        """The components in hosts, as they are bound now."""
        if self._hosted is None:
            self._hosted = bool(objects.hosted(self.program.objects))
        return list(objects.hosted(self.program.objects).values()) if self._hosted else ()

    def catch_up(self) -> None:
        """Start over where a part of the program has run for the first time."""
        if self.watch.behind:
            self.watch.catch_up()
            self._start_over()

    def watches(self, values: Mapping[str, Any]) -> bool:
        """Whether trips of the user's loop from these values on are watched, in program order."""
        return not (self.recorded and self.watch.settled and self.watch.knows(values))

    def _scheduled(
        self,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        runtime: Runtime,
        eager: Callable[[], Any] | None,
    ) -> Any:
        if knobs.current().interp:
            return interp.run(self.program, values, states)
        tuning = self.tuning(eager is not None)
        if self.options.check or knobs.current().verify >= 2:
            return self._checked(tuning, values, states)
        try:
            return self._iteration(tuning, values, states, runtime, eager)
        except BaseException:  # Ctrl-C among them: no counter and no line may stay behind
            tuning.interrupted()
            raise

    def _iteration(
        self,
        tuning: Tuning,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        runtime: Runtime,
        eager: Callable[[], Any] | None,
    ) -> Any:
        """Run one iteration by the schedule whose turn it is, and take note of what it took."""
        if self._wants_baseline(tuning):
            self.profiling.baseline_done = True
            done, result = self._baseline(runtime, values, states, tuning, Decision())
            if done:
                base = self.profiling.of.get(Decision())
                self.pipelining.propose(self, base, tuning)
                arrange(self, base, tuning)
                return result
        close = self.options.numerics == "close"
        if wanted := self.cores.wanted(tuning, self.program.objects, close):
            done, result = self._for_quotas(wanted, runtime, values, states, tuning)
            if done:
                return result
        decision = tuning.next()
        while decision is not None and tuning.trying:
            try:
                built = self.build(decision)
            except Exception as error:
                # whatever keeps a candidate from being built is no reason to stop training
                tuning.failed(decision, error)
            else:
                too_large = self._too_large(decision, built)
                unbound = too_large or self.cores.bind(self.program.objects, decision)
                if unbound is None:
                    break
                tuning.refused(decision, unbound, "memory" if too_large else "quota")
            decision = tuning.next()
        run: Callable[[], Any]
        self.last = None if decision is None else self.build(decision)
        if self.last is not None and (too_large := self._too_large(decision, self.last)):
            tuning.refused(decision, too_large)
            decision = Decision()
            self.last = self.build(decision)
        if decision is None or decision == Decision():
            self.memory.warn(self.program.name)
        if (unbound := self.cores.bind(self.program.objects, decision)) and decision is not None:
            self.cores.tell(decision, unbound)
        if tuning.settled:
            self.cores.renew()
        self._quotas(tuning, runtime)
        target = self.tracer.take()
        trace = None
        if target is not None:
            trace = Trace(self.program.name, "eager" if decision is None else str(decision))
        if self.last is None:
            assert eager is not None
            run = eager
        else:
            run = self._bound(self.last, runtime, values, states, trace, tuning.settled)
        peaks = None if decision in self.memory.measured else Peaks()
        if peaks is not None:
            peaks.begin()
        notes = len(runtime.notes)
        comparing = self.processes.comparing or self.streams.comparing
        timed = comparing or not tuning.settled
        if timed:
            self.awaiting(self.program)  # what came before is no part of it
        started = time.perf_counter()
        try:
            with self.cores.entered():
                result = run()
                if timed:
                    self.awaiting(self.program)
            taken = time.perf_counter() - started
            compiled = tuning.compiled(runtime.notes[notes:])
            if comparing:
                self.processes.record(taken)
                self.streams.record(taken)
                tuning.spend(taken - compiled)
            else:
                tuning.record(decision, taken - compiled)
        except Exception as error:
            tuning.raised(decision, error, None if self.last is None else self.last.emitted)
            raise
        finally:
            if trace is not None and target is not None:
                trace.start, trace.end = started, time.perf_counter()
                trace.write(target)
        if peaks is not None:
            self.memory.measured[decision] = peaks.take()
        return result

    def _too_large(self, decision: Decision | None, built: Schedule) -> Blocker | None:
        """Why a schedule takes more memory than it may; program order is always allowed."""
        if decision is None or decision == Decision():
            return None
        return self.memory.over(decision, self.program, built.program)

    def _checked(self, tuning: Tuning, values: Mapping[str, Any], states: Mapping[str, Any]) -> Any:
        """Run one iteration in checking mode, by the schedule in force or the default one."""
        self.last = self.build(tuning.best if tuning.settled else tuning.default)
        checker = Checker(self.program, self.last.program, states, self.options.numerics)
        self.iterations += 1
        order = OrderCheck(self.last, self._world(values, states), self.iterations)
        result = checker.run(values)
        self.checked = checker.checked
        checker.tell(self.log)
        self.orders_checked += order.compare(result)
        order.tell(self.log)
        return result

    def _world(self, values: Mapping[str, Any], states: Mapping[str, Any]) -> World:
        program = self.program
        return World(
            {n: values[n] for n in program.value_params},
            {n: states[n] for n in program.state_params},
        )

    def _bound(
        self,
        schedule: Schedule,
        runtime: Runtime,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        trace: Trace | None,
        settled: bool,
    ) -> Callable[[], Any]:
        """A schedule with its arguments; profiled or traced, where that is wanted."""
        inputs = self._inputs(values, states)
        runtime.on(schedule.device)
        if trace is None:
            run = self.processes.runner(schedule, self.streams.runner(schedule))
            edited = schedule.emitted.edited
            if not edited and self.profiling.wanted(schedule.decision, settled):
                run = self.profiling.runner(schedule.decision, schedule.program)
            return lambda: run(runtime, *inputs)
        schedule.timed()  # before the clock starts
        return lambda: schedule.traced(runtime, inputs, trace)

    def _wants_baseline(self, tuning: Tuning) -> bool:
        """Whether this iteration is the one profiled in program order, before any is compared."""
        if self.profiling.baseline_done or self.tracer.armed:
            return False
        return (tuning.tuned and not tuning.settled) or self.memory.limit is not None

    def _baseline(
        self,
        runtime: Runtime,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        tuning: Tuning,
        decision: Decision,
    ) -> tuple[bool, Any]:
        """Run one iteration of a schedule that is not compared, and profile it: whether that could
        be, its result."""
        try:
            schedule = self.build(decision)
            self.profiling.ask(1)
            run = self._bound(schedule, runtime, values, states, None, False)
        except Exception:
            # the candidates will say what is wrong
            self.profiling.ask(0)
            return False, None
        self.last = schedule
        started = time.perf_counter()
        result = run()
        tuning.skip(time.perf_counter() - started)
        measured = self.profiling.of.get(Decision())
        if decision == Decision() and measured is not None and measured.stretches:
            self.memory.base(measured.stretches)
        return True, result

    def _for_quotas(
        self,
        decision: Decision,
        runtime: Runtime,
        values: Mapping[str, Any],
        states: Mapping[str, Any],
        tuning: Tuning,
    ) -> tuple[bool, Any]:
        """Run one iteration that core quotas are planned from: whether it could, its result."""
        try:
            schedule = self.build(decision)
        except Exception:  # the candidates will say what is wrong
            self.cores.give_up()
            return False, None
        inputs = self._inputs(values, states)
        runtime.on(schedule.device)
        self.last = schedule
        started = time.perf_counter()
        try:
            result = self.cores.profiled(
                schedule, lambda made: made.run(runtime, *inputs), self.program.objects
            )
        except BaseException:
            self.cores.give_up()
            raise
        (tuning.spend if tuning.settled else tuning.skip)(time.perf_counter() - started)
        self.cores.propose(tuning)
        return True, result

    def _inputs(self, values: Mapping[str, Any], states: Mapping[str, Any]) -> tuple[Any, ...]:
        program = self.program
        return (
            *(values[n] for n in program.value_params),
            *(states[n] for n in program.state_params),
        )

    def _watched(self, values: Mapping[str, Any], states: Mapping[str, Any]) -> Any:
        """Run one iteration in program order, and learn from it."""
        peaks = Peaks()
        peaks.begin()
        anew, result = self.watch.run(values, states)
        if anew:
            self._start_over()
            self.memory.first(peaks.take(), [n.name for n in self.program.root.graph.nodes])
        return result

    def _start_over(self) -> None:
        """More is known of the program: schedules are built and compared anew."""
        self.program, self.text = self.watch.program, self.watch.text
        self.recorded = True
        self.forget()
        self.last = self._tuning = self._hosted = None
        self.profiling.baseline_done = False  # of another program
        self.streams.forget()
