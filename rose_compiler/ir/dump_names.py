"""The names of nodes and operations in a dump.

A node keeps its own name wherever that can't be taken for another one's: bodies see the names of
the bodies around them, so a name used from outside means the outer node all through the body.
"""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.ir.dump_expr import RESERVED, is_name
from rose_compiler.ir.ops import BUILTINS, LOOP, Op
from rose_compiler.ir.program import LoopView, Program, children, is_call, op_of, placeholders

#: Names in call position that are no operations.
CALL_WORDS = frozenset((*BUILTINS, "float", "frozenset", "slice"))


def identifier(text: str) -> str:
    """A name as close to the text as can be."""
    clean = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in text)
    return clean if is_name(clean) else f"_{clean}"


def fresh(stem: str, taken: set[str]) -> str:
    """``stem`` with a number behind it if it is taken; takes it."""
    name, n = stem, 0
    while name in taken:
        n += 1
        name = f"{stem}_{n}"
    taken.add(name)
    return name


def name_nodes(program: Program) -> dict[fx.Node, str]:
    """The name of every node that a dump can refer to."""
    names: dict[fx.Node, str] = {}
    params = (*program.value_params, *program.state_params)
    taken = set(RESERVED)
    # strict: a placeholder without a parameter would be lost
    for node, param in zip(placeholders(program.graph), params, strict=True):
        names[node] = fresh(param if is_name(param) else identifier(node.name), taken)
    _name_body(program.root, names, taken)
    return names


def _name_body(module: fx.GraphModule, names: dict[fx.Node, str], taken: set[str]) -> None:
    """Name the nodes of a graph, then those of its bodies: outer names win."""
    for node in module.graph.nodes:
        if node not in names and node.op not in ("get_attr", "output"):
            names[node] = fresh(identifier(node.name), taken)
    for owner, child in children(module):
        inner = placeholders(child.graph)
        if is_call(owner, LOOP):
            inner = list(LoopView(owner).captured_params)
        outer = owner.args[3]
        assert isinstance(outer, tuple | list)
        for param, source in zip(inner, outer, strict=True):
            assert isinstance(source, fx.Node)
            names[param] = names[source]
        _name_body(child, names, {*RESERVED, *(names[p] for p in inner)})


class Aliases:
    """The names under which a dump calls operations: their own wherever it can."""

    def __init__(self, program: Program) -> None:
        used = dict.fromkeys(op_of(n) for n in program.nodes() if is_call(n))
        ordered = [op for op in program.ops.by_name.values() if op in used]
        ordered += [op for op in used if op not in ordered]
        self.called = tuple(op for op in ordered if op.kind != "builtin")
        self._names: dict[Op, str] = {row.op: name for name, row in BUILTINS.items()}
        taken = set(CALL_WORDS)
        for op in sorted(self.called, key=lambda op: not is_name(op.name)):
            self._names[op] = fresh(identifier(op.name), taken)

    def __getitem__(self, op: Op) -> str:
        return self._names[op]
