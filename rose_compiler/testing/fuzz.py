"""Random programs against the executors: what can be seen afterwards stays the same.

Each kind of program has a check that draws from hypothesis and raises ``AssertionError`` with what
differs. :func:`fuzz` runs one for many programs from one seed, and shrinks the first failure.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from rose_compiler.api import compile as compile_
from rose_compiler.base.decision import Decision
from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.ir.dump import dump
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager, check_round_trip
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.testing import aliasing, functions, slots
from rose_compiler.testing.capturing import assert_same, difference, first_trip, shuffle, values_of
from rose_compiler.testing.functions import load
from rose_compiler.testing.programs import Generated, programs
from rose_compiler.testing.rollouts import Rollout, rollouts

#: Schedules that generated programs are put through.
DECISIONS = st.builds(
    Decision,
    groups=st.integers(0, 4),
    late=st.sampled_from(["shadow", "shadow", "inline"]),
    defer=st.booleans(),
    lanes=st.sampled_from(["native", "native", "thread", "inline"]),
)
#: Legal orders that a captured function is run in.
ORDERS = 2


@dataclass
class Result:
    """What a run found. ``rewrites`` counts what passes did (``moves`` for reorderings), so that
    programs in which nothing could go wrong show. ``failure`` is the smallest one, as text."""

    kind: str
    programs: int = 0
    rewrites: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    shown: str = ""  # the program under check


Check = Callable[[Any, Result, Path], None]


def _count(history: History, result: Result) -> None:
    result.rewrites.update({name: n for name, n in history.rewrites.items() if n})


def _nests(data: Any, result: Result, folder: Path) -> None:
    """Loop nests with effects of every kind, through the pipeline, by random orders of lanes."""
    generated: Generated = data.draw(programs())
    decision = data.draw(DECISIONS)
    before = generated.run_and_snapshot()
    program = generated.clone()
    result.shown = dump(program)
    context = PassContext(options=decision, asynchronous=frozenset({"sim"}))
    _count(PassManager(PIPELINE, verify=1).run(program, context), result)
    assert generated.run_and_snapshot(program) == before, "program order differs"
    if before.raised:
        return
    number = data.draw(st.integers(0, 1 << 16))
    found = generated.observe(lambda o: slots.run(program, generated.args, o, seed=number))
    assert found == before, f"order {number} of the lanes differs"


def _rollouts(data: Any, result: Result, folder: Path) -> None:
    """Rollouts over sharded simulators: tiled, deferred and moved into the simulator's shadow."""
    rollout: Rollout = data.draw(rollouts())
    context = PassContext(
        options=data.draw(DECISIONS),
        asynchronous=frozenset({"envs"}),
        shards={"envs": rollout.shards},
    )
    program = rollout.program()
    result.shown = dump(program)
    before = rollout.run(interp.run, program)
    _count(PassManager(PIPELINE).run(program, context), result)
    check_round_trip(program)
    assert rollout.run(interp.run, program) == before, "program order differs"
    number = data.draw(st.integers(0, 1 << 16))

    def by_slots(p: Any, values: Any, objects: Any) -> Any:
        return slots.run(p, values, objects, seed=number)

    assert rollout.run(by_slots, program) == before, f"order {number} of the lanes differs"


def _captured(source: ModuleType) -> Check:
    """Python functions, captured and run in program order and in random legal ones."""

    def check(data: Any, result: Result, folder: Path) -> None:
        module, make = _module(data.draw(source.functions()), source, result, folder)
        eager = assert_same(module.main, make)
        if eager.error is not None:
            return
        _start()
        program = first_trip(module.main, *make()).captured.program
        for number in range(ORDERS):
            result.rewrites["moves"] += shuffle(program, random.Random(number))
            _start()
            args = make()
            found = capture(module.main, args, {})
            got = interp.run(program, values_of(found, args, {}), found.program.objects)
            assert difference(eager.result, got) is None, f"order {number}"
            assert difference(eager.arguments, (args, {})) is None, f"order {number}"

    return check


def _trainings(data: Any, result: Result, folder: Path) -> None:
    """Whole trainings, compiled and called twice, against eager."""
    module, make = _module(data.draw(aliasing.trainings()), aliasing, result, folder)
    fast = compile_(module.main, numerics="bitwise", tune=False)
    try:
        eager, found = _trained(module.main, make), _trained(fast, make)
        _count(fast.history, result)
    finally:
        fast.close()
    where = difference(eager, found)
    assert where is None, f"compiled differs from eager at {where}"


#: The checks by name.
KINDS: dict[str, Check] = {
    "nests": _nests,
    "rollouts": _rollouts,
    "functions": _captured(functions),
    "aliasing": _captured(aliasing),
    "trainings": _trainings,
}


def fuzz(kind: str, count: int, seed: int) -> Result:
    """Check ``count`` random programs of one kind, the same ones for the same seed.

    Raises ``KeyError`` for a kind that is not in :data:`KINDS`.
    """
    check, result = KINDS[kind], Result(kind)
    shrinking = False
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        @seeded(seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
        )
        @given(data=st.data())
        def run(data: Any) -> None:
            nonlocal shrinking
            if not shrinking:
                result.programs += 1
            try:
                check(data, result, Path(name))
            except Exception as error:
                shrinking = True
                # one place to be raised at: else each file of a generated module is another fault
                raise AssertionError(f"{type(error).__name__}: {error}\n{result.shown}") from None

        try:
            run()
        except Exception as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            result.failure = f"{error}\n{notes}".rstrip()
    return result


_NUMBER = itertools.count()


def _module(text: str, source: ModuleType, result: Result, folder: Path) -> tuple[ModuleType, Any]:
    result.shown = text[text.index("def main") :]
    module = load(text, folder / f"{result.kind}_{next(_NUMBER)}.py")
    return module, source.arguments(module)


def _start() -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (the global generator is compared)
    random.seed(7)


def _trained(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> Any:
    """How two calls ended, and what they left behind."""
    _start()
    arguments, results = make(), []
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):
            results.append(fn(*arguments))
    return results, arguments, torch.get_rng_state()
