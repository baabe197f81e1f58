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
from dataclasses import dataclass, field, replace
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
from rose_compiler.ir.verify import verify
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager, check_round_trip
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing import aliasing, functions, pipelining, recurrences, slots
from rose_compiler.testing.capturing import assert_same, difference, first_trip, shuffle, values_of
from rose_compiler.testing.features import features_of, features_of_text
from rose_compiler.testing.functions import load
from rose_compiler.testing.lanes import execute, schedule_at_random
from rose_compiler.testing.programs import Generated, programs
from rose_compiler.testing.rollouts import Rollout, rollouts

#: Schedules that generated programs are put through.
DECISIONS = st.builds(
    Decision,
    groups=st.integers(0, 4),
    late=st.sampled_from(["shadow", "shadow", "inline"]),
    defer=st.booleans(),
    lanes=st.sampled_from(["native", "native", "thread", "inline"]),
    fuse=st.booleans(),
)
#: Legal orders that a captured function is run in.
ORDERS = 2
#: What keeps the trips of a loop from overlapping: half of the loop nests are drawn without.
STOPPING = frozenset({"exit", "opaque", "unbound", "while"})
#: The pipeline, or one of its passes alone, each of these as often as all others together.
_ALONE = [(one,) for one in PIPELINE if one.name != "pipeline_loops"]  # it is told which loops
PASSES = st.one_of(st.just(PIPELINE), st.sampled_from(_ALONE))
_DRAWN = st.one_of(programs(), programs(without=STOPPING, size=40))
_SEEDS = st.integers(0, 1 << 16)


@dataclass
class Result:
    """What a run found. ``rewrites`` counts what passes did (``moves`` for reorderings), so that
    programs in which nothing could go wrong show; ``features`` in how many programs each feature
    occurs. ``failure`` is the smallest one, as text."""

    kind: str
    programs: int = 0
    rewrites: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    shown: str = ""  # the program under check


Check = Callable[[Any, Result, Path], None]


def _count(history: History, result: Result) -> None:
    result.rewrites.update({name: n for name, n in history.rewrites.items() if n})


def _nests(data: Any, result: Result, folder: Path) -> None:
    """Loop nests with effects of every kind, through the pipeline or one pass: in program order,
    by random orders of lanes, and in another order that the dependences allow."""
    generated: Generated = data.draw(_DRAWN)
    decision, passes, number = data.draw(DECISIONS), data.draw(PASSES), data.draw(_SEEDS)
    before = generated.run_and_snapshot()
    result.features.update(features_of(generated.program))
    result.features["raises"] += bool(before.raised)
    program = generated.clone()
    result.shown = dump(program)
    context = PassContext(options=decision, asynchronous=frozenset({"sim"}))
    _count(PassManager(passes, verify=1).run(program, context), result)
    assert generated.run_and_snapshot(program) == before, "program order differs"
    if before.raised:
        return
    found = generated.observe(lambda o: slots.run(program, generated.args, o, seed=number))
    assert found == before, f"order {number} of the lanes differs"
    result.rewrites["moves"] += shuffle(program, random.Random(number))
    assert generated.run_and_snapshot(program) == before, f"legal order {number} differs"


def _lanes(data: Any, result: Result, folder: Path) -> None:
    """Loop nests in random schedules: emitted, and run on threads that are slow at random."""
    generated: Generated = data.draw(_DRAWN)
    number = data.draw(_SEEDS)
    result.features.update(features_of(generated.program))
    result.shown = dump(generated.program)
    before = generated.run_and_snapshot()
    result.rewrites["stages"] += schedule_at_random(generated.program, number)
    result.shown = dump(generated.program)
    verify(generated.program)
    with contextlib.closing(SlowRuntime(number)) as runtime:
        found = generated.observe(lambda o: execute(generated.program, generated.args, o, runtime))
        result.rewrites["lanes"] += len(runtime._lanes)
    if before.raised:  # how far others had come is told by the notes, and differs
        assert found.raised == before.raised, f"schedule {number} raises {found.raised!r}"
    else:
        assert found == before, f"schedule {number} differs on slow lanes"


def _rollouts(data: Any, result: Result, folder: Path) -> None:
    """Rollouts over sharded simulators: tiled, deferred and moved into the simulator's shadow; run
    by the reference executor, by random orders of lanes and as emitted, on slow lanes."""
    rollout: Rollout = data.draw(rollouts())
    context = PassContext(
        options=data.draw(DECISIONS),
        asynchronous=frozenset({"envs"}),
        shards={"envs": rollout.shards},
    )
    number = data.draw(_SEEDS)
    program = rollout.program()
    result.shown = dump(program)
    result.features.update(features_of(program))
    before = rollout.run(interp.run, program)
    _count(PassManager(PIPELINE).run(program, context), result)
    check_round_trip(program)
    assert rollout.run(interp.run, program) == before, "program order differs"

    def by_slots(p: Any, values: Any, objects: Any) -> Any:
        return slots.run(p, values, objects, seed=number)

    assert rollout.run(by_slots, program) == before, f"order {number} of the lanes differs"
    with contextlib.closing(SlowRuntime(number)) as runtime:

        def emitted(p: Any, values: Any, objects: Any) -> Any:
            return execute(p, values, objects, runtime)

        assert rollout.run(emitted, program) == before, f"slow lanes ({number}) differ"
        result.rewrites["lanes"] += len(runtime._lanes)


