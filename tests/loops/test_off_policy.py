"""Off-policy updates beside the simulator's step: every bit as eager, and both at the same time."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch.fx as fx

from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.passes.modulo import Modulo
from tests.loops import soft_q
from tests.loops.bits import differing
from tests.loops.envs import Reach
from tests.loops.harness import SHARDED, Script, compiled, eager, in_shards


class Watching(Reach):
    """Waits in its step until something is trained, and notes whether that happened. It looks at
    what the optimizer holds behind its back: observation would see the simulator reach for it."""

    learner: ClassVar[dict[Any, Any] | None] = None
    seen: ClassVar[list[bool]] = []

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.learner is not None:
            before, until = self.updates(), time.monotonic() + 0.25
            while self.updates() == before and time.monotonic() < until:
                time.sleep(0.0002)
            self.seen.append(self.updates() != before)
        return super().step(action)

    def updates(self) -> float:
        assert self.learner is not None
        states = self.learner
        return float(next(iter(states.values()))["step"]) if states else 0.0


def beside_steps(program: Program) -> tuple[set[str], str]:
    """What kinds of component the operations call that are issued while a step is on a lane, and
    the user's lines that they stand for."""
    deps, found, lines = Dependences(program), set(), []
    for graph in program.graphs():
        slots = {n: slot for n in graph.nodes if (slot := facts.get(n).slot) is not None}
        order = tuple(sorted(slots, key=lambda n: slots[n].order))
        edges = tuple(e for e in deps.edges(graph) if e.src in slots and e.dst in slots)
        modulo = Modulo(order, {n: slot.stage for n, slot in slots.items()}, edges)
        for step in (n for n, slot in slots.items() if slot.lane):
            for node in modulo.beside(step):
                found |= calls(node)
                lines += op_of(node).source if is_call(node) else ()
    return found, "\n".join(lines)


def calls(node: fx.Node) -> set[str]:
    """The kinds of component that a node calls, or the nodes in its bodies."""
    if is_call(node, LOOP) or is_call(node, BRANCH):
        return {kind for graph in bodies.graphs_of(node) for n in graph.nodes for kind in calls(n)}
    return set(op_of(node).attributes.get("calls", ())) if is_call(node) else set()


def trained(run: Any) -> tuple[set[str], str, list[bool]]:
    """Train as eager and compiled, and compare the bits: what is beside a step, and whether each
    step of the compiled run saw the critic being trained meanwhile: most do, but one that the
    machine begins late may come behind it."""

    def watched(compile: Any, vectorize: Any) -> Any:
        def compile_and_watch(fn: Any) -> Any:
            step = compile(fn)

            def call(learner: Any, *args: Any) -> Any:
                Watching.learner = learner.critic_opt.state if step is not fn else None
                return step(learner, *args)

            return call

        # one environment a shard: an update is there for one of them to see
        return run(compile_and_watch, lambda fns: vectorize(fns[:2]), Watching)

    script = Script("", watched, sharded=True)
    Watching.learner = None
    plain = eager(script, in_shards)
    Watching.seen.clear()
    try:
        with compiled(script, SHARDED) as found:
            assert differing(plain.bits, found.bits) == []
            (function,) = found.compiled
            return *beside_steps(function._schedule().program), list(Watching.seen)
    finally:
        Watching.learner = None


def test_an_update_on_older_transitions_runs_while_the_simulator_steps() -> None:
    kinds, _, seen = trained(soft_q.run_behind)
    assert {"backward", "optimizer", "module"} <= kinds
    assert any(seen)


def test_the_critic_is_trained_while_the_simulator_steps_where_the_actor_is_not() -> None:
    kinds, _, seen = trained(soft_q.run_delayed)
    assert {"backward", "optimizer", "module"} <= kinds
    assert any(seen)


def test_what_the_next_action_does_not_wait_for_runs_while_the_simulator_steps() -> None:
    """The critic is trained in front of the actor, the temperature behind it."""
    kinds, lines, _ = trained(soft_q.run_usual)
    assert {"backward", "optimizer"} <= kinds
    assert "alpha_opt.step()" in lines
    assert "critic_opt.step()" not in lines
    assert "actor_opt.step()" not in lines
