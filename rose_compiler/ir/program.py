"""Programs: typed views over nested ``torch.fx`` graphs.

A loop is a ``call_function`` node of :data:`~rose_compiler.ir.ops.LOOP` with arguments
``(body, bounds, carried, captured)``: a ``get_attr`` of the child ``GraphModule``, the bounds
(``(start, stop, step)``, or ``(iterable,)``, or ``()`` for an endless one), the initial carried
values, and the outer values and states that the body uses. The body's placeholders are the index,
one per carried value, one per captured value, in this order; its output is the tuple of next
carried values. The node's value is the tuple of final carried values. A branch is a node of
``BRANCH`` with arguments ``(pred, then, orelse, captured)``; both bodies take the captured values
and return equally long tuples.

``BREAK_IF(pred, carried)`` leaves the enclosing loop with these carried values, ``CONTINUE_IF``
starts its next trip; everything behind one in program order depends on it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.builder import Builder as Builder
from rose_compiler.ir.builder import Value as Value
from rose_compiler.ir.builder import state_name as state_name
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP, Op, OpTable


def is_call(node: fx.Node, op: Op | None = None) -> bool:
    """Whether the node calls an operation (this one, if given)."""
    if node.op != "call_function":
        return False
    return isinstance(node.target, Op) if op is None else node.target is op


def is_hosted(node: fx.Node) -> bool:
    """Whether the node is a call of a component that lives in a host of its own."""
    return is_call(node) and bool(op_of(node).attributes.get("hosted"))


def is_item(node: fx.Node) -> bool:
    """Whether the node only picks one result of a tuple."""
    return node.op == "call_function" and node.target is operator.getitem


def op_of(node: fx.Node) -> Op:
    """The operation a node calls.

    Raises:
        TypeError: when the node calls none.
    """
    if node.op == "call_function" and isinstance(node.target, Op):
        return node.target
    raise TypeError(f"{node} calls no operation")


def body_of(node: fx.Node, attribute: fx.Node) -> fx.GraphModule:
    """The child graph a ``get_attr`` argument names."""
    owner = node.graph.owning_module
    assert owner is not None
    child = getattr(owner, str(attribute.target))
    assert isinstance(child, fx.GraphModule)
    return child


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph, in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that a graph returns by."""
    return next(n for n in reversed(graph.nodes) if n.op == "output")


@dataclass(frozen=True)
class LoopView:
    """A loop node, by meaning. Read it; change it through the rewriter."""

    node: fx.Node

    @property
    def facts(self) -> facts.LoopFacts:
        return facts.get(self.node).loop or facts.LoopFacts()

    @property
    def body(self) -> fx.GraphModule:
        return body_of(self.node, self.node.args[0])  # type: ignore[arg-type]

    @property
    def graph(self) -> fx.Graph:
        return self.body.graph

    @property
    def bounds(self) -> tuple[Value, ...]:
        return tuple(self.node.args[1])  # type: ignore[arg-type]

    @property
    def carried_init(self) -> tuple[Value, ...]:
        return tuple(self.node.args[2])  # type: ignore[arg-type]

    @property
    def captured(self) -> tuple[fx.Node, ...]:
        return tuple(self.node.args[3])  # type: ignore[arg-type]

    @property
    def index(self) -> fx.Node:
        return placeholders(self.graph)[0]

    @property
    def carried(self) -> tuple[fx.Node, ...]:
        """The body's placeholders of carried values."""
        return tuple(placeholders(self.graph)[1 : 1 + len(self.carried_init)])

    @property
    def captured_params(self) -> tuple[fx.Node, ...]:
        return tuple(placeholders(self.graph)[1 + len(self.carried_init) :])

    @property
    def carried_next(self) -> tuple[Value, ...]:
        return tuple(output_node(self.graph).args[0])  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        return self.facts.label or self.node.name

    def result(self, position: int) -> fx.Node | None:
        """The node that picks carried value ``position`` after the loop, if any."""
        for user in self.node.users:
            if is_item(user) and user.args[1] == position:
                return user
        return None

    def outer(self, inner: fx.Node) -> Value:
        """What a captured placeholder stands for outside the body; ``inner`` itself otherwise."""
        for param, value in zip(self.captured_params, self.captured, strict=True):
            if param is inner:
                return value
        return inner


@dataclass(frozen=True)
class BranchView:
    """A branch node, by meaning."""

    node: fx.Node

    @property
    def pred(self) -> Value:
        return self.node.args[0]

    @property
    def then(self) -> fx.GraphModule:
        return body_of(self.node, self.node.args[1])  # type: ignore[arg-type]

    @property
    def orelse(self) -> fx.GraphModule:
        return body_of(self.node, self.node.args[2])  # type: ignore[arg-type]

    @property
    def captured(self) -> tuple[fx.Node, ...]:
        return tuple(self.node.args[3])  # type: ignore[arg-type]


@dataclass
class Program:
    """One captured function: its root graph, its operations and the objects its states stand for.

    ``value_params`` and ``state_params`` name the placeholders of the root graph, values first.
    ``stage`` is "captured" or "scheduled". ``objects`` binds state roots to live objects; it is
    empty for a program parsed from text.
    """

    name: str
    root: fx.GraphModule
    ops: OpTable
    value_params: tuple[str, ...] = ()
    state_params: tuple[str, ...] = ()
    stage: str = "captured"
    objects: dict[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.root.graph

    def graphs(self) -> Iterator[fx.Graph]:
        """All graphs, innermost first, then in program order."""
        yield from _inner_first(self.root)

    def nodes(self) -> Iterator[fx.Node]:
        """Every node of every graph."""
        for graph in self.graphs():
            yield from graph.nodes

    def loops(self) -> list[LoopView]:
        """All loops, innermost first."""
        return [LoopView(n) for n in self.nodes() if is_call(n, LOOP)]

    @property
    def threads(self) -> dict[str, int]:
        """How many threads torch's operations may use, by label of the loops that say so."""
        return {loop.label: loop.facts.threads for loop in self.loops() if loop.facts.threads}

    def find(self, name: str) -> fx.Node:
        """The first node of this name, or the first that calls an operation of this name.

        Raises:
            KeyError: when there is none.
        """
        for node in self.nodes():
            if node.name == name:
                return node
        for node in self.nodes():
            if is_call(node) and op_of(node).name == name:
                return node
        raise KeyError(name)


def children(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """The bodies directly below a graph, with the node each belongs to."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is LOOP:
            yield node, LoopView(node).body
        elif node.target is BRANCH:
            yield node, BranchView(node).then
            yield node, BranchView(node).orelse


def _inner_first(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for _, child in children(module):
        yield from _inner_first(child)
    yield module.graph


def maker_of(node: fx.Node) -> fx.Node:
    """The operation that makes a value, which may be an item of its result, or of an item's."""
    while is_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_exit(node: fx.Node) -> bool:
    """Whether a node may leave its loop, or end its trip."""
    return is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF)


def is_structure(node: fx.Node) -> bool:
    """Whether a node is a loop, a branch or an exit."""
    return is_call(node, LOOP) or is_call(node, BRANCH) or is_exit(node)


def is_state(node: fx.Node) -> bool:
    """Whether a node stands for a state (a root, one below a root, or one handed into a body)."""
    return bool(facts.get(node).state)
