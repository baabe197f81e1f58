"""One function, specialized to the arguments of one call: captured, then run by its units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from rose_compiler.api.options import Options
from rose_compiler.api.spans import Spans
from rose_compiler.api.tracing import Tracer
from rose_compiler.api.trips import Trips
from rose_compiler.api.unit import Unit
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.frontend.capture import capture
from rose_compiler.frontend.graphs import lifted
from rose_compiler.frontend.guards import Arguments, make_guards
from rose_compiler.frontend.unit import find_iterations, spans_trips, steps_itself, trips_of
from rose_compiler.ir.losses import Loss
from rose_compiler.ir.program import Program
from rose_compiler.ir.verify import verify
from rose_compiler.runtime.support import Runtime


class Specialization:
    """A function captured for arguments of one make, with what it takes for granted."""

    def __init__(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        log: RemarkLog,
        tracer: Tracer | None = None,
    ) -> None:
        options.check_settings()  # they may have changed since `compile`
        self.captured = capture(fn, args, kwargs)
        program = self.captured.program
        verify(program)
        bound = self.captured.source.bound
        given = args if bound is None else (bound, *args)
        self.guards = make_guards(self.captured, given, kwargs)
        self.iterations = find_iterations(program, self.captured.session)

        def unit(of: Program) -> Unit:
            return Unit(of, options, log, tracer)

        self._whole = None if self.iterations.loops and self.iterations.sure else unit(program)
        self._trips = {n: unit(trips_of(program, n)) for n in self.iterations.loops}
        self.spans = {
            n: Spans(u, 1 if steps_itself(n) else 2)
            for n, u in self._trips.items()
            if spans_trips(n)
        }
        self.guards.shared.sized = self._sized
        make = [self.guards.values, self.guards.layout]
        for each in self._units():
            each.make = make
        for number, each in enumerate(self._trips.values()):
            each.folder = f"loop-{number}" if len(self._trips) > 1 else ""
        self._called = False
        self._last: Unit | None = None

    def call(self, arguments: Arguments, runtime: Runtime, eager: Callable[[], Any]) -> Any:
        """Run one call of the function."""
        again, self._called = self._called, True
        if self._whole is not None and (again or not self._trips):
            self._last = self._whole
            return self._whole.run(arguments.values, arguments.states, runtime, eager)
        for each in self._trips.values():
            each.program.objects.update({n: arguments.states[n] for n in each.program.state_params})
        program = self.captured.program
        inputs = [arguments.values[n] for n in program.value_params]
        inputs += [arguments.states[n] for n in program.state_params]
        return Trips(self.trip_unit, self.spans, arguments.states, runtime).root(program, inputs)

    def _units(self) -> list[Unit]:
        return [*self._trips.values(), *([self._whole] if self._whole else [])]

    def _sized(self) -> set[str]:
        """States whose tensors were there when graphs were traced, which hold their sizes."""
        found: set[str] = set()
        for each in self._units():
            found |= lifted(each.program)
            for loss in each.watch.losses.values():
                found.update(loss.states if isinstance(loss, Loss) else ())
        return found

    def release(self) -> None:
        """Take back the quotas in force, and let go what would bring components back."""
        for each in self._units():
            each.cores.release()
            each.processes.release()
            each.streams.release()
            for component in each.hosts():
                component.rose_released()

    @property
    def unit(self) -> Unit:
        """The unit that ran last: the whole function, or one trip of the loop over iterations."""
        if self._last is not None:
            return self._last
        return next(iter(self._trips.values())) if self._trips else self._only()

    def _only(self) -> Unit:
        assert self._whole is not None
        return self._whole

    def trip_unit(self, loop: fx.Node) -> Unit | None:
        """What runs one trip of a loop over iterations; ``None`` for any other loop."""
        found = self._trips.get(loop)
        if found is not None:
            self._last = found
        return found
