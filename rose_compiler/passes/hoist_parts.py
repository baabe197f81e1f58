"""What a traced operation computes alike on every trip, in front of the loop.

A policy's graph holds what it makes of an instruction and its parameters beside what it makes of an
observation. The first part becomes an operation of its own before the loop; the rest is handed its
values, as rows of the batch where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import related
from rose_compiler.ir.invariant import Parts, cut, overtaken
from rose_compiler.ir.ops import STATE, Op
from rose_compiler.ir.program import LoopView, Value, is_call, op_of, placeholders
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import nodes_in
from rose_compiler.ir.sizes import hands_over
from rose_compiler.passes.fuse_graphs import calls
from rose_compiler.passes.graphs import named_axes, part, retire, told_by

#: Calls of torch that a part is worth an operation of its own for, or else elements of the largest
#: tensor that it reads or makes: the cast of a weight is one call.
LEAST_CALLS, LEAST_ELEMENTS = 4, 1 << 16


def candidate(node: fx.Node) -> bool:
    """Whether a node calls a traced graph."""
    return is_call(node) and op_of(node).kind == "graph" and op_of(node).body is not None


def find(
    loop: LoopView, node: fx.Node, deps: Dependences, *, raising: bool = True
) -> Parts | Blocker | None:
    """The part of a traced operation that is worth being done once in front of the loop, or why
    it varies; ``None`` where there is none. Without ``raising`` no call in it raises for values."""
    outside = _outside(loop, node)
    found = _worth(node, outside, raising)
    if found is None:
        return None
    if records(node):
        return Blocker(
            "grad-graph",
            f"{title(node)} records gradients: one graph for all trips could be gone back through "
            "once, and would add gradients up in another order",
            "`with torch.no_grad():` around it, if no gradient is wanted",
        )
    writers = {name: _writer(loop, value, deps) for name, value in outside.items()}
    kept = {name: value for name, value in outside.items() if writers[name] is None}
    if len(kept) < len(outside):
        found = _worth(node, kept, raising)
    if found is not None:
        return found
    first = next(w for w in writers.values() if w is not None)
    return Blocker(
        "reads-loop-state",
        f"parts of {title(node)} that use nothing of the trip read what {title(first)} writes in "
        f"{loop.label}",
        where=tuple(w for w in (place(node), place(first)) if w),
    )


def put_in_loop(node: fx.Node, parts: Parts, rewrite: Rewriter) -> fx.Node:
    """A call of the part in front of the operation, in the loop still."""
    op, given = op_of(node), _given(node)
    name = f"{op.name}_fixed"
    values: list[None] = [None] * len(parts.passed)
    made = part(rewrite.program, op, parts.fixed, name, named_axes(node), results=values)
    # it makes values in the middle of what was captured, once for all its calls
    del made.attributes["part_of"]
    made.attributes["once"] = True
    args = [given[n] for n in parts.fixed_inputs]
    call = rewrite.call(made, *args, before=node, like=node, name=f"{node.name}_fixed")
    if len(parts.passed) == 1:
        rewrite.set_facts(call, spec=facts.get(parts.passed[0]).spec)
    return call


def overtakes(node: fx.Node, parts: Parts) -> Blocker | None:
    """Why an error of the part would come before what the operation does first."""
    body = op_of(node).body
    if body is None or not overtaken(body, parts):
        return None
    return Blocker(
        "may-not-run",
        f"an error in the part of {title(node)} that is the same on every trip would come before "
        "what the operation draws or checks in front of it",
        where=tuple(w for w in (place(node),) if w),
    )


def take_back(call: fx.Node, rewrite: Rewriter) -> None:
    """Undo :func:`put_in_loop`."""
    retire(rewrite.program, call)
    rewrite.erase(call)


def hand_over(node: fx.Node, call: fx.Node, parts: Parts, rewrite: Rewriter) -> None:
    """Let the operation take the values of its part, which stands in front of the loop."""
    op, given, axes = op_of(node), _given(node), named_axes(node)
    values = [call] if len(parts.passed) == 1 else []
    for k, inner in enumerate(parts.passed if not values else ()):
        picked = rewrite.item(call, k, f"{call.name}_{inner.name}")
        rewrite.set_facts(picked, spec=facts.get(inner).spec)
        values.append(picked)
    given.update({n.name: v for n, v in zip(parts.passed, values, strict=True)})
    retire(rewrite.program, node)
    midway = told_by(parts.passed) if hands_over(op_of(call)) else None
    rest = _rest(rewrite, op, parts, axes, midway)
    rewrite.retarget(node, rest, *(given[n] for n in parts.rest_inputs))


def _rest(
    rewrite: Rewriter,
    op: Op,
    parts: Parts,
    axes: Mapping[str, int],
    midway: tuple[str, int | None] | None,
) -> Op:
    """The operation without its part. Passed values that are as long as the batch are rows of it,
    if that is proven to keep rows apart."""
    assert op.body is not None
    passed = {n.name: None for n in parts.passed}
    rows = {
        spec.shape[axes[n.name]]
        for n in placeholders(op.body.graph)
        if n.name in axes and (spec := facts.get(n).spec) is not None and spec.shape
    }
    long = {
        n.name: 0
        for n in parts.passed
        if (spec := facts.get(n).spec) is not None and spec.shape and spec.shape[0] in rows
    }
    told = op.signature.separable()
    # rows of inputs that are the same for all of them stay apart without what those make
    kept = {} if set(parts.fixed_inputs) & set(axes) else told
    for given, known in (({**axes, **long}, {}), (axes, {}), (axes, kept)):
        results = {name: axis for name, axis in known.items() if name.startswith("return.")}
        made = part(
            rewrite.program, op, parts.rest, op.name, given, results, made=passed, told=midway
        )
        if made.signature.batch is not None:
            return made
    return part(
        rewrite.program, op, parts.rest, op.name, {**axes, **long}, made=passed, told=midway
    )


def _given(node: fx.Node) -> dict[str, Value]:
    """What a traced operation is called with, by the names of its body's placeholders."""
    body = op_of(node).body
    assert body is not None
    return dict(zip((n.name for n in placeholders(body.graph)), node.args, strict=True))


