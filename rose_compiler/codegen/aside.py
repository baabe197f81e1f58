"""Loops and branches that run on a thread's lane, as functions of their own inside the emitted one.

Such a function is handed all that it reads: the coordinator goes on meanwhile, and may give its own
variables other values. It returns what the loop hands on, or the results of the branch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from rose_compiler.codegen.emitter import Emitter
from rose_compiler.codegen.scopes import Scope
from rose_compiler.ir import bodies
from rose_compiler.ir.ops import BRANCH, LOOP, SHARD, STATE
from rose_compiler.ir.program import is_call


class Given(Scope):
    """Names in the function of a loop or branch: its parameters for what comes from outside."""

    def __init__(self, variables: dict[fx.Node, str], given: dict[fx.Node, str]) -> None:
        super().__init__(variables)
        self.given = given

    def ref(self, node: fx.Node, at: object) -> str:
        return self.given.get(node) or self.variables[node]


def inputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """The values and roots that a loop or branch is handed, states below roots led back to them."""
    for used in node.all_input_nodes:
        if is_call(used, STATE) or is_call(used, SHARD):
            yield from inputs_of(used)
        elif used.op != "get_attr":
            yield used


def nodes_below(node: fx.Node) -> Iterator[fx.Node]:
    """All nodes in the bodies of a loop or branch."""
    if not (is_call(node, LOOP) or is_call(node, BRANCH)):
        return
    for graph in bodies.graphs_of(node):
        for inner in graph.nodes:
            yield inner
            yield from nodes_below(inner)


def looked_up(emitter: Emitter, node: fx.Node) -> list[str]:
    """The variables of states, looked up at the top of the emitted function, that a loop or branch
    reads by themselves."""
    used = [*node.all_input_nodes, *nodes_below(node)]
    return sorted({name for n in used if (name := emitter.states.name(n)) is not None})
