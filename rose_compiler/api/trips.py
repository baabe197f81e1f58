"""Runs a whole training loop in one call: watched, scheduled and tuned trip by trip, or several
trips at a time where they can overlap.

Once a schedule is settled on, trips run in batches: what is asked in front of each trip (settings,
profiling, tracing, tuning) is asked in front of a batch, so that a loop whose trips take a fraction
of a millisecond pays a few microseconds for each. Types of what a trip is handed are looked at all
the same, since what the passes know hangs on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch.fx as fx

from rose_compiler.api.spans import Spans
from rose_compiler.api.unit import Unit
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts, interp
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.program import LoopView, is_state, placeholders
from rose_compiler.runtime.support import Runtime

#: Seconds after which a batch of trips ends.
BATCH_S = 0.1


class Trips(interp.Interpreter):
    """The unit for each trip, what stands around it in program order."""

    def __init__(
        self,
        unit: Callable[[fx.Node], Unit | None],
        spans: Mapping[fx.Node, Spans],
        states: Mapping[str, Any],
        runtime: Runtime,
    ) -> None:
        super().__init__(interp.Hooks())
        self.unit = unit
        self.spans = spans
        self.states = states
        self.runtime = runtime

    def _loop(self, node: fx.Node, env: interp.Environment) -> tuple[Any, ...]:
        unit = self.unit(node)
        if unit is None:
            return super()._loop(node, env)
        self.held.at(facts.get(node).context)
        view = LoopView(node)
        bounds = self._bound(node, self._read(env, view.bounds))
        carried = tuple(self._read(env, view.carried_init))
        captured = tuple(self._read(env, view.captured))
        loop = _Loop(view, unit, self.states, self.runtime)
        spans = self.spans.get(node)
        if spans is not None:
            spans.expect(_length(bounds))
        unit.expect(_length(bounds))
        if spans is not None:
            return loop.run_together(spans, range(*bounds), carried, captured)
        return loop.run(_items(view, bounds), carried, captured)


class _Loop:
    """One loop over iterations while it runs."""

    def __init__(
        self, view: LoopView, unit: Unit, states: Mapping[str, Any], runtime: Runtime
    ) -> None:
        self.unit, self.states, self.runtime = unit, states, runtime
        #: Where the values of a trip stand among index, carried and captured ones.
        self.where = [k for k, p in enumerate(placeholders(view.graph)) if not is_state(p)]
        self.pick = _picker(self.where)
        #: Index and carried values; those behind them are the same for all trips.
        self.varies = 1 + len(tuple(view.carried_init))
        self.whole = self.where[: self.varies] == list(range(self.varies))
        self.batch: Batch | None = None

    def run(
        self, items: Iterator[Any], carried: tuple[Any, ...], captured: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """All trips; the final carried values."""
        taken: tuple[Any, ...] = ()  # out of the items, for the trip that is next
        same = tuple(captured[k - self.varies] for k in self.where if k >= self.varies)
        try:
            while True:
                for index in chain(taken, items):
                    *rest, broke = self._one(self.pick((index, *carried, *captured)))
                    carried, taken = tuple(rest), ()
                    break
                else:
                    break
                if not broke and self.batch is not None and self.whole:
                    carried, broke, taken = self.batch.further(items, carried, same)
                if broke:
                    break
        finally:
            self._end()
        return carried

    def run_together(
        self, spans: Spans, indices: range, carried: tuple[Any, ...], captured: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """All trips, several in a run; the final carried values."""
        names = self.unit.program.value_params
        try:
            while len(indices):
                handed = (indices.start, *carried, *captured)
                values = [indices.start, indices.stop, *(handed[k] for k in self.where[1:])]
                now = indices[: spans.next(dict(zip(names, values, strict=True)))]
                values[1] = now.stop
                with spans.timed(len(now)):
                    carried = tuple(self._one(values))
                indices = indices[len(now) :]
        finally:
            self._end()
        return carried

    def _one(self, values: Sequence[Any]) -> Any:
        """One run of the unit, in a batch where it can be in one."""
        if self.batch is not None and not self.batch.takes(values):
            self._end()
        if self.batch is None:
            self.batch = Batch.begun(self.unit, self.states, self.runtime)
            if self.batch is not None and not self.batch.takes(values):
                self._end()
        return self._single(values) if self.batch is None else self.batch.run(values)

    def _end(self) -> None:
        if self.batch is not None:
            self.batch.end()
            self.batch = None

    def _single(self, values: Sequence[Any]) -> Any:
        named = dict(zip(self.unit.program.value_params, values, strict=True))
        return self.unit.run(named, self.states, self.runtime, None)


class Batch:
    """Trips of the schedule in force, one after the other, for :data:`BATCH_S` or so."""

    def __init__(
        self,
        unit: Unit,
        decision: Decision,
        states: Mapping[str, Any],
        runtime: Runtime,
    ) -> None:
        self._unit, self._decision, self._runtime = unit, decision, runtime
        self._tuning = unit.tuning(eager=False)
        self._states = tuple(states[name] for name in unit.program.state_params)
        self._schedule = unit.build(decision)
        self._run = self._schedule.run
        self._watch = unit.watch
        self._kinds = unit.watch.kinds
        self._last: tuple[type, ...] = ()  # types that were looked up last
        self._trips = 0
        self._good = True
        self._notes = len(runtime.notes)
        unit.streams.lend(runtime)
        runtime.together = True
        self._started = perf_counter()
        self._until = self._started + BATCH_S

    @classmethod
    def begun(cls, unit: Unit, states: Mapping[str, Any], runtime: Runtime) -> Batch | None:
        """A batch, if every further trip would run the same schedule in the same way. What runs
        between two iterations elsewhere runs in front of it."""
        if steady(unit) is None:
            return None
        unit.between(runtime)
        decision = steady(unit)  # quotas may have begun to be compared, or a drift been seen
        return None if decision is None else cls(unit, decision, states, runtime)

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether the next trip is one of this batch."""
        types = tuple(map(type, values))
        if types != self._last:
            if types not in self._kinds:
                return False
            self._last = types
        watch = self._watch
        return not watch.behind and watch.settled and perf_counter() < self._until

    def run(self, values: Sequence[Any]) -> Any:
        """One trip: the next carried values and, last, whether the loop is left."""
        self._trips += 1
        try:
            return self._run(self._runtime, *values, *self._states)
        except BaseException as error:
            self._failed(error)
            raise

    def further(
        self, items: Iterator[Any], carried: tuple[Any, ...], same: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], bool, tuple[Any, ...]]:
        """Trips for as long as they are this batch's: the values carried, whether the loop is left,
        and the item that was taken for a trip which is none of them, if one was. ``same`` are the
        values that all trips are handed behind those that are carried.

        Beside short trips whatever runs between them finds the caches cold and takes ten times as
        long as by itself, so it is as little as can be: the clock is not read for each.
        """
        run, runtime, watch, rest = self._run, self._runtime, self._watch, (*same, *self._states)
        later, changing = watch.between()
        kind, kinds = self._kinds_of_last(carried)
        left = self._before_look()
        for index in items:
            if left <= 0 or type(index) is not kind or tuple(map(type, carried)) != kinds:
                if not self.takes((index, *carried, *same)):
                    return tuple(carried), False, (index,)
                kind, kinds = self._kinds_of_last(carried)
                left = self._before_look()
            left -= 1
            self._trips += 1
            try:
                made = run(runtime, index, *carried, *rest)
            except BaseException as error:
                self._failed(error)
                raise
            carried = made[:-1]
            if made[-1] or later or (changing and not watch.settled):
                return tuple(carried), made[-1], ()
        return tuple(carried), False, ()

    def _kinds_of_last(self, carried: Sequence[Any]) -> tuple[type | None, tuple[type, ...]]:
        """The types of index and carried values that were looked up last, if any were."""
        return (self._last or (None,))[0], self._last[1 : 1 + len(carried)]

    def _before_look(self) -> int:
        """How many trips run before the clock is read: half of those that still fit."""
        now = perf_counter()
        each = (now - self._started) / max(self._trips, 1)
        return max(1, int(0.5 * (self._until - now) / max(each, 1e-9)))

    def _failed(self, error: BaseException) -> None:
        self._good = False
        if isinstance(error, Exception):
            self._tuning.raised(self._decision, error, self._schedule.emitted)

    def end(self) -> None:
        """Put back what was switched on for all trips, and tell how long they took."""
        seconds = perf_counter() - self._started
        self._runtime.apart()
        if self._good:
            seconds -= self._tuning.compiled(self._runtime.notes[self._notes :])
            if self._trips and seconds > 0:
                self._tuning.record(self._decision, seconds, self._trips)
            self._unit.catch_up()


