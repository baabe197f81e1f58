"""Checks of generated programs in the IR: passes, orders of lanes, emitted code on slow lanes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.base.decision import Decision
from rose_compiler.ir import interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.program import Program
from rose_compiler.ir.verify import verify
from rose_compiler.passes.accumulate import Accumulate
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.interleave import Interleave
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import PassManager, check_round_trip
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.passes.streams import Streams
from rose_compiler.passes.unswitch import Unswitch
from rose_compiler.runtime.recording import RaceFound, RecordingStreams
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing import grouping, pipelining, slots
from rose_compiler.testing import references as referring
from rose_compiler.testing import rollouts as stepping
from rose_compiler.testing import updates as updating
from rose_compiler.testing.capturing import shuffle
from rose_compiler.testing.features import features_of
from rose_compiler.testing.lanes import STREAMS, execute, schedule_at_random
from rose_compiler.testing.programs import Generated, programs
from rose_compiler.testing.result import Result

#: Schedules that generated programs are put through.
DECISIONS = st.builds(
    Decision,
    groups=st.integers(0, 4),
    late=st.sampled_from(["shadow", "shadow", "inline"]),
    defer=st.booleans(),
    lanes=st.sampled_from(["native", "native", "thread", "inline"]),
    fuse=st.booleans(),
)
#: Seeds of orders and of slow lanes.
SEEDS = st.integers(0, 1 << 16)
#: What keeps the trips of a loop from overlapping: half of the loop nests are drawn without.
STOPPING = frozenset({"exit", "opaque", "unbound", "while"})
_ALONE = [  # one is told which loops, the other has a kind of its own
    (one,) for one in PIPELINE if one.name not in ("pipeline_loops", "streams")
]
#: The pipeline, or one of its passes alone, each of these as often as all others together.
PASSES = st.one_of(st.just(PIPELINE), st.sampled_from(_ALONE))
#: The pass alone, as it leaves program order, and in front of what makes use of it.
UNSWITCHING: tuple[tuple[Pass, ...], ...] = (PIPELINE, (Unswitch(), LateWork()), (Unswitch(),))
INTERLEAVING: tuple[tuple[Pass, ...], ...] = (PIPELINE, (Interleave(), LateWork()), (Interleave(),))
#: The pipeline, with streams for all that may have one.
ON_STREAMS = tuple(Streams(worth=1) if isinstance(one, Streams) else one for one in PIPELINE)
_DRAWN = st.one_of(programs(), programs(without=STOPPING, size=40))


def nests(data: Any, result: Result, folder: Path) -> None:
    """Loop nests with effects of every kind, through the pipeline or one pass: in program order,
    by random orders of lanes, and in another order that the dependences allow."""
    generated: Generated = data.draw(_DRAWN)
    decision, passes, number = data.draw(DECISIONS), data.draw(PASSES), data.draw(SEEDS)
    before = generated.run_and_snapshot()
    result.features.update(features_of(generated.program))
    result.features["raises"] += bool(before.raised)
    result.shown = dump(generated.program)
    program = generated.clone(result.shown)
    context = PassContext(options=decision, asynchronous=frozenset({"sim"}))
    verify = 2 if len(passes) == 1 else 1  # what a pass alone leaves, as text and back, too
    result.count(PassManager(passes, verify=verify).run(program, context))
    assert generated.run_and_snapshot(program) == before, "program order differs"
    if before.raised:
        return
    found = generated.observe(lambda o: slots.run(program, generated.args, o, seed=number))
    assert found == before, f"order {number} of the lanes differs"
    result.rewrites["moves"] += shuffle(program, random.Random(number))
    assert generated.run_and_snapshot(program) == before, f"legal order {number} differs"


def lanes(data: Any, result: Result, folder: Path) -> None:
    """Loop nests in random schedules: emitted, and run on threads that are slow at random."""
    generated: Generated = data.draw(_DRAWN)
    number = data.draw(SEEDS)
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


def rollouts(data: Any, result: Result, folder: Path) -> None:
    """Rollouts over sharded simulators: tiled, deferred and moved into the simulator's shadow; run
    by the reference executor, by random orders of lanes and as emitted, on slow lanes."""
    rollout: stepping.Rollout = data.draw(stepping.rollouts())
    context = PassContext(
        options=data.draw(DECISIONS),
        asynchronous=frozenset({"envs"}),
        shards={"envs": rollout.shards},
    )
    _everywhere(rollout.run, rollout.program(), PIPELINE, context, data.draw(SEEDS), result)


def references(data: Any, result: Result, folder: Path) -> None:
    """Rollouts with a loop behind them that looks at what was collected, and may go into the loop
    that collects: run as rollouts are."""
    rollout: stepping.Rollout = data.draw(referring.references())
    late = data.draw(st.sampled_from(("shadow",) * 3 + ("inline",)))
    context = PassContext(
        options=replace(data.draw(DECISIONS), late=late, accumulate=True),
        asynchronous=frozenset({"envs"}),
        shards={"envs": rollout.shards},
    )
    passes = data.draw(st.sampled_from(INTERLEAVING))
    _everywhere(rollout.run, rollout.program(), passes, context, data.draw(SEEDS), result)


def pipelines(data: Any, result: Result, folder: Path) -> None:
    """Loop nests and rollouts whose loops are pipelined as if their operations took random times:
    by random orders of lanes and as emitted, on slow lanes."""
    number, lanes = data.draw(SEEDS), data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):
        rollout: stepping.Rollout = data.draw(stepping.rollouts())
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


def updates(data: Any, result: Result, folder: Path) -> None:
    """Trainings of an actor on some trips only, through the pipeline or what tests the trip's
    condition early: run as rollouts are."""
    update: updating.Update = data.draw(updating.updates())
    late = data.draw(st.sampled_from(("shadow",) * 7 + ("inline",)))
    decision = replace(data.draw(DECISIONS), late=late)
    context = PassContext(options=decision, asynchronous=frozenset({"envs"}))
    passes = data.draw(st.sampled_from(UNSWITCHING))
    _everywhere(update.run, update.program(), passes, context, data.draw(SEEDS), result)


def groups(data: Any, result: Result, folder: Path) -> None:
    """Trainings that add up a gradient over groups, which is done while these are collected: run as
    rollouts are."""
    grouped: grouping.Grouped = data.draw(grouping.groups())
    decision = replace(data.draw(DECISIONS), accumulate=True, overlap=data.draw(st.booleans()))
    context = PassContext(options=decision)
    passes = data.draw(st.sampled_from((PIPELINE, (Accumulate(),))))
    _everywhere(grouped.run, grouped.program(), passes, context, data.draw(SEEDS), result)


def _everywhere(
    seen: Callable[[Callable[..., Any], Program], Any],
    program: Program,
    passes: tuple[Pass, ...],
    context: PassContext,
    number: int,
    result: Result,
) -> None:
    """A program before and after passes, by each executor. ``seen(run, program)`` is all that can
    be seen after ``run(program, values, objects)`` on fresh objects."""
    result.shown = dump(program)
    result.features.update(features_of(program))
    before = seen(interp.run, program)
    result.count(PassManager(passes).run(program, context))
    check_round_trip(program)
    assert seen(interp.run, program) == before, "program order differs"

    def by_slots(p: Any, values: Any, objects: Any) -> Any:
        return slots.run(p, values, objects, seed=number)

    assert seen(by_slots, program) == before, f"order {number} of the lanes differs"
    with contextlib.closing(SlowRuntime(number)) as runtime:

        def emitted(p: Any, values: Any, objects: Any) -> Any:
            return execute(p, values, objects, runtime)

        assert seen(emitted, program) == before, f"slow lanes ({number}) differ"
        result.rewrites["lanes"] += len(runtime._lanes)


def streams(data: Any, result: Result, folder: Path) -> None:
    """Loop nests and rollouts whose work is queued on streams, by the passes or at random: by
    random orders of lanes, and as emitted, on streams that find a missing wait and memory that is
    let go too early."""
    number = data.draw(SEEDS)
    context = PassContext(
        options=replace(data.draw(DECISIONS), streams=True),
        device="virtual:h200",
        asynchronous=frozenset({"envs", "sim"}),
    )
    if data.draw(st.integers(0, 3)) == 0:
        rollout: stepping.Rollout = data.draw(stepping.rollouts())
        program = rollout.program()
        result.shown = dump(program)
        result.features.update(features_of(program))
        before: Any = rollout.run(interp.run, program)
        context = replace(context, shards={"envs": rollout.shards})
        result.count(PassManager(ON_STREAMS).run(program, context))
        _on_streams(lambda run: rollout.run(run, program), before, number, result)
        return
    generated: Generated = data.draw(_DRAWN)
    result.shown = dump(generated.program)
    result.features.update(features_of(generated.program))
    before = generated.run_and_snapshot()
    program = generated.clone(result.shown)
    if data.draw(st.booleans()):
        schedule_at_random(program, number, STREAMS)
        result.shown = dump(program)
        verify(program)
    else:
        passes = data.draw(st.sampled_from([(Streams(worth=1),), ON_STREAMS]))
        result.count(PassManager(passes, verify=1).run(program, context))
    if before.raised:
        return

    def run(executor: Callable[..., Any]) -> Any:
        return generated.observe(lambda objects: executor(program, generated.args, objects))

    _on_streams(run, before, number, result)


def _on_streams(
    seen: Callable[[Callable[..., Any]], Any], before: Any, number: int, result: Result
) -> None:
    """A scheduled program by random orders of its lanes, and emitted, on recording streams."""

    def by_slots(p: Any, values: Any, objects: Any) -> Any:
        return slots.run(p, values, objects, seed=number)

    assert seen(by_slots) == before, f"order {number} of the lanes differs"
    recording = RecordingStreams()
    with contextlib.closing(Runtime(streams=recording)) as runtime:

        def emitted(p: Any, values: Any, objects: Any) -> Any:
            with recording:
                return execute(p, values, objects, runtime)

        assert seen(emitted) == before, "on streams it differs"
        own = [lane for name, lane in runtime._lanes.items() if name.startswith("stream:")]
        result.rewrites["lanes"] += len(own)
        with recording:  # as the next run would, which is given the memory that was let go
            torch.ones(1)
            for lane in own:
                lane.submit(0, torch.ones, 1)
    unordered(recording)


def unordered(recording: RecordingStreams) -> None:
    """Raise ``AssertionError`` for an access to memory that nothing orders, as of a difference."""
    try:
        recording.check()
    except RaceFound as race:
        raise AssertionError(str(race)) from None
