"""Builds nested graphs front to back; the views that read them are in ``program.py``."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.body import Body
from rose_compiler.ir.ops import BRANCH, LOOP, STATE, Op

Value = Any  # fx.Node, or a Python constant


def state_name(node: fx.Node) -> str:
    """The name of the state a state node stands for.

    Raises:
        TypeError: when the node is a value.
    """
    name = facts.get(node).state
    if not name:
        raise TypeError(f"{node} is a value, not a state")
    return name


def settle_target(param: fx.Node) -> None:
    """Give a new placeholder a target of its own: fx prints parameters by target."""
    others = (n for n in param.graph.nodes if n.op == "placeholder" and n is not param)
    if any(n.target == param.target for n in others):
        param.target = param.name


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
                    node = self._placeholder(name)
            else:
                node = self._placeholder(name)
        else:
            with self.graph.inserting_after(self._last_placeholder):
                node = self._placeholder(name)
        settle_target(node)
        self._last_placeholder = node
        facts.put(node, role=role, **known)
        return node

    def _placeholder(self, name: str) -> fx.Node:
        # with a name of its own: fx would make one of the target in lower case, and the program's
        # names are the user's
        return self.graph.create_node("placeholder", name, name=name)

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
        return Body(self.module, self.graph)

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
