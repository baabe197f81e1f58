"""The order of operations that record gradients, where every bit counts.

Backward goes through recorded operations in the reverse order of their forward runs, so that order
decides how the gradients of one parameter add up. No state stands for it among the effects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.deps import Edge
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import BranchView, LoopView, is_call


def records(spec: Spec | None) -> bool:
    """Whether a value, or a part of it, has a graph to go back through."""
    return spec is not None and (spec.requires_grad or any(map(records, spec.items)))


def order_of_gradients(nodes: Sequence[fx.Node]) -> list[Edge]:
    """Edges that keep the recording ones of a body's nodes in program order, over all trips."""
    chain = [n for n in nodes if _recording(n)]
    if len(chain) < 2:
        return []
    edges = [Edge(a, b, "control") for a, b in itertools.pairwise(chain)]
    return [*edges, Edge(chain[-1], chain[0], "control", None, 1, 1)]


def _recording(node: fx.Node) -> bool:
    if not is_call(node):
        return False
    if is_call(node, LOOP):
        return any(map(_recording, LoopView(node).graph.nodes))
    if is_call(node, BRANCH):
        arms = BranchView(node).then, BranchView(node).orelse
        return any(_recording(n) for arm in arms for n in arm.graph.nodes)
    return records(facts.get(node).spec)
