"""One candidate: built from a program by passes, emitted, loaded, and ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from rose_compiler.api.tracing import Trace
from rose_compiler.base.decision import Decision
from rose_compiler.base.knobs import Settings
from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.codegen.emit import Emitted, emit
from rose_compiler.codegen.load import copied_from, edited, load
from rose_compiler.codegen.timed import Timer
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import Program
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.stream_work import VIRTUAL
from rose_compiler.runtime.support import Runtime

#: Fields of a decision that passes may find nothing to do for, with those passes.
_ASKED = {"groups": ("tile_batch",), "late": ("late", "unswitch"), "defer": ("defer",)}


@dataclass
class Schedule:
    """One candidate, built: its decision, the program it led to and the code that runs it."""

    decision: Decision
    program: Program
    history: History
    emitted: Emitted
    run: Any
    device: str = "cpu"  # on whose streams lanes run
    _timed: tuple[Timer, Any] | None = field(default=None, repr=False)
    _noted: Any = field(default=None, repr=False)

    @property
    def source(self) -> str:
        """The module that runs: the emitted one, or a person's edited copy."""
        return self.emitted.source

    @property
    def idle(self) -> tuple[str, ...]:
        """The fields of the decision that came to nothing, as it prints them: no pass that reads
        one has changed the program, and remarks tell why."""
        plain = Decision(groups=min(self.decision.groups, 1))  # one group is the whole batch
        return tuple(
            f"{name}={wanted}"
            for name, passes in _ASKED.items()
            if (wanted := getattr(self.decision, name)) != getattr(plain, name)
            and not any(self.history.rewrites.get(one) for one in passes)
        )

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


def built(
    program: Program,
    context: PassContext,
    passes: Sequence[Pass],
    settings: Settings,
    folder: Path | None,
    log: RemarkLog,
) -> Schedule:
    """What the passes make of a program, which they rewrite, for the decision in ``context``.

    Dumps go to ``folder``. A file that ``settings`` name is run in place of the emitted code, if it
    is a copy of it; if not, ``log`` says so. Raises what a pass raises.
    """
    manager = PassManager.of(passes, settings)
    manager.dump_dir = folder
    history = manager.run(program, context)
    emitted = emit(program)
    if folder is not None:
        name = f"{program.name}.{len(history):02d}-emitted.py"
        (folder / name).write_text(emitted.source, encoding="utf-8")
    if settings.edit is not None:
        emitted = _edited(emitted, settings.edit, log)
    device = context.device or "cpu"
    if device.startswith(VIRTUAL):  # what is only planned for runs here
        device = "cpu"
    return Schedule(context.options, program, history, emitted, load(emitted), device)


def _edited(emitted: Emitted, path: str, log: RemarkLog) -> Emitted:
    found = edited(emitted, path)
    if found is emitted:
        other = copied_from(Path(path).read_text(encoding="utf-8"))
        why = f"{path} is a copy of {other!r}, so it is not run here"
        log.add(Remark("note", "edit", (), "other-program", why))
    return found


def changed(path: str | None) -> int:
    """When a file was last written, in nanoseconds; 0 for one that is not there."""
    try:
        return 0 if path is None else Path(path).stat().st_mtime_ns
    except OSError:
        return 0
