"""What holds an operation at its place: the test of legality of the rewriter's own motions."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.edges import Edge
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import is_call


def crossed(deps: Dependences, node: fx.Node, anchor: fx.Node, *, behind: bool) -> Edge | None:
    """A dependence that putting ``node`` before (or ``behind``) ``anchor`` would turn round."""
    order = {n: k for k, n in enumerate(node.graph.nodes)}
    here = order[node]
    # the place between two nodes: half a step before or behind the anchor
    there = order[anchor] + (0.5 if behind else -0.5)
    for edge in deps.edges(node.graph):
        if not edge.applies(0):
            continue
        if edge.src is node and here < order[edge.dst] < there:
            return edge
        if edge.dst is node and there < order[edge.src] < here:
            return edge
    return None


def pinned(deps: Dependences, node: fx.Node) -> tuple[fx.Node, str] | None:
    """What keeps an operation inside its loop beside its arguments, and how, if anything does."""
    for edge in deps.edges(node.graph):
        if node in (edge.src, edge.dst) and edge.kind in ("flow", "anti", "output"):
            return (edge.dst if edge.src is node else edge.src), str(edge)
    for effect in deps.effects(node):
        if effect.write:
            return node, str(effect)
    if facts.get(node).state and not is_call(node, STATE):
        return node, f"a new instance of {facts.get(node).state} a trip"
    return None
