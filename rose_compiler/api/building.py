"""Schedules of one program: what the passes may know of it, and each decision built once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rose_compiler.api import objects
from rose_compiler.api.memory import Memory
from rose_compiler.api.options import Options
from rose_compiler.api.probing import Prober
from rose_compiler.api.schedules import Schedule, built, changed
from rose_compiler.api.tuning import Tuning
from rose_compiler.api.watching import Watch
from rose_compiler.api.wrappers import batchable
from rose_compiler.base import knobs
from rose_compiler.base.decision import Decision
from rose_compiler.base.knobs import Settings
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir.bodies import copy_program
from rose_compiler.ir.losses import Loss
from rose_compiler.ir.program import Program
from rose_compiler.passes.base import Batchable, PassContext
from rose_compiler.passes.fuse_graphs import graphs
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.stream_work import VIRTUAL, device_of
from rose_compiler.passes.streams import Streams
from rose_compiler.runtime.optimizers import why_not_fused
from rose_compiler.tune.local import Local


class Building:
    """Builds schedules of ``program``, each once, until :meth:`forget`."""

    def __init__(self, program: Program, options: Options, log: RemarkLog) -> None:
        self.program = program
        self.text = ""
        self.options = options
        self.log = log
        self.watch = Watch(program, log)
        self.memory = Memory(options.memory_limit, log)
        self.folder = ""  # below the one that ROSE_DUMP names
        self.schedules: dict[tuple[Decision, Settings, int], Schedule] = {}
        self._asked: tuple[Decision, Settings, Schedule] | None = None  # what was built last
        self._wrappers: dict[str, tuple[Batchable, ...]] | None = None
        #: What operations were measured to take by themselves, before any schedule was tried.
        self.local: Local | None = None

    def tuning(self, eager: bool = True) -> Tuning:
        """Which schedule comes next."""
        raise NotImplementedError

    def forget(self) -> None:
        """The program is another one: schedules are built anew."""
        self.schedules.clear()
        self.memory.forget()
        self._asked = self._wrappers = self.local = None

    def shards(self) -> dict[str, tuple[int, ...]]:
        """Rows of each shard of every simulator among the states, by the state's name."""
        return objects.shards(self.program.objects)

    def asynchronous(self) -> frozenset[str]:
        """Simulators whose shards step beside the caller by themselves."""
        return objects.asynchronous(self.program.objects)

    def optimizers(self) -> dict[str, str | None]:
        """Why steps of each optimizer can't be fused, by state name; ``None`` where they can."""
        found = objects.below(self.program.objects, lambda x: isinstance(x, torch.optim.Optimizer))
        return {name: why_not_fused(optimizer) for name, optimizer in found.items()}

    def wrappers(self) -> dict[str, tuple[Batchable, ...]]:
        """What can advance at once in each shard of the simulators that can say so, by state name;
        asked once."""
        if self._wrappers is None:
            self._wrappers = batchable(self.program.objects)
        return self._wrappers

    def device(self) -> str:
        """The device on whose streams work may be queued: the one that all tensors which are not in
        the CPU's memory lie on, or the one that is planned for; empty where there is none."""
        backend = self.options.backend
        return backend if backend.startswith(VIRTUAL) else device_of(self.program)

    def streamable(self) -> bool:
        """Whether anything may be queued on streams of its own."""
        if not (device := self.device()):
            return False
        context = PassContext(
            options=Decision(streams=True), device=device, run_ahead=self.options.run_ahead
        )
        history = PassManager([Streams()], verify=0).run(copy_program(self.program), context)
        return any(r.why.startswith("runs on lane") for r in history.remarks.applied())

    def _compilable(self) -> bool:
        """Whether a loss can be compiled together with its ``backward``, or a graph."""
        found = any(isinstance(loss, Loss) for loss in self.watch.losses.values())
        return found or bool(graphs(self.program))

    def context(self, decision: Decision, program: Program) -> PassContext:
        """What passes may know while they rewrite ``program`` for one decision."""
        return PassContext(
            numerics=self.options.numerics,
            options=decision,
            shards=self.shards(),
            asynchronous=self.asynchronous(),
            probe=Prober(program, self.watch.examples, self.options.numerics == "bitwise"),
            run_ahead=self.options.run_ahead,
            # while schedules are tried, one that is too large is left out as a whole
            memory_limit=None if self.tuning().tuned else self.memory.left,
            optimizers=self.optimizers(),
            examples=self.watch.examples,
            losses=self.watch.losses if decision.compile or decision.script else {},
            wrappers=self.wrappers(),
            device=self.device(),
        )

    def build(self, decision: Decision) -> Schedule:
        """The schedule of one decision under the settings in force; built once."""
        now = knobs.current()
        if self._asked is not None and self._asked[0] is decision and self._asked[1] is now:
            return self._asked[2]
        # what only matters while it runs
        settings = replace(now, interp=False, serial=False, trace=None, cache=knobs.AUTO)
        key = (decision, settings, changed(settings.edit))
        found = self.schedules.get(key)
        if found is None:
            found = self.schedules[key] = self._built(decision, settings)
        if now.edit is None:
            self._asked = (decision, now, found)
        return found

    def _built(self, decision: Decision, settings: Settings) -> Schedule:
        program = copy_program(self.program)
        context = self.context(decision, program)
        folder = self._dump_folder(decision, settings)
        return built(program, context, self.options.pipeline, settings, folder, self.log)

    def _dump_folder(self, decision: Decision, settings: Settings) -> Path | None:
        if settings.dump is None:
            return None
        folder = Path(settings.dump) / self.folder
        if not self.tuning().tuned:
            return folder
        # several schedules are built; each has a folder, or the last one would be all that is left
        return folder / str(decision).replace("=", "-").replace(" ", "_")
