"""Nodes by the key under which they are profiled: the loops around them, and their name."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.base.marks import key_of
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.program import LoopView, Program, children, is_call


def nodes_by_key(program: Program) -> dict[str, fx.Node]:
    """Every call of a program by its key (:func:`rose_compiler.base.marks.key_of`).

    Bodies of branches lie in the loop that the branch lies in.
    """
    found: dict[str, fx.Node] = {}

    def walk(module: fx.GraphModule, path: tuple[str, ...]) -> None:
        for node in module.graph.nodes:
            if is_call(node):
                found.setdefault(key_of(path, node.name), node)
        for owner, child in children(module):
            inner = (*path, owner.name) if owner is not None and is_call(owner, LOOP) else path
            walk(child, inner)

    walk(program.root, ())
    return found


def loops_by_key(program: Program) -> dict[str, LoopView]:
    """All loops by key, outermost first."""
    return {k: LoopView(n) for k, n in nodes_by_key(program).items() if is_call(n, LOOP)}
