"""One function, specialized to the arguments of one call: captured, then run by its units."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import torch.fx as fx

from rose_compiler.api.options import Options
from rose_compiler.api.tracing import Tracer
from rose_compiler.api.unit import Unit
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.frontend.capture import capture
from rose_compiler.frontend.guards import Arguments, make_guards
from rose_compiler.frontend.unit import find_iterations, one_trip
from rose_compiler.ir import interp
from rose_compiler.ir.program import LoopView, Program, is_state, placeholders
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
        self._trips = {n: unit(one_trip(program, n)) for n in self.iterations.loops}
        make = [self.guards.values, self.guards.layout]
        for each in (*self._trips.values(), *([self._whole] if self._whole else [])):
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
        return _Trips(self, arguments, runtime).root(program, inputs)

    def release(self) -> None:
        """Take back the quotas in force."""
        for each in (*self._trips.values(), *([self._whole] if self._whole else [])):
            each.cores.release()

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


class _Trips(interp.Interpreter):
    """Runs a whole training loop: the unit for each trip, what stands around it in program
    order.
    """

    def __init__(self, of: Specialization, arguments: Arguments, runtime: Runtime) -> None:
        super().__init__(interp.Hooks())
        self.of = of
        self.arguments = arguments
        self.runtime = runtime
        self._values: dict[fx.Node, dict[str, int]] = {}  # where each value of a trip stands

    def _loop(self, node: fx.Node, env: interp.Environment) -> tuple[Any, ...]:
        unit = self.of.trip_unit(node)
        if unit is not None:
            bounds = self._read(env, LoopView(node).bounds)
            unit.expect(_length(bounds))
        return super()._loop(node, env)

    def trip(self, loop: fx.Node, number: int, inputs: tuple[Any, ...]) -> interp.Outcome:
        unit = self.of.trip_unit(loop)
        if unit is None:
            return super().trip(loop, number, inputs)
        if loop not in self._values:
            params = placeholders(LoopView(loop).graph)
            where = [k for k, param in enumerate(params) if not is_state(param)]
            self._values[loop] = dict(zip(unit.program.value_params, where, strict=True))
        values = {name: inputs[k] for name, k in self._values[loop].items()}
        *carried, broke = unit.run(values, self.arguments.states, self.runtime, None)
        return interp.Outcome("break" if broke else "end", tuple(carried))


def _length(bounds: tuple[Any, ...]) -> int:
    """How many trips a loop of these bounds makes; 0 where that can't be said beforehand."""
    if len(bounds) == 3:
        return len(range(*bounds))
    return len(bounds[0]) if bounds and isinstance(bounds[0], Sized) else 0
