"""Checks of generated Python functions: captured or compiled, against the functions as written."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler import hosted as hosting_in
from rose_compiler.api import Compiled
from rose_compiler.api import compile as compile_
from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.losses import trace_losses
from rose_compiler.ir import interp
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.fuse import Fuse
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.runtime.recording import RecordingStreams
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing import aliasing, hosting
from rose_compiler.testing import losses as losing
from rose_compiler.testing import recurrences as recurring
from rose_compiler.testing.capturing import (
    Watched,
    assert_same,
    difference,
    first_trip,
    rebound,
    shuffle,
    values_of,
)
from rose_compiler.testing.check_programs import DECISIONS, ON_STREAMS, SEEDS, unordered
from rose_compiler.testing.lanes import execute
from rose_compiler.testing.result import Check, Result, module_of, start_generators, written

#: Legal orders that a captured function is run in.
ORDERS = 2
#: Calls of a function with a hosted component: the first one captures it.
HOSTED_CALLS = 4
#: Calls of a function whose losses are compiled.
LOSS_CALLS = 3
#: Relative difference that compiled losses may make, in float64: they are rounded otherwise.
LOSS_RTOL = 1e-7


def captured(source: ModuleType) -> Check:
    """Python functions, captured and run in program order and in random legal ones."""

    def check(data: Any, result: Result, folder: Path) -> None:
        module, make = module_of(data.draw(source.functions()), source, result, folder)
        watched = Watched(module.main)
        eager = assert_same(module.main, make, captured=watched)
        result.features["raises"] += eager.error is not None
        if eager.error is not None:
            return
        program = watched.refined()
        for number in range(ORDERS):
            result.rewrites["moves"] += shuffle(program, random.Random(number))
            start_generators()
            args = make()
            got = watched.again(*args)
            assert difference(eager.result, got) is None, f"order {number}"
            assert difference(eager.arguments, (args, {})) is None, f"order {number}"

    return check


def recurrences(data: Any, result: Result, folder: Path) -> None:
    """Recurrences over time, captured, through the pipeline, emitted and run."""
    number, shape = data.draw(SEEDS), data.draw(st.sampled_from(recurring.SHAPES))
    result.shown = recurring.Writer(number).source()
    fn = written(result.shown, result, folder).recurrence
    given = recurring.world(number, shape)
    eager = recurring.seen(fn(*given), given)
    old = recurring.world(number, shape)
    found = first_trip(fn, *old).captured
    program = found.program
    result.count(PassManager(PIPELINE).run(program, PassContext(numerics="bitwise")))

    def check(run: Callable[[dict[str, Any], dict[str, Any]], Any], how: str) -> None:
        new = recurring.world(number, shape)
        got = run(values_of(found, new, {}), rebound(program.objects, old, new))
        assert recurring.seen(got, new) == eager, f"{how} differs"

    check(lambda values, objects: interp.run(program, values, objects), "program order")
    with contextlib.closing(Runtime()) as runtime:
        check(lambda values, objects: execute(program, values, objects, runtime), "emitted code")


def trainings(data: Any, result: Result, folder: Path) -> None:
    """Whole trainings, compiled to a random schedule and called twice, against eager."""
    module, make = module_of(data.draw(aliasing.trainings()), aliasing, result, folder)
    chosen, number = folder / "decision.json", data.draw(SEEDS)
    # its simulator has no asynchronous step of its own
    decision = replace(data.draw(DECISIONS), lanes=data.draw(st.sampled_from(["thread", "inline"])))
    decision.save(chosen)
    fast = compile_(module.main, numerics="bitwise", tune=chosen)
    fast._runtime = SlowRuntime(number)
    try:
        eager, found = _trained(module.main, make), _trained(fast, make)
        _count(fast, result)
    finally:
        fast.close()
    result.features["raises"] += eager[3] != ""
    assert eager[3] == found[3], f"eager raised {eager[3]!r}, compiled {found[3]!r}"
    where = difference(eager, found)
    assert where is None, f"compiled differs from eager at {where}"


def streamed(data: Any, result: Result, folder: Path) -> None:
    """Whole trainings, compiled to a schedule whose work is on streams, on streams that find a
    missing wait and memory that is let go too early."""
    module, make = module_of(data.draw(aliasing.trainings()), aliasing, result, folder)
    decision = replace(data.draw(DECISIONS), lanes="inline", streams=True)
    decision.save(folder / "decision.json")
    fast = compile_(
        module.main,
        numerics="bitwise",
        tune=folder / "decision.json",
        backend="virtual:h200",
        passes=ON_STREAMS,
    )
    recording = RecordingStreams()
    fast._runtime = Runtime(streams=recording)
    try:
        eager = _trained(module.main, make)
        with recording:
            found = _trained(fast, make)
        _count(fast, result)
    finally:
        fast.close()
    result.features["raises"] += eager[3] != ""
    assert eager[3] == found[3], f"eager raised {eager[3]!r}, compiled {found[3]!r}"
    where = difference(eager, found)
    assert where is None, f"compiled differs from eager at {where}"
    if not eager[3]:
        unordered(recording)


def losses(data: Any, result: Result, folder: Path) -> None:
    """Losses, each one operation with its ``backward``: by the fuse pass alone in program order,
    and compiled with the whole pipeline, where what Inductor would compile runs as traced."""
    module, make = module_of(data.draw(losing.functions()), losing, result, folder)
    eager = _called(module.main, make, LOSS_CALLS)
    result.features["raises"] += eager[-1] != ""
    if not eager[-1]:
        _fused(module.main, make, result)
    decision = Decision(compile=True, fuse=data.draw(st.booleans()))
    decision.save(folder / "decision.json")
    fast = compile_(module.main, tune=folder / "decision.json")
    try:
        with losing.as_traced():
            found = _called(fast, make, LOSS_CALLS)
        _count(fast, result)
        if fast._last is not None and fast._last.unit.recorded and not found[-1]:
            result.features["fused"] += "rt.gradients(" in fast.source
    finally:
        fast.close()
    assert eager[-1] == found[-1], f"eager raised {eager[-1]!r}, compiled {found[-1]!r}"
    where = difference(eager, found, rtol=LOSS_RTOL)
    assert where is None, f"compiled differs from eager at {where}"


def _fused(fn: Any, make: Callable[[], tuple[Any, ...]], result: Result) -> None:
    """The pass on losses alone: program order, by the reference executor."""
    eager = _called(fn, make, 1)
    watched = Watched(fn)
    start_generators()
    watched(*make())
    program = watched.refined()
    traced = trace_losses(program, watched.recorder.record)
    context = PassContext(options=Decision(compile=True), losses=traced)
    history = PassManager((Fuse(),), verify=2).run(program, context)
    result.features["fused alone"] += history.rewrites["fuse"] > 0
    result.features["blocked"] += any(isinstance(found, Blocker) for found in traced.values())
    found = _called(watched.again, make, 1)
    where = difference(eager, found, rtol=LOSS_RTOL)
    assert where is None, f"fused, it differs from eager at {where}"


def hosted(data: Any, result: Result, folder: Path) -> None:
    """Iterations that call a component in a thread of its own, called several times."""
    text = data.draw(hosting.functions())
    result.shown = text[text.index("def iteration") :]
    fn = written(text, result, folder).iteration
    Decision(hosted=data.draw(st.sampled_from((True, True, True, False)))).save(
        folder / "decision.json"
    )
    fast = compile_(fn, numerics="bitwise", tune=folder / "decision.json")
    found: list[list[Any]] = [[], []]
    try:
        for states, step in zip(found, (fn, fast), strict=True):
            with hosting_in(hosting.Scorer, host="thread") as scorer:
                given = hosting.world(scorer)
                for it in range(HOSTED_CALLS):
                    step(it, *given)
                    states.append(hosting.seen(given))
        _count(fast, result)
    finally:
        fast.close()
    for it, (eager, got) in enumerate(zip(*found, strict=True)):
        where = difference(eager, got)
        assert where is None, f"call {it} differs from eager at {where}"


def _count(fast: Compiled, result: Result) -> None:
    """What passes did to a compiled function, if they had something to do."""
    if fast._last is not None and fast._last.unit.recorded:
        result.count(fast._schedule().history)


def _called(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], times: int) -> Any:
    """What some calls returned and left behind, and the error that ended them."""
    start_generators()
    arguments = make()
    results: list[Any] = []
    error = ""
    try:
        for _ in range(times):
            results.append(fn(*arguments))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    net, opt, *others = arguments
    gradients = [p.grad for p in net.parameters()]
    # torch notes on an optimizer itself that it once stepped by a fused kernel
    return results, net, opt.state_dict(), others, gradients, torch.get_rng_state(), error


def _trained(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> Any:
    """How two calls ended, and what they left behind. An exception ends both."""
    start_generators()
    arguments = make()
    results: list[Any] = []
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            for _ in range(2):
                results.append(fn(*arguments))
        except Exception as error:
            return None, None, None, f"{type(error).__name__}: {error}"
    return results, arguments, torch.get_rng_state(), ""
