"""Checking mode, the order: a schedule runs on its lanes too, on copies of all objects.

Its tasks begin and end at random moments. What it leaves must be, in every bit, what the same
operations leave one after the other. Where it is not, the same code is run on one lane, which tells
a race from a wrong order, and the program once more in its own order: a copy that goes its own way
there, because of a clock for example, proves nothing and is not held against the schedule.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from rose_compiler.api.schedules import Schedule
from rose_compiler.api.worlds import Generators, Unlike, World, difference
from rose_compiler.base.errors import RoseError, SourceLocation, VerifyError, fail, register
from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.ir import facts, interp
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import HOST, related
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.runtime.support import Runtime

register(
    "check-order-differs",
    VerifyError,
    "checking mode: a schedule on its lanes gave other values than its operations one by one",
    "ROSE_SERIAL=1 runs it on one lane; ROSE_PASSES=-late,-place keeps the order as written",
)

#: Calls that a block which prints may make besides, and have no effect outside of Python.
_HARMLESS = frozenset(
    [
        "print",
        "abs",
        "float",
        "format",
        "int",
        "item",
        "join",
        "len",
        "max",
        "mean",
        "min",
        "round",
        "std",
        "str",
        "sum",
        "tolist",
    ]
)


class OrderCheck:
    """One iteration's copies, made before it runs; :meth:`compare` afterwards.

    ``why`` says why the order can't be checked, empty where it can.
    """

    def __init__(self, schedule: Schedule, world: World, seed: int) -> None:
        self.schedule = schedule
        self.world = world
        self.seed = seed
        self.before = Generators.now()
        self.why = _why_not(schedule)
        self.pristine: World | None = None
        if not self.why and not self.plain:
            try:
                self.pristine = world.copied()
            except Unlike as error:
                self.why = str(error)

    @property
    def plain(self) -> bool:
        """Whether the schedule is the program's own order on one lane."""
        plan = self.schedule.emitted.plan
        return plan is None or bool(plan.plain)

    def tell(self, log: RemarkLog) -> None:
        """Leave a remark where the order is not checked, once."""
        if self.why and not self.plain:
            what = f"the order of the lanes was not checked: {self.why}"
            remark = Remark("note", "check", (), "unchecked", what)
            if remark not in log:
                log.add(remark)

    def compare(self, result: Any) -> bool:
        """Run the schedule on copies and compare with what the iteration left; whether that could
        be.

        Raises:
            VerifyError: where it differs.
        """
        if self.pristine is None:
            return False
        after = Generators.now()
        try:
            lanes: list[_Call] = []
            found = self._differs(SlowRuntime(self.seed), lanes, result, after)
            if found is None:
                return True
            serial: list[_Call] = []
            wrong = self._differs(Runtime(serial=True), serial, result, after)
            if self._own_order(result, after):
                self.why = "a copy of its objects goes another way in program order too"
                return False
        except Unlike as error:
            self.why = str(error)
            return False
        finally:
            after.restore()
        raise self._error(*found, *_first(serial, lanes), on_one_lane=wrong is not None)

    # -- runs

    def _differs(
        self, runtime: Runtime, calls: list[_Call], result: Any, after: Generators
    ) -> tuple[str, Any, Any] | None:
        assert self.pristine is not None
        copy = self.pristine.copied()
        run = self.schedule.noted(_noting(calls))
        given = (*copy.values.values(), *copy.states.values())

        def call() -> Any:
            with contextlib.closing(runtime):
                return run(runtime, *given)

        return self._run(call, copy, result, after)

    def _own_order(self, result: Any, after: Generators) -> bool:
        assert self.pristine is not None
        copy = self.pristine.copied()
        program = self.schedule.program

        def call() -> Any:
            return interp.run(program, dict(copy.values), dict(copy.states))

        return self._run(call, copy, result, after) is not None

    def _run(
        self, call: Callable[[], Any], copy: World, result: Any, after: Generators
    ) -> tuple[str, Any, Any] | None:
        self.before.restore()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                made = call()
        except Exception as error:
            return "the iteration", "no exception", f"{type(error).__name__}: {error}"
        moved = after.differs(Generators.now())
        if moved is not None:
            return moved, "where it stands one by one", "somewhere else"
        for name, state in self.world.states.items():
            found = difference(state, copy.states[name], name)
            if found is not None:
                return found
        for name, value in self.world.values.items():
            found = difference(value, copy.values[name], f"argument `{name}`")
            if found is not None:
                return found
        return difference(result, made, "the result")

    # -- telling

    def _error(
        self,
        path: str,
        expected: Any,
        found: Any,
        name: str,
        call: int,
        *,
        on_one_lane: bool,
    ) -> RoseError:
        where = self._line_of(name) or self._writer_of(path)
        first = f"; the first call that gives something else is call {call} of `{name}`"
        kind = "its order is wrong" if on_one_lane else "its lanes race"
        return fail(
            "check-order-differs",
            f"`{path}` differs after an iteration by the schedule, {kind}{first if name else ''}",
            where=where,
            expected=f"{expected} (one operation after the other)",
            found=f"{found} (schedule [{self.schedule.decision}])",
        )

    def _line_of(self, name: str) -> SourceLocation | None:
        """The user's line of the first call of a function in the emitted code."""
        if not name:
            return None
        word = re.compile(rf"\b{re.escape(name)}\b")
        places = self.schedule.emitted.places
        for number, line in enumerate(self.schedule.emitted.source.splitlines(), 1):
            if number in places and word.search(line):
                return places[number]
        return None

    def _writer_of(self, path: str) -> SourceLocation | None:
        """The user's line of the last operation that writes a state."""
        deps, where = Dependences(self.schedule.program), None
        for node in self.schedule.program.nodes():
            if is_call(node) and any(
                e.write and related(e.state, path) for e in deps.effects(node)
            ):
                where = facts.get(node).origin.where or where
        return where


