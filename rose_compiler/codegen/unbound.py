"""Which values may stand for a variable that nothing has assigned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.ops import BRANCH, FREEZE, LOOP, SNAPSHOT, UNBOUND
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    is_call,
    is_exit,
    is_item,
    output_node,
    placeholders,
)


def maybe_unbound(program: Program) -> frozenset[fx.Node]:
    """Every node that may have the value ``UNBOUND``: marked so, or fed by one that is."""
    found = {n for n in program.nodes() if facts.get(n).maybe_unbound}
    flows = list(_flows(program))
    while True:
        more = {
            dst
            for src, dst in flows
            if dst not in found and (src is UNBOUND or (isinstance(src, fx.Node) and src in found))
        }
        if not more:
            return frozenset(found)
        found |= more


def _flows(program: Program) -> Iterator[tuple[Any, fx.Node]]:
    """(source, destination) wherever a value is handed on unchanged."""
    for node in program.nodes():
        if is_call(node, LOOP):
            view = LoopView(node)
            handed = [view.carried_init, view.carried_next]
            handed += [tuple(n.args[1]) for n in exits_of(view.body)]  # type: ignore[arg-type]
            for k, param in enumerate(view.carried):
                for values in handed:
                    yield values[k], param
                    yield from ((values[k], pick) for pick in _picks(node, k))
            yield from zip(view.captured, view.captured_params, strict=True)
        elif is_call(node, BRANCH):
            branch = BranchView(node)
            for arm in (branch.then, branch.orelse):
                yield from zip(branch.captured, placeholders(arm.graph), strict=True)
                for k, value in enumerate(output_node(arm.graph).args[0]):  # type: ignore[arg-type]
                    yield from ((value, pick) for pick in _picks(node, k))
        elif is_call(node, SNAPSHOT) or is_call(node, FREEZE):
            yield node.args[0], node


def _picks(node: fx.Node, position: int) -> Iterator[fx.Node]:
    return (u for u in node.users if is_item(u) and u.args[1] == position)


def exits_of(body: fx.GraphModule) -> Iterator[fx.Node]:
    """The exits of one loop body, those in its branches included."""
    for node in body.graph.nodes:
        if is_exit(node):
            yield node
        elif is_call(node, BRANCH):
            view = BranchView(node)
            yield from exits_of(view.then)
            yield from exits_of(view.orelse)
