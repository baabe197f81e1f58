"""Copies of what a simulator lends: its buffers are overwritten by the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.deps import Edge
from rose_compiler.ir.effects import related
from rose_compiler.ir.ops import SNAPSHOT
from rose_compiler.ir.program import LoopView, is_state, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import OUTPUTS, Scope
from rose_compiler.passes.recurrence import step_position


def borrowed_edge(edge: Edge, steps: Sequence[fx.Node]) -> bool:
    """Whether a dependence is only there because a value lies in a simulator's output buffers."""
    return edge.dst in steps and edge.state is not None and edge.state.endswith(f".{OUTPUTS}")


def lent_by(scope: Scope, step: fx.Node) -> str:
    """The state of the output buffers of the simulator that a step advances."""
    env = step.args[step_position(op_of(step), "env")]
    assert isinstance(env, fx.Node)
    return f"{scope.state(env)}.{OUTPUTS}"


def own(loop: LoopView, steps: Sequence[fx.Node], rewrite: Rewriter) -> bool:
    """Copy what the steps of a loop lend, at the steps and in front of the loop.

    Returns whether anything was copied. Behind it no value of the loop lies in those buffers.
    """
    scope = rewrite.deps.scope
    lent = {lent_by(scope, s) for s in steps}
    lent |= {a for s in steps for a in scope.aliases(s) if a.endswith(f".{OUTPUTS}")}

    def borrowed(node: fx.Node) -> bool:
        return any(related(a, b) for a in scope.aliases(node) for b in lent)

    inits = [
        k
        for k, (param, init) in enumerate(zip(loop.carried, loop.carried_init, strict=True))
        if isinstance(init, fx.Node) and not is_state(param) and borrowed(init)
    ]
    below = [
        n
        for n in (*loop.carried, *loop.graph.nodes)
        if not is_state(n) and n not in steps and borrowed(n)
    ]
    if not below and not inits:
        return False
    for step in steps:
        copy = rewrite.call(SNAPSHOT, step, after=step, like=step, spec=facts.get(step).spec)
        rewrite.replace(step, copy)
    for k in inits:
        init = loop.carried_init[k]
        copy = rewrite.call(SNAPSHOT, init, before=loop.node, like=init, spec=facts.get(init).spec)
        rewrite.replace(init, copy, users=[loop.node])
    for node in below:
        kept = tuple(a for a in facts.get(node).alias if not any(related(a, b) for b in lent))
        rewrite.set_facts(node, alias=kept, borrowed=False)
    return True
