"""Whose gradients a ``backward`` may write: the parameters in what its loss was computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.fx as fx

from rose_compiler.frontend.names import StateNames
from rose_compiler.ir import facts
from rose_compiler.ir.effects import EVERYTHING, related
from rose_compiler.ir.extent import may_have_graph
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Program, is_call, is_exit, op_of
from rose_compiler.ir.scope import nodes_in
from rose_compiler.ir.summary import Summary

_NO_GRAPH = ("no_grad", "inference_mode")


class Slices:
    """Answers for one program whose operations have their effects."""

    def __init__(self, program: Program, names: StateNames) -> None:
        self.names = names
        self.summary = Summary(program)
        self.calls = [
            n
            for g in program.graphs()
            for n in g.nodes
            if is_call(n) and not is_call(n, LOOP) and not is_call(n, BRANCH) and not is_exit(n)
        ]

    def leaves(self, node: fx.Node) -> list[torch.Tensor]:
        """The tensors whose gradients may be written: those that operations read which the node's
        arguments may stem from, directly or through what containers and buffers keep."""
        states: set[str] = set()
        for source in self._slice(node):
            for effect in self.summary.effects(source):
                if not effect.write:
                    states.add(effect.state)
        return [t for name, t in self.names.tensors.items() if self._touched(name, t, states)]

    def local(self, node: fx.Node, recorded: Mapping[fx.Node, bool]) -> bool:
        """Whether only what computes the node's arguments can have recorded what it goes back
        through: nothing of that reads a state in which a value with a graph may have been put."""
        keeping = self._keeping(recorded)
        for source in self._slice(node):
            for effect in self.summary.effects(source):
                if EVERYTHING in keeping or effect.state == EVERYTHING:
                    return False
                if any(related(effect.state, state) for state in keeping):
                    return False
        return True

    def _keeping(self, recorded: Mapping[fx.Node, bool]) -> set[str]:
        """The states, gradients apart, in which some operation may put a value with a graph."""
        found: set[str] = set()
        rest = [n for n in self.calls if not _no_graph(n)]
        more = True
        while more:
            more = False
            for node in list(rest):
                effects = self.summary.effects(node)
                reads = [e.state for e in effects if not e.write]
                unknown = any(e.write and e.state == EVERYTHING for e in effects)
                puts = (
                    unknown
                    or recorded.get(node, False)
                    or any(
                        may_have_graph(facts.get(used).spec)
                        for used in node.all_input_nodes
                        if not self.summary.state(used)
                    )
                )
                if puts or any(related(a, b) for a in reads for b in found):
                    rest.remove(node)
                    written = {e.state for e in effects if e.write and ".grads" not in e.state}
                    more = more or not written <= found
                    found |= written
        return found

    def _touched(self, name: str, tensor: torch.Tensor, states: set[str]) -> bool:
        is_leaf = ".params." in name or tensor.requires_grad
        return is_leaf and any(s == EVERYTHING or related(s, name) for s in states)

    def _slice(self, node: fx.Node) -> Iterator[fx.Node]:
        seen: set[fx.Node] = set()
        stack = [node]
        while stack:
            at = stack.pop()
            if at in seen or not is_call(at):
                continue
            seen.add(at)
            if at is not node and _no_graph(at):
                continue
            yield at
            for used in nodes_in((at.args, at.kwargs)):
                if not self.summary.state(used):
                    stack.extend(self.summary.definers(used))
            stack.extend(self._stored(at))

    def _stored(self, node: fx.Node) -> Iterator[fx.Node]:
        """Operations that may have put values with a graph where this one reads."""
        reads = [
            e.state
            for e in self.summary.effects(node)
            if not e.write and e.state != EVERYTHING and ".params" not in e.state
        ]
        if not reads:
            return
        for other in self.calls:
            if other is node or _no_graph(other) or not _stores_graphs(other):
                continue
            for effect in self.summary.effects(other):
                if effect.write and any(related(effect.state, r) for r in reads):
                    yield other
                    break


def _no_graph(node: fx.Node) -> bool:
    modes = [c for c in facts.get(node).context if c.kind in (*_NO_GRAPH, "enable_grad")]
    return bool(modes) and modes[-1].kind in _NO_GRAPH and modes[-1].args != (False,)


def _stores_graphs(node: fx.Node) -> bool:
    """Whether an operation may store a value that has an autograd graph."""
    if op_of(node).attributes.get("calls", frozenset()) & {"optimizer", "backward", "step"}:
        return False
    if op_of(node).kind == "builtin":
        return True
    for used in node.all_input_nodes:
        spec = facts.get(used).spec
        if spec is None or spec.requires_grad or spec.kind in ("dict", "object", "tuple"):
            return True
    return "module" in op_of(node).attributes.get("calls", ())
