"""What is switched on for a run: operations in front of all others that the runtime takes back."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.ops import STATE, Op
from rose_compiler.ir.program import Program, is_call, placeholders
from rose_compiler.ir.rewriter import Rewriter


def switch(op: Op, program: Program, state: str, like: fx.Node, rewrite: Rewriter) -> fx.Node:
    """Put a switch for a state in front of everything else the program does; it comes from where
    ``like`` does."""
    anchor = next(n for n in program.graph.nodes if n.op != "placeholder" and not is_call(n, STATE))
    node = _holder(program, state, anchor, rewrite)
    made = rewrite.call(op, node, before=anchor, like=like)
    facts.put(made, context=())
    return made


def _holder(program: Program, state: str, anchor: fx.Node, rewrite: Rewriter) -> fx.Node:
    """The node of a state at the top of the program: a root, or an object below one."""
    for node in program.graph.nodes:
        if (node.op == "placeholder" or is_call(node, STATE)) and facts.get(node).state == state:
            return node
    root, _, path = state.partition(".")
    of = next(n for n in placeholders(program.graph) if facts.get(n).state == root)
    return rewrite.call(STATE, of, path, before=anchor, name=state.replace(".", "_"), state=state)
