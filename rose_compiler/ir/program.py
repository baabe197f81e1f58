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

import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP, STATE, Op, OpTable

Value = Any  # fx.Node, or a Python constant


def is_call(node: fx.Node, op: Op | None = None) -> bool:
    """Whether the node calls an operation (this one, if given)."""
    if node.op != "call_function":
        return False
    return isinstance(node.target, Op) if op is None else node.target is op


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
    return [n for n in graph.nodes if n.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
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
        if is_call(node, LOOP):
            yield node, LoopView(node).body
        elif is_call(node, BRANCH):
            yield node, BranchView(node).then
            yield node, BranchView(node).orelse


def _inner_first(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for _, child in children(module):
        yield from _inner_first(child)
    yield module.graph


def is_exit(node: fx.Node) -> bool:
    return is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF)


def is_structure(node: fx.Node) -> bool:
    """Whether a node is a loop, a branch or an exit."""
    return is_call(node, LOOP) or is_call(node, BRANCH) or is_exit(node)


def is_state(node: fx.Node) -> bool:
    """Whether a node stands for a state (a root, one below a root, or one handed into a body)."""
    return bool(facts.get(node).state)


def state_name(node: fx.Node) -> str:
    """The name of the state a state node stands for."""
    name = facts.get(node).state
    if not name:
        raise TypeError(f"{node} is a value, not a state")
    return name


class Builder:
    """Builds one graph front to back. ``parent`` is the builder of the enclosing graph."""

    def __init__(self, parent: Builder | None = None) -> None:
        self.parent = parent
        self.graph = fx.Graph()
        self.module = torch.nn.Module()
        self._imports: dict[fx.Node, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None

    def placeholder(self, name: str, role: str, **known: Any) -> fx.Node:
        """A new placeholder, after those there are."""
        if self._last_placeholder is None:
            first = next(iter(self.graph.nodes), None)
            if first is not None:
                with self.graph.inserting_before(first):
                    node = self.graph.placeholder(name)
            else:
                node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._last_placeholder):
                node = self.graph.placeholder(name)
        if any(n.target == node.target for n in placeholders(self.graph) if n is not node):
            node.target = node.name  # fx prints parameters by target, and two can't share one
        self._last_placeholder = node
        facts.put(node, role=role, **known)
        return node

    def use(self, value: Value) -> Value:
        """``value`` as seen in this graph: captured from the enclosing ones if it is outside."""
        if not isinstance(value, fx.Node) or value.graph is self.graph:
            return value
        if value in self._imports:
            return self._imports[value]
        if self.parent is None:
            raise ValueError(f"{value} belongs to no enclosing graph")
        outer = self.parent.use(value)
        found = self._imports.get(outer)
        if found is None:
            known = facts.get(outer)
            found = self.placeholder(
                outer.name,
                "captured",
                state=known.state,
                spec=known.spec,
                alias=known.alias,
                maybe_unbound=known.maybe_unbound,
            )
            self._imports[outer] = found
        self._imports[value] = found
        return found

    def call(self, op: Op, *args: Value, name: str | None = None, **known: Any) -> fx.Node:
        """Call an operation with values of this or enclosing graphs."""
        used = fx.node.map_aggregate(args, self.use)
        node = self.graph.create_node(
            "call_function",
            op,
            used,
            {},
            name=name or op.name,
        )
        facts.put(node, **known)
        return node

    def item(self, node: fx.Node, position: int, name: str | None = None) -> fx.Node:
        """Pick one result of a tuple."""
        picked = self.graph.create_node(
            "call_function", operator.getitem, (node, position), {}, name=name
        )
        facts.copy(node, picked)
        facts.put(picked, loop=None, state="")
        return picked

    def state(self, root: fx.Node, path: str) -> fx.Node:
        """The state ``path`` below a root, as a node."""
        base = self.use(root)
        full = f"{state_name(base)}.{path}"
        return self.call(STATE, base, path, name=path.replace(".", "_"), state=full)

    def captured(self) -> tuple[fx.Node, ...]:
        """The outer nodes this body uses, in the order of its captured placeholders."""
        outer_by_inner = {
            inner: outer
            for outer, inner in self._imports.items()
            if self.parent and outer.graph is self.parent.graph
        }
        return tuple(
            outer_by_inner[n]
            for n in self.graph.nodes
            if n.op == "placeholder" and facts.get(n).role == "captured"
        )

    def finish(self, outputs: Value) -> fx.GraphModule:
        """Close the graph with its output."""
        self.graph.output(fx.node.map_aggregate(outputs, self.use))
        return fx.GraphModule(self.module, self.graph)

    def attach(self, stem: str, child: fx.GraphModule) -> fx.Node:
        """Hang a finished body below this graph; its ``get_attr`` node."""
        name = f"body_{stem}"
        n = 0
        while hasattr(self.module, name):
            n += 1
            name = f"body_{stem}_{n}"
        self.module.add_module(name, child)
        return self.graph.create_node("get_attr", name)

    def loop(
        self,
        body: Builder,
        outputs: tuple[Value, ...],
        bounds: tuple[Value, ...],
        carried: tuple[Value, ...],
        known: facts.LoopFacts,
        *,
        name: str | None = None,
        **more: Any,
    ) -> fx.Node:
        """Close ``body`` and add the loop node that runs it; its name is the label unless given."""
        name = name or known.label or "loop"
        child = body.finish(tuple(outputs))
        attribute = self.attach(name, child)
        return self.call(
            LOOP,
            attribute,
            tuple(bounds),
            tuple(carried),
            body.captured(),
            name=name,
            loop=known,
            **more,
        )

    def branch(
        self,
        pred: Value,
        then: Builder,
        then_outputs: tuple[Value, ...],
        orelse: Builder,
        else_outputs: tuple[Value, ...],
        *,
        name: str | None = None,
        **more: Any,
    ) -> fx.Node:
        """Close both arms and add the branch node. Both arms get the same captured values."""
        for outer in [*then.captured_outer(then_outputs), *orelse.captured_outer(else_outputs)]:
            then.use(outer)
            orelse.use(outer)
        captured = tuple(dict.fromkeys([*then.captured(), *orelse.captured()]))
        for arm in (then, orelse):
            for outer in captured:
                arm.use(outer)
            arm.sort_captured(captured)
        a = self.attach("then", then.finish(tuple(then_outputs)))
        b = self.attach("orelse", orelse.finish(tuple(else_outputs)))
        return self.call(BRANCH, pred, a, b, captured, name=name or "branch", **more)

    def captured_outer(self, outputs: tuple[Value, ...]) -> list[fx.Node]:
        """Outputs that live outside this body."""
        found: list[fx.Node] = []

        def visit(value: Value) -> Value:
            if isinstance(value, fx.Node) and value.graph is not self.graph:
                found.append(value)
            return value

        fx.node.map_aggregate(outputs, visit)
        return found

    def sort_captured(self, order: tuple[fx.Node, ...]) -> None:
        """Bring the captured placeholders of this body into the order of ``order``."""
        last: fx.Node | None = None
        for outer in order:
            inner = self._imports[outer]
            if last is not None:
                last.append(inner)
            last = inner