def _outside(loop: LoopView, node: fx.Node) -> dict[str, Value]:
    """The arguments that no trip makes."""
    captured = set(loop.captured_params)
    return {
        name: value
        for name, value in _given(node).items()
        if all(n in captured or is_call(n, STATE) for n in nodes_in(value))
    }


def _worth(node: fx.Node, outside: Mapping[str, Value], raising: bool) -> Parts | None:
    body = op_of(node).body
    assert body is not None
    found = cut(body, outside, raising=raising)
    if found is None or (found.calls < LEAST_CALLS and found.elements < LEAST_ELEMENTS):
        return None
    return found


def _writer(loop: LoopView, value: Value, deps: Dependences) -> fx.Node | None:
    """An operation of the loop that writes what an argument is or lies in, if there is one."""
    names: set[str] = set()
    for node in nodes_in(value):
        if state := deps.scope.state(node):
            names.add(state)
            continue
        names |= {*deps.scope.aliases(node), *(f"%{d.name}" for d in deps.scope.definers(node))}
    for other in loop.graph.nodes:
        for effect in deps.effects(other):
            if effect.write and any(related(effect.state, n) for n in names):
                return other
    return None


def told(loop: LoopView, node: fx.Node, call: fx.Node) -> str:
    """What is moved, in words."""
    mine, whole = (calls(op_of(n)) for n in (call, node))
    return (
        f"{mine} of {whole} torch calls in {title(node)} are the same on every trip of "
        f"{loop.label}: `{op_of(call).name}` makes them once, in front of it"
    )
