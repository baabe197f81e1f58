"""Loops pipelined as if their operations took random times."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rose_compiler.base.decision import Decision, Pipelined
from rose_compiler.codegen.schedule import acts
from rose_compiler.ir import facts, interp
from rose_compiler.ir.keys import loops_by_key
from rose_compiler.ir.program import Program
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.passes.pipeline_loops import PipelineLoops
from rose_compiler.runtime.slow import SlowRuntime
from rose_compiler.testing import slots
from rose_compiler.testing.lanes import execute
from rose_compiler.testing.programs import Generated
from rose_compiler.testing.rollouts import Rollout

#: What is run in front of pipeline_loops, it, and what is run behind it.
_AT = next(k for k, one in enumerate(PIPELINE) if isinstance(one, PipelineLoops))
_BEFORE, _FROM = PIPELINE[:_AT], PIPELINE[_AT:]
#: Microseconds of an operation: nothing, shorter than handing it over, and longer.
_TIMES = (0, 5, 100, 400, 1500)

Executor = Callable[[Program, Any, dict[str, Any]], Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a program: its loops that were pipelined, how many trips the deepest of them
    spreads over beyond its own, the operations on threads, and the lanes that were used."""

    loops: int
    depth: int
    away: int
    lanes: int


def lengths_at_random(program: Program, seed: int, lanes: int) -> tuple[Pipelined, ...]:
    """All loops of a program to be pipelined, as if their operations took random times."""
    draw = random.Random(seed)
    return tuple(
        Pipelined(
            key,
            lanes,
            tuple((n.name, draw.choice(_TIMES)) for n in loop.graph.nodes if acts(n)),
        )
        for key, loop in loops_by_key(program).items()
    )


def check_nest(generated: Generated, seed: int, lanes: int) -> Outcome:
    """Pipeline a loop nest and nothing else; compare it with program order.

    Raises:
        AssertionError: where it differs: run by the reference executor, by random orders of its
            lanes, or as emitted, on threads that are slow at random.
    """
    before = generated.run_and_snapshot()
    program = generated.clone()
    options = Decision(pipeline=lengths_at_random(program, seed, lanes))
    history = PassManager([PipelineLoops()]).run(program, PassContext(options=options))

    def run(executor: Executor) -> Any:
        return generated.observe(lambda objects: executor(program, generated.args, objects))

    raised = bool(before.raised)
    return _compare(program, before, run, seed, history.rewrites, in_order_only=raised)


def check_rollout(rollout: Rollout, decision: Decision, seed: int, lanes: int) -> Outcome:
    """The same for a rollout, behind the passes that tile, defer and move its late work."""
    program = rollout.program()
    before = rollout.run(interp.run, program)
    context = PassContext(
        options=decision, asynchronous=frozenset({"envs"}), shards={"envs": rollout.shards}
    )
    PassManager(_BEFORE).run(program, context)
    options = replace(decision, pipeline=lengths_at_random(program, seed, lanes))
    history = PassManager(_FROM).run(program, replace(context, options=options))
    return _compare(
        program, before, lambda executor: rollout.run(executor, program), seed, history.rewrites
    )


def _compare(
    program: Program,
    before: Any,
    run: Callable[[Executor], Any],
    seed: int,
    rewrites: dict[str, int],
    *,
    in_order_only: bool = False,
) -> Outcome:
    assert run(interp.run) == before, "program order differs"
    found = [s for n in program.nodes() if (s := facts.get(n).slot) is not None]
    depth = max((s.stage for s in found), default=0)
    away = sum(s.lane.startswith("thread:pipe") for s in found)
    used = 0
    if not in_order_only:
        by_slots = run(lambda p, args, objects: slots.run(p, args, objects, seed=seed))
        assert by_slots == before, f"order {seed} of the lanes differs"
        with contextlib.closing(SlowRuntime(seed)) as runtime:
            emitted = run(lambda p, args, objects: execute(p, args, objects, runtime))
            used = len(runtime._lanes)
        assert emitted == before, f"slow lanes ({seed}) differ"
    return Outcome(rewrites.get(PipelineLoops.name, 0), depth, away, used)
