"""One candidate, built and ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from rose_compiler.api.tracing import Trace
from rose_compiler.base.decision import Decision
from rose_compiler.codegen.emit import Emitted
from rose_compiler.codegen.load import load
from rose_compiler.codegen.timed import Timer
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Program
from rose_compiler.passes.manager import History
from rose_compiler.runtime.support import Runtime


@dataclass
class Schedule:
    """One candidate, built: its decision, the program it led to and the code that runs it."""

    decision: Decision
    program: Program
    history: History
    emitted: Emitted
    run: Any
    _timed: tuple[Timer, Any] | None = field(default=None, repr=False)
    _noted: Any = field(default=None, repr=False)

    @property
    def source(self) -> str:
        """The module that runs: the emitted one, or a person's edited copy."""
        return self.emitted.source

    def timed(self) -> tuple[Timer, Any]:
        """The same code with a timer."""
        if self._timed is None:
            timer = Timer()
            self._timed = timer, load(self.emitted, timer=timer)
        return self._timed

    def noted(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Any:
        """The same code, with ``around`` put around each function that it calls, by name."""
        if self._noted is None:
            self._noted = load(self.emitted)
        run = self._noted
        names = {
            name: around(name, value)
            for name, value in run.__globals__.items()
            if value is not run and isinstance(value, FunctionType | Op)
        }
        return FunctionType(run.__code__, {**run.__globals__, **names}, "run")

    def traced(self, runtime: Runtime, inputs: tuple[Any, ...], trace: Trace) -> Any:
        """Run one iteration and fill in its timeline."""
        timer, run = self.timed()
        timer.taken.clear()
        with runtime.recording() as spans:
            try:
                return run(runtime, *inputs)
            finally:
                trace.spans, trace.faults = spans, self.emitted.faults
                trace.own = [(timer.statements[k], a, b) for k, a, b in timer.taken]
