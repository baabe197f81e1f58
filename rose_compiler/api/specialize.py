"""One function, specialized to the arguments of one call: captured, recorded, scheduled, run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.api.options import Options
from rose_compiler.api.probing import Prober
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.codegen.emit import Emitted, emit
from rose_compiler.codegen.load import load
from rose_compiler.frontend.capture import Captured, capture
from rose_compiler.frontend.components import is_simulator
from rose_compiler.frontend.graphs import trace_runs
from rose_compiler.frontend.guards import Arguments, Guards, make_guards
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.recorder import Recorder
from rose_compiler.frontend.states import refine
from rose_compiler.ir import bodies, interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.ops import OpTable
from rose_compiler.ir.program import Program
from rose_compiler.ir.verify import verify
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.runtime.support import Runtime


def copy_program(program: Program) -> Program:
    """A program that passes may rewrite, over the same operations and objects."""
    copy = Program(
        program.name,
        program.root,
        OpTable(dict(program.ops.by_name)),
        program.value_params,
        program.state_params,
        program.stage,
        program.objects,
    )
    copy.root = bodies.copied(program.root, program, {}, "")
    return copy


@dataclass
class Schedule:
    """One candidate, built: its decision, the program it led to and the code that runs it."""

    decision: Decision
    program: Program
    history: History
    emitted: Emitted
    run: Any

    @property
    def source(self) -> str:
        """The emitted module."""
        return self.emitted.source


@dataclass
class Specialization:
    """Everything known of a function for arguments of one make."""

    captured: Captured
    guards: Guards
    options: Options
    log: RemarkLog
    record: Record | None = None
    examples: dict[str, Any] = field(default_factory=dict)
    schedules: dict[Decision, Schedule] = field(default_factory=dict)
    text: str = ""

    @property
    def program(self) -> Program:
        """The program as captured, effects and graphs included, before any pass."""
        return self.captured.program

    @classmethod
    def make(cls, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, log: RemarkLog) -> Specialization:
        """Capture a function for the arguments at hand.

        Raises:
            CaptureError: for a construct that can't be compiled soundly.
        """
        captured = capture(fn, args, kwargs)
        verify(captured.program)
        return cls(captured, make_guards(captured, args, kwargs), options, log)

    # -- the first call ------------------------------------------------------------------------

    def first(self, arguments: Arguments) -> Any:
        """Run the program in its own order and watch it."""
        recorder = Recorder(self.program)
        result = interp.run(self.program, arguments.values, arguments.states, hooks=recorder)
        self.record = recorder.record
        self.prepare()
        return result

    def prepare(self) -> None:
        """Use what the first call showed: effects, graphs."""
        assert self.record is not None
        refine(self.program, self.record, self.log)
        self.examples = self._examples()
        trace_runs(self.program, self.record, self.log)
        self.record.release()
        verify(self.program)
        self.text = dump(self.program)

    def _examples(self) -> dict[str, Any]:
        assert self.record is not None
        found: dict[str, Any] = {}
        for node, example in self.record.examples.items():
            for argument, value in zip(node.args, example.args, strict=True):
                if isinstance(argument, fx.Node) and argument.name not in found:
                    found[argument.name] = value
        return found

    # -- schedules -----------------------------------------------------------------------------

    def shards(self) -> dict[str, tuple[int, ...]]:
        """Rows of each shard of every simulator among the states, by the state's name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, value in _simulators(self.program.objects).items():
            get = getattr(value, "shards", None)
            if callable(get):
                found[name] = tuple(int(s.num_envs) for s in get())
        return found

    def asynchronous(self) -> frozenset[str]:
        """Simulators whose shards step beside the caller by themselves."""
        return frozenset(
            name
            for name, value in _simulators(self.program.objects).items()
            if callable(getattr(value, "shards", None)) and all(s.native_async for s in value.shards())
        )

    def context(self, decision: Decision) -> PassContext:
        """What passes may know for one decision."""
        return PassContext(
            numerics=self.options.numerics,
            options=decision,
            shards=self.shards(),
            asynchronous=self.asynchronous(),
            probe=Prober(self.program, self.examples),
            run_ahead=self.options.run_ahead,
            memory_limit=self.options.memory_limit,
        )

    def build(self, decision: Decision) -> Schedule:
        """The schedule of one decision; built once."""
        found = self.schedules.get(decision)
        if found is not None:
            return found
        settings = knobs.current()
        program = copy_program(self.program)
        passes = PIPELINE if self.options.passes is None else self.options.passes
        manager = PassManager(
            passes,
            verify=settings.verify,
            fuel=settings.fuel,
            dump_dir=settings.dump,
            names=settings.passes,
        )
        history = manager.run(program, self.context(decision))
        emitted = emit(program)
        made = Schedule(decision, program, history, emitted, load(emitted))
        self.schedules[decision] = made
        return made

    def run(self, schedule: Schedule, runtime: Runtime, arguments: Arguments) -> Any:
        """Run one call by a schedule."""
        values = [arguments.values[n] for n in self.program.value_params]
        states = [arguments.states[n] for n in self.program.state_params]
        return schedule.run(runtime, *values, *states)


def _simulators(objects: dict[str, Any]) -> dict[str, Any]:
    """Simulators among the roots and one level below, by state name."""
    found: dict[str, Any] = {}
    for root, value in objects.items():
        if is_simulator(value):
            found[root] = value
            continue
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            for key, inner in fields.items():
                if is_simulator(inner):
                    found[f"{root}.{key}"] = inner
    return found
