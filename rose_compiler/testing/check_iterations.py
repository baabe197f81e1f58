"""The check of generated trainings with a simulator, compiled to random schedules."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.api import compile as compile_
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import RoseError
from rose_compiler.passes.manager import History
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.testing import iterations as iterating
from rose_compiler.testing.capturing import difference
from rose_compiler.testing.check_programs import DECISIONS, SEEDS
from rose_compiler.testing.losses import as_traced
from rose_compiler.testing.result import Result, start_generators, written

#: Relative difference that compiled losses may make, in float64: they are rounded otherwise.
RTOL = 1e-7
#: Errors that may end a compiled training where eager's goes on: it says that it can't.
REFUSALS = ("sizes-changed",)
_NUMBER = itertools.count()


def iterations(data: Any, result: Result, folder: Path) -> None:
    """Trainings with what surrounds an actor and its update in practice, compiled to a random
    schedule and called several times, against eager."""
    text = data.draw(iterating.functions())
    result.shown = text[text.index("DTYPE = torch") :]
    module = written(text, result, folder)
    half = "autocast" in result.shown  # float64 is not cast, and what is can't be compared as close
    decision = replace(
        data.draw(DECISIONS),
        overlap=data.draw(st.sampled_from((True, True, False))),
        copies=data.draw(st.booleans()),
        accumulate=data.draw(st.sampled_from((True, True, False))),
        compile=not half and data.draw(st.booleans()),
    )
    number, calls = data.draw(SEEDS), iterating.calls(result.shown)
    decision = replace(decision, script=number % 2 == 1)
    eager = left(module.main, module, folder, calls)
    found, history = compiled(module, folder, calls, decision, number)
    if history is not None:
        result.count(history)
    if isinstance(found, RoseError) and found.code in REFUSALS:
        result.features["refused"] += 1
        return
    result.features["raises"] += isinstance(eager, Exception)
    where = differs(eager, found, decision)
    assert where is None, f"compiled ({decision}) differs from eager{where}"


def compiled(
    module: ModuleType, folder: Path, times: int, decision: Decision, number: int
) -> tuple[Any, History | None]:
    """As :func:`left`, of ``main`` compiled to a schedule, on slow lanes; and what passes did."""
    decision.save(saved := folder / f"decision{next(_NUMBER)}.json")
    numerics = "close" if decision.compile else "bitwise"
    fast = compile_(module.main, numerics=numerics, tune=saved)
    fast._runtime = SlowRuntime(number)
    history = None
    try:
        compiles = decision.compile or decision.script
        with as_traced() if compiles else contextlib.nullcontext():
            found = left(fast, module, folder, times)
        if fast._last is not None and fast._last.unit.recorded:
            history = fast._schedule().history
    finally:
        fast.close()
    return found, history


def left(fn: Callable[..., Any], module: ModuleType, folder: Path, times: int) -> Any:
    """What some calls returned, printed and left behind, or the error that ended them."""
    world = iterating.world(module, folder / f"files{next(_NUMBER)}")
    start_generators()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            results = [fn(world) for _ in range(times)]
        except Exception as error:
            return error
        finally:
            world.close()
    return results, printed.getvalue(), iterating.left(world)


def differs(eager: Any, found: Any, decision: Decision) -> str | None:
    """Where two trainings differ, None where they do not; ``decision`` is that of the second."""
    if isinstance(eager, Exception) or isinstance(found, Exception):
        return None if repr(eager) == repr(found) else f": {eager!r:.300} and {found!r:.3000}"
    if not decision.compile:
        return difference(eager, found)
    return difference(_loaded(eager), _loaded(found), rtol=RTOL)


def _loaded(left: Any) -> Any:
    """What a training has left, with what its files hold in their place: numbers are compared."""
    results, printed, (world, files, generator) = left
    held = {name: torch.load(io.BytesIO(data), weights_only=True) for name, data in files.items()}
    return results, printed, (world, held, generator)
