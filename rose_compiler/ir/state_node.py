"""The node of a tensor below a root, made where the program has none yet."""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import is_call, placeholders
from rose_compiler.ir.rewriter import Rewriter


def state_node(path: str, rewriter: Rewriter) -> fx.Node:
    """The node of the tensor that a state's name stands for, at the top of the program."""
    program = rewriter.program
    root_name, attribute = split_name(path)
    for node in program.graph.nodes:
        if is_call(node, STATE) and facts.get(node).state == path:
            return node
    root = next(
        n
        for n in placeholders(program.graph)
        if n.name == root_name or facts.get(n).state == root_name
    )
    if not attribute:
        return root
    anchor = next(n for n in program.graph.nodes if n.op != "placeholder" and not is_call(n, STATE))
    name = path.replace(".params.", "_").replace(".buffers.", "_").replace(".", "_")
    return rewriter.call(STATE, root, attribute, before=anchor, name=name, state=path)


def split_name(path: str) -> tuple[str, str]:
    """A state's name as the root and the attribute path that leads to the object."""
    root, _, rest = path.partition(".")
    for part in ("params.", "buffers."):
        if rest.startswith(part):
            return root, rest[len(part) :]
        rest = rest.replace(f".{part}", ".")
    return root, rest