def _why_not(schedule: Schedule) -> str:
    for node in schedule.program.nodes():
        if not is_call(node):
            continue
        op = op_of(node)
        where = facts.get(node).origin.where
        if op.signature.reads is None or op.signature.writes is None:
            return f"`{op.name}` may touch anything ({where})"
        if HOST not in op.signature.writes or op.kind == "step":
            continue  # a simulator's step is taken to have no effect outside of the simulator
        if not _only_prints(op.attributes.get("stmts", ())):
            return f"`{op.name}` writes to the outside ({where}), and would do so twice"
    return ""


def _only_prints(statements: Any) -> bool:
    calls = [n.func for s in statements for n in ast.walk(s) if isinstance(n, ast.Call)]
    names = {getattr(f, "id", None) or getattr(f, "attr", "") for f in calls}
    return bool(names) and names <= _HARMLESS


# -- calls

_Call = tuple[str, int, int]  # a function, and digests of what it was given and of what it gave


def _noting(calls: list[_Call]) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = _digest(args)
            made = function(*args, **kwargs)
            calls.append((name, given, _digest(made)))
            return made

        call.__name__ = getattr(function, "__name__", name)
        return call

    return noted


def _first(expected: list[_Call], found: list[_Call]) -> tuple[str, int]:
    """The first call that gave something that no call gave in the other run, and its number; or
    else the first that was given something."""
    for pick in ((0, 2), (0, 1)):
        left = Counter(tuple(c[k] for k in pick) for c in found)
        numbers: Counter[str] = Counter()
        for call in expected:
            key = tuple(call[k] for k in pick)
            left[key] -= 1
            if left[key] < 0:
                return call[0], numbers[call[0]]
            numbers[call[0]] += 1
    return "", 0


def _digest(value: Any) -> int:
    found = 0
    for part in _parts(value):
        found = zlib.crc32(part, found)
    return found


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        with contextlib.suppress(RuntimeError):
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        yield b"" if value.dtype == object else value.tobytes()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _parts(each)
    elif isinstance(value, bool | int | float | str):
        yield repr(value).encode()