def _picker(where: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes the values at these places, always as a tuple."""
    if len(where) > 1:
        return itemgetter(*where)
    return lambda handed: tuple(handed[k] for k in where)


def steady(unit: Unit) -> Decision | None:
    """The schedule that iterations run from here on with nothing to be asked in front of each;
    ``None`` while there is anything to ask."""
    now = knobs.current()
    if now.interp or now.verify >= 2 or now.edit is not None or unit.tracer.armed:
        return None
    if not unit.recorded or unit.options.check or not unit.tuning(eager=False).settled:
        return None
    decision = unit.tuning(eager=False).chosen
    if decision is None or unit.last is None or unit.last.decision != decision:
        return None
    # held, or told, while each runs
    if decision.cores or unit.streams.comparing or unit.processes.comparing:
        return None
    if decision not in unit.memory.measured or unit.profiling.pending(decision):
        return None
    return decision


def _items(view: LoopView, bounds: tuple[Any, ...]) -> Iterator[Any]:
    """What the loop goes through, each taken under the modes that hold around the loop."""
    context = facts.get(view.node).context
    if not context:
        return iter(interp.items_of(bounds))
    return _under(context, bounds)


def _under(context: tuple[facts.Context, ...], bounds: tuple[Any, ...]) -> Iterator[Any]:
    with entered(context):
        items = iter(interp.items_of(bounds))
    while True:
        with entered(context):
            try:
                index = next(items)
            except StopIteration:
                return
        yield index


def _length(bounds: tuple[Any, ...]) -> int:
    """How many trips a loop of these bounds makes; 0 where that can't be said beforehand."""
    if len(bounds) == 3:
        return len(range(*bounds))
    return len(bounds[0]) if bounds and isinstance(bounds[0], Sized) else 0
