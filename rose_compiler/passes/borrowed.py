"""Copies of what a simulator lends: its buffers are overwritten by the next step."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences, Edge, place, title
from rose_compiler.ir.effects import parse_entry, related
from rose_compiler.ir.ops import SNAPSHOT, STORES
from rose_compiler.ir.program import LoopView, is_call, is_state, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import OUTPUTS
from rose_compiler.ir.summary import Summary
from rose_compiler.passes.recurrence import step_position


def borrowed_edge(edge: Edge, steps: Sequence[fx.Node]) -> bool:
    """Whether a dependence is only there because a value lies in a simulator's output buffers."""
    return edge.dst in steps and edge.state is not None and edge.state.endswith(f".{OUTPUTS}")


def lent_by(scope: Summary, step: fx.Node) -> str:
    """The state of the output buffers of the simulator that a step advances."""
    env = step.args[step_position(op_of(step), "env")]
    assert isinstance(env, fx.Node)
    return f"{scope.state(env)}.{OUTPUTS}"


def why_not_copied(loop: LoopView, steps: Sequence[fx.Node], deps: Dependences) -> Blocker | None:
    """What would see the difference between a simulator's buffers and copies of them.

    A copy holds what the simulator wrote last. So nothing may write into the buffers from outside,
    and nothing may look, behind a step, at what an earlier one handed out.
    """
    scope = deps.scope
    lent = lent_states(scope, steps)
    order = {n: k for k, n in enumerate(loop.graph.nodes)}
    first = min(order[s] for s in steps)
    old = {p for p in loop.carried if _lies_in(scope, p, lent)}
    for node in loop.graph.nodes:
        if node.op != "call_function" or node in steps:
            continue
        where = tuple(w for w in (place(node),) if w)
        if kept := _kept_or_reached(node, scope, lent):
            return Blocker("borrowed-buffer", f"{title(node)} {kept}", where=where)
        for effect in deps.effects(node):
            if effect.write and any(related(effect.state, s) for s in lent):
                return Blocker(
                    "borrowed-buffer", f"{title(node)} writes {effect.state}", where=where
                )
        if old.isdisjoint(node.all_input_nodes):
            continue
        if order[node] > first:
            return Blocker(
                "borrowed-buffer",
                f"{title(node)} looks at what an earlier step handed out, which "
                f"{title(steps[0])} has overwritten by then",
                where=where,
            )
        if _lies_in(scope, node, lent):
            old.add(node)
    if any(n in old for n in loop.carried_next):
        return Blocker(
            "borrowed-buffer", f"{loop.label} keeps what a step handed out for more than one trip"
        )
    return None


def _kept_or_reached(node: fx.Node, scope: Summary, lent: set[str]) -> str:
    """What an operation does by way of an object that goes on holding a buffer; empty if nothing:
    a copy in the buffer's place would not change when the simulator writes it."""
    if not is_call(node):
        return ""
    op = op_of(node)
    args = dict(zip(op.signature.params, node.args, strict=False))
    for param in op.attributes.get("retains", ()):
        value = args.get(param)
        single = STORES in op.attributes
        if isinstance(value, fx.Node) and not single and _lies_in(scope, value, lent):
            return f"puts what lies in {min(lent)} where it stays"
    for text in op.signature.reads or ():
        state = parse_entry(text).absolute
        if state is not None and any(related(state, s) for s in lent):
            return f"reads {state} by way of an object that holds it"
    return ""


def lent_states(scope: Summary, steps: Sequence[fx.Node]) -> set[str]:
    """The states of the buffers that these steps hand out."""
    lent = {lent_by(scope, s) for s in steps}
    return lent | {a for s in steps for a in scope.aliases(s) if a.endswith(f".{OUTPUTS}")}


def _lies_in(scope: Summary, node: fx.Node, lent: set[str]) -> bool:
    return any(related(a, b) for a in scope.aliases(node) for b in lent)


def lends(loop: LoopView, steps: Sequence[fx.Node], scope: Summary) -> bool:
    """Whether a value in the body lies in the buffers of a simulator stepped there."""
    lent = lent_states(scope, steps)
    return any(_lies_in(scope, n, lent) for n in loop.graph.nodes if not is_state(n))


def own(loop: LoopView, steps: Sequence[fx.Node], rewrite: Rewriter) -> bool:
    """Copy what the steps of a loop lend, at the steps and in front of the loop.

    Returns whether anything was copied. Behind it no value of the loop lies in those buffers.
    """
    scope = rewrite.deps.scope
    lent = lent_states(scope, steps)

    def borrowed(node: fx.Node) -> bool:
        return _lies_in(scope, node, lent)

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
    owned: list[str] = []
    for step in steps:
        copy = rewrite.call(SNAPSHOT, step, after=step, like=step, spec=facts.get(step).spec)
        rewrite.replace(step, copy)
        owned.append(f"%{copy.name}")
    for k in inits:
        init = loop.carried_init[k]
        copy = rewrite.call(SNAPSHOT, init, before=loop.node, like=init, spec=facts.get(init).spec)
        rewrite.replace(init, copy, users=[loop.node])
        owned.append(f"%{copy.name}")
    for node in below:
        # what shared the simulator's buffers shares the copies' memory now
        kept = [a for a in facts.get(node).alias if not any(related(a, b) for b in lent)]
        rewrite.set_facts(node, alias=tuple(dict.fromkeys([*kept, *owned])), borrowed=False)
    return True
