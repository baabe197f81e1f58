"""What :func:`rose_compiler.compile` returns: a function that behaves like the one it was given."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import textwrap
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from rose_compiler.api.costing import CostModel
from rose_compiler.api.objects import hosted, simulators
from rose_compiler.api.options import Options
from rose_compiler.api.quotas import VIRTUAL, plan_quotas
from rose_compiler.api.reporting import write_report
from rose_compiler.api.schedules import Schedule
from rose_compiler.api.specialize import Specialization
from rose_compiler.api.tracing import Tracer
from rose_compiler.api.turns import Turn
from rose_compiler.api.wrappers import batching
from rose_compiler.base import knobs, phases
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import ConfigError, fail, register
from rose_compiler.base.profile import Profile
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.regions import unwind
from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.frontend import source
from rose_compiler.frontend.guards import Arguments
from rose_compiler.passes.manager import headed
from rose_compiler.runtime.support import Runtime
from rose_compiler.tune.windows import Windows

MAX_RECAPTURES = 8
#: Makes of arguments that a function is kept captured for; for any further one it runs as written.
#: To capture costs as much as many iterations, and a program holds what it was first called with.
MAX_KEPT = 16
#: Objects whose method is kept compiled by a decorated one: those that it was looked up on last.
MAX_BOUND = 32

register(
    "not-called",
    ConfigError,
    "something was asked of a compiled function that it only knows once it was called",
    "call it once with real arguments first",
)


class Compiled:
    """A compiled function. Call it like the original; look inside with :meth:`explain` and the
    others.

    The first call captures the function for its arguments and runs it in program order, which is a
    real training iteration. Calls after it run schedules; with ``tune=True`` several are tried,
    each on real iterations, until one is settled on. :attr:`settled` says so.
    """

    __name__: str
    __qualname__: str
    #: What the frontend knows one by, where it meets it as an attribute or a global.
    rose_compiled = True

    def __init__(self, fn: Any, options: Options) -> None:
        fn = inspect.unwrap(fn, stop=lambda f: not isinstance(f, Compiled))  # compiled anew
        options.check_settings()
        source.read(fn)  # refuse at once what can never be compiled
        self._fn: Any = fn
        self._options = options
        self._log = RemarkLog()
        self._specializations: list[Specialization] = []
        self._recaptures: list[str] = []
        self._full = False  # told that no further make of arguments is captured
        self._runtime: Runtime | None = None
        self._last: Specialization | None = None
        self._tracer = Tracer()
        self._bound: dict[int, tuple[Any, Compiled]] = {}  # by the id of the object
        self._turn = Turn()  # one call at a time: all of them share lanes and tuning
        self._keeping = threading.RLock()  # of objects
        self._inside = False
        self._process = os.getpid()
        functools.update_wrapper(self, fn)

    # -- calling -------------------------------------------------------------------------------

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        with self._keeping:
            found = self._bound.pop(id(instance), None)
            if found is None:
                found = instance, Compiled(self._fn.__get__(instance, owner), self._options)
            self._bound[id(instance)] = found  # behind all others
            if len(self._bound) > MAX_BOUND:
                del self._bound[next(iter(self._bound))]
        return found[1]

    def __reduce__(self) -> Any:
        """Copied and pickled as the function itself is: a copy begins anew."""
        found: Any = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            found = getattr(found, name, None)
        return self.__qualname__ if found is self else (Compiled, (self._fn, self._options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._process != os.getpid():
            self._forked()
        turn = self._turn
        if not turn.take(wait=not phases.in_lane()):
            return self._fn(*args, **kwargs)  # the call at hand may be waiting for this one
        try:
            if self._inside:  # what is recorded and scheduled is the call around this one
                return self._fn(*args, **kwargs)
            self._inside = True
            try:
                return self._called(args, kwargs)
            finally:
                self._inside = False
        finally:
            turn.give()

    def _forked(self) -> None:
        """The threads of its lanes, and those that hold its locks, are the parent's."""
        held = self._inside and self._turn.take(wait=False)
        self._process, self._runtime, self._inside = os.getpid(), None, held
        self._turn, self._keeping = Turn(), threading.RLock()

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._find(args, kwargs)
        if found is None:
            return self._fn(*args, **kwargs)
        specialization, arguments = found
        self._last = specialization
        try:
            return specialization.call(arguments, self.runtime, lambda: self._fn(*args, **kwargs))
        except BaseException as error:
            unwind(specialization.captured.session.regions)
            if self._runtime is not None and not isinstance(error, Exception):
                self._runtime.rest()
            raise
        finally:
            specialization.guards.after_call()

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Specialization, Arguments] | None:
        """The specialization whose assumptions hold for these arguments; a new one if none does,
        ``None`` if there are too many already."""
        given = args if not inspect.ismethod(self._fn) else (self._fn.__self__, *args)
        why = ""
        for candidate in self._specializations:
            arguments = candidate.guards.bind(given, kwargs)
            changed = candidate.guards.check(arguments)
            if changed is None:
                return candidate, arguments
            why = why or changed
        if why and len(self._specializations) >= MAX_KEPT:
            self._left_as_written(why)
            return None
        if why:
            self._recaptured(why)
        made = Specialization(self._fn, args, kwargs, self._options, self._log, self._tracer)
        if self._specializations:
            made.unit.folder = f"capture-{len(self._specializations) + 1}"
        arguments = made.guards.bind(given, kwargs)
        self._specializations.insert(0, made)
        return made, arguments

    def _recaptured(self, why: str) -> None:
        self._recaptures.append(why)
        self._log.add(Remark("note", "guards", (), "re-captured", f"captured anew: {why}"))
        if len(self._recaptures) == MAX_RECAPTURES + 1:
            culprits = Counter(w.partition(" changed ")[0] for w in self._recaptures)
            told = ", ".join(f"{what} ({n} times)" for what, n in culprits.most_common(3))
            warnings.warn(
                f"rose_compiler captured {self.__name__!r} anew {len(self._recaptures)} times; "
                f"what kept changing: {told}. Keep it fixed, or pass it as an argument",
                stacklevel=5,
            )

    def _left_as_written(self, why: str) -> None:
        if self._full:
            return
        self._full = True
        told = (
            f"captured for {MAX_KEPT} makes of arguments, it runs as written for all others; the "
            f"first of them: {why}"
        )
        self._log.add(Remark("note", "guards", (), "re-captured", told))

    @property
    def runtime(self) -> Runtime:
        """The lanes this function runs on; made when they are first needed."""
        serial = knobs.current().serial
        if self._process != os.getpid():
            self._forked()
        if self._runtime is not None and self._runtime.serial != serial:
            self.close()
        if self._runtime is None:
            self._runtime = Runtime(serial=serial, timeout=self._options.timeout, batching=batching)
        return self._runtime

    def close(self) -> None:
        """End the threads of all lanes, and let processes of components have their cores back. The
        function can be called again afterwards."""
        for each in self._specializations:
            each.release()
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    # -- looking inside ------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether tuning is over: further calls run :attr:`decision`."""
        return (
            self._last is not None and self._last.unit.recorded and self._last.unit.tuning().settled
        )

    @property
    def decision(self) -> Decision:
        """The schedule in force; ``decision.save(path)`` is for ``compile(..., tune=path)``."""
        return self._require().unit.tuning().best

    def ir(self, after: str | None = None) -> str:
        """The program as text: as captured (``"captured"``), or after a pass of the schedule in
        force, the last one by default.

        Raises:
            ConfigError: when no pass of that name ran.
        """
        if after == "captured":
            return self._require().unit.text
        history = self._schedule().history
        number = history.number(after)
        return headed(history[number][1], number, history[number][0])

    @property
    def history(self) -> list[tuple[str, str]]:
        """The program as text after each pass of the schedule in force."""
        entries = enumerate(self._schedule().history)
        return [(name, headed(text, k, name)) for k, (name, text) in entries]

    @property
    def source(self) -> str:
        """The emitted Python of the schedule in force."""
        return self._schedule().source

    def explain(self, topic: str | None = None, *, width: int | None = None) -> str:
        """What was done and what was not, with the reasons and the user's lines.

        ``width`` is that of the terminal by default, 100 columns where there is none.

        ``topic="cost"`` tells what an iteration of the schedule that was profiled last should take,
        as a formula and a number, what it took, and the lower bound. ``topic="memory"`` tells what
        schedules were predicted to take at their peak, what they took, and what the one in force
        adds to program order.

        Raises:
            ConfigError: for another topic; for the cost, when no iteration was profiled yet.
        """
        width = shutil.get_terminal_size((100, 24)).columns if width is None else width
        if topic == "cost":
            text = self.cost.render(width)
            return f"{self.__name__}: schedule [{self._require().unit.profiling.latest}]\n{text}"
        if topic == "memory":
            unit = self._require().unit
            return f"{self.__name__}: {unit.memory_of(unit.tuning().best, width)}"
        if topic is not None:
            raise fail(
                "config-argument",
                f"explain({topic!r})",
                expected="nothing, 'cost' or 'memory'",
                found=repr(topic),
            )
        tuning = self._require().unit.tuning()
        log = RemarkLog()
        log.extend(self._log)
        log.extend(self._require().unit.watch.remarks)
        log.extend(self._schedule().history.remarks)
        log.extend(self._require().unit.profiling.remarks(pipelined=tuning.tuned))
        named = self._require().unit.program.objects
        for component in (*hosted(named).values(), *simulators(named).values()):
            log.extend(getattr(component, "rose_remarks", ()))
        said = tuning.summary()
        if idle := self._schedule().idle:
            said += f"; {' and '.join(idle)} came to nothing"
        head = textwrap.fill(f"{self.__name__}: {said}", width, break_long_words=False)
        parts = [head, log.render(width)]
        table = tuning.table(width)
        if table:
            parts.insert(1, table)
        return "\n\n".join(parts)

    def windows(self) -> Windows:
        """Windows of low activity in the iteration that was profiled last; ``print`` shows a table.

        Raises:
            ConfigError: when no iteration was profiled yet.
        """
        return self._require().unit.profiling.windows()

    @property
    def profile(self) -> Profile:
        """What the iterations took that were profiled last: times of each operation, a timeline.

        Raises:
            ConfigError: when no iteration was profiled yet.
        """
        return self._require().unit.profiling.last.profile

    @property
    def cost(self) -> CostModel:
        """The cost model of the schedule that was profiled last: formula, prediction, bound.

        Raises:
            ConfigError: when no iteration was profiled yet.
        """
        return self._require().unit.profiling.cost()

    def profile_next(self, iterations: int = 1) -> None:
        """Have the next iterations profiled, as far as they run a schedule. Without being asked,
        one is profiled before tuning, and three when a schedule is settled on."""
        self._require().unit.profiling.ask(iterations)

    @property
    def quota_plan(self) -> QuotaPlan:
        """Shares of SMs or cores for each lane of the schedule that was profiled last, from the
        slack of its branches. Nothing is put into force: :mod:`rose_compiler.runtime.quotas` does.

        With ``backend="virtual:h200"``, or the path of a description, it is a plan for that GPU.
        Before anything was profiled it has no shares, and says so. Where tuning has settled on core
        quotas, or streams or processes have won SMs of their own, that is the plan, with what was
        predicted; so is one that components which can't be moved wait for, until they start anew.
        """
        virtual = self._options.backend.startswith(VIRTUAL)
        if self._last is not None and self._last.unit.recorded and not virtual:
            unit = self._last.unit
            sms = unit.streams.plan or unit.processes.plan or unit.processes.pending
            planned = unit.cores.plans.get(unit.tuning().best, sms)
            if planned is not None:
                return planned
        profile = None
        if self._last is not None and self._last.unit.profiling.latest is not None:
            profile = self._last.unit.profiling.last.profile
        return plan_quotas(profile, self._options.backend)

    def report(self, path: str | Path) -> None:
        """Write a page (HTML) on the schedule in force: what was tried, its windows of low
        activity, what it costs, and every rewrite done or not done.

        Raises:
            ConfigError: when nothing was called or profiled yet, or no such file can be written.
        """
        unit = self._require().unit
        parts = (self.explain(width=140), self.explain("memory", width=140))
        write_report(path, self.__name__, unit.profiling, "\n\n".join(parts))

    def trace(self, path: str | Path) -> None:
        """Have the next iteration leave its timeline in a file, in Chrome's trace format, which
        https://ui.perfetto.dev and ``chrome://tracing`` show: lanes as threads, operations with
        the user's lines. The first iteration of all, which is watched, is not traced.

        Raises:
            ConfigError: when there can be no such file.
        """
        self._tracer.arm(path)

    def _require(self) -> Specialization:
        if self._last is None or not self._last.unit.recorded:
            raise fail(
                "not-called",
                f"{self.__name__!r} was not called yet, so nothing of it is known",
            )
        return self._last

    def _schedule(self) -> Schedule:
        unit = self._require().unit
        best = unit.tuning().best
        if unit.last is not None and unit.last.decision == best:
            return unit.last  # what ran, whatever settings it was built under
        return unit.build(best)

    def __repr__(self) -> str:
        return f"<rose_compiler.compile of {self.__qualname__}>"