def _pipelines(data: Any, result: Result, folder: Path) -> None:
    """Loop nests and rollouts whose loops are pipelined as if their operations took random times:
    by random orders of lanes and as emitted, on slow lanes."""
    number, lanes = data.draw(_SEEDS), data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):
        rollout: Rollout = data.draw(rollouts())
        result.shown = dump(rollout.program())
        result.features.update(features_of(rollout.program()))
        outcome = pipelining.check_rollout(rollout, data.draw(DECISIONS), number, lanes)
    else:
        generated: Generated = data.draw(_DRAWN)
        result.shown = dump(generated.program)
        result.features.update(features_of(generated.program))
        outcome = pipelining.check_nest(generated, number, lanes)
    result.rewrites["pipeline_loops"] += outcome.loops
    result.rewrites["on threads"] += outcome.away
    result.rewrites["lanes"] += outcome.lanes
    result.rewrites["two stages"] += outcome.depth == 1
    result.rewrites["more stages"] += outcome.depth > 1


def _captured(source: ModuleType) -> Check:
    """Python functions, captured and run in program order and in random legal ones."""

    def check(data: Any, result: Result, folder: Path) -> None:
        module, make = _module(data.draw(source.functions()), source, result, folder)
        eager = assert_same(module.main, make)
        result.features["raises"] += eager.error is not None
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


def _recurrences(data: Any, result: Result, folder: Path) -> None:
    """Recurrences over time, captured, through the pipeline, emitted and run."""
    number, shape = data.draw(_SEEDS), data.draw(st.sampled_from(recurrences.SHAPES))
    text = recurrences.Writer(number).source()
    result.shown = text
    fn = load(text, folder / f"recurrence_{next(_NUMBER)}.py").recurrence
    result.features.update(features_of_text(text))
    given = recurrences.world(number, shape)
    eager = recurrences.seen(fn(*given), given)
    old = recurrences.world(number, shape)
    captured = first_trip(fn, *old).captured
    program = captured.program
    _count(PassManager(PIPELINE).run(program, PassContext(numerics="bitwise")), result)

    def check(run: Callable[[dict[str, Any], dict[str, Any]], Any], how: str) -> None:
        new = recurrences.world(number, shape)
        values = values_of(captured, new, {})
        found = run(values, recurrences.rebound(program.objects, old, new))
        assert recurrences.seen(found, new) == eager, f"{how} differs"

    check(lambda values, objects: interp.run(program, values, objects), "program order")
    with contextlib.closing(Runtime()) as runtime:
        check(lambda values, objects: execute(program, values, objects, runtime), "emitted code")


def _trainings(data: Any, result: Result, folder: Path) -> None:
    """Whole trainings, compiled to a random schedule and called twice, against eager."""
    module, make = _module(data.draw(aliasing.trainings()), aliasing, result, folder)
    chosen, number = folder / "decision.json", data.draw(_SEEDS)
    # its simulator has no asynchronous step of its own
    decision = replace(data.draw(DECISIONS), lanes=data.draw(st.sampled_from(["thread", "inline"])))
    decision.save(chosen)
    fast = compile_(module.main, numerics="bitwise", tune=chosen)
    fast._runtime = SlowRuntime(number)
    try:
        eager, found = _trained(module.main, make), _trained(fast, make)
        if fast._last is not None and fast._last.unit.recorded:
            _count(fast._schedule().history, result)
    finally:
        fast.close()
    result.features["raises"] += eager[3] != ""
    assert eager[3] == found[3], f"eager raised {eager[3]!r}, compiled {found[3]!r}"
    where = difference(eager, found)
    assert where is None, f"compiled differs from eager at {where}"


#: The checks by name.
KINDS: dict[str, Check] = {
    "nests": _nests,
    "lanes": _lanes,
    "rollouts": _rollouts,
    "pipelines": _pipelines,
    "functions": _captured(functions),
    "aliasing": _captured(aliasing),
    "recurrences": _recurrences,
    "trainings": _trainings,
}


def fuzz(kind: str, count: int, seed: int, *, shrink: bool = True) -> Result:
    """Check ``count`` random programs of one kind, the same ones for the same seed. The first that
    differs is made smaller with ``shrink``.

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
            phases=[Phase.generate, *[Phase.shrink] * shrink],
            report_multiple_bugs=False,
        )
        @given(data=st.data())
        def run(data: Any) -> None:
            nonlocal shrinking
            try:
                check(data, result, Path(name))
                # a program that hypothesis gives up half drawn has left by now
                result.programs += not shrinking
            except Exception as error:
                result.programs += not shrinking
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
    result.features.update(features_of_text(result.shown))
    module = load(text, folder / f"{result.kind}_{next(_NUMBER)}.py")
    return module, source.arguments(module)


def _start() -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (the global generator is compared)
    random.seed(7)


def _trained(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> Any:
    """How two calls ended, and what they left behind. An exception ends both."""
    _start()
    arguments = make()
    results: list[Any] = []
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            for _ in range(2):
                results.append(fn(*arguments))
        except Exception as error:
            return None, None, None, f"{type(error).__name__}: {error}"
    return results, arguments, torch.get_rng_state(), ""
