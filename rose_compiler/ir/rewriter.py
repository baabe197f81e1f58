"""The only code that mutates a program. Every node it makes or changes is stamped with its pass.

A rewrite that would break a dependence raises at once where it can be told from the program itself
(moving, hoisting); everything else is left to ``verify`` after the pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import VerifyError, fail
from rose_compiler.ir import bodies, facts, motion, program
from rose_compiler.ir.deps import place, title
from rose_compiler.ir.nesting import Nesting
from rose_compiler.ir.ops import BRANCH, BUILTINS, LOOP, STATE, Op
from rose_compiler.ir.program import Builder, LoopView, Value, is_call, is_item
from rose_compiler.ir.reporter import Fuel as Fuel
from rose_compiler.ir.site import LoopBuilder as LoopBuilder
from rose_compiler.ir.site import Site

#: Facts that say where or how fast a node runs, not what it is: changing them is no rewrite.
_PLACEMENT = frozenset({"slot", "cost"})
_OBSERVED = _PLACEMENT | {"spec"}


class Rewriter(Nesting):
    """Changes one program on behalf of one pass.

    ``fuel`` limits how many rewrites may be applied: a pass asks :meth:`spend` before each, and
    :meth:`applied` counts it. ``context`` is whatever the manager hands to its passes.
    """

    # -- making nodes

    def call(
        self,
        op: Op,
        *args: Value,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        like: fx.Node | None = None,
        name: str | None = None,
        **known: Any,
    ) -> fx.Node:
        """Call an operation at a place; outer values are captured. ``like`` gives line and modes.

        Raises:
            ValueError: for an argument that no enclosing graph holds, or not exactly one place.
        """
        with self._at(before, after) as graph:
            used = fx.node.map_aggregate(args, lambda v: self.use(v, graph))
            node = graph.create_node("call_function", op, used, {}, name=name or op.name)
        self.register(op)
        self.stamp(node, like, known)
        return node

    def item(self, node: fx.Node, position: int, name: str | None = None) -> fx.Node:
        """The node that picks one result of a tuple, directly behind it; ``name`` for a new one."""
        for user in node.users:
            if is_item(user) and user.args[1] == position:
                node.append(user)
                self._changed()
                return user
        with node.graph.inserting_after(node):
            picked = node.graph.create_node(
                "call_function", operator.getitem, (node, position), name=name
            )
        facts.copy(node, picked, pass_name=self.pass_name)
        facts.put(picked, loop=None, state="", slot=None)
        self._changed()
        return picked

    def builder(self, *, before: fx.Node) -> Builder:
        """A builder whose calls, loops and branches are put in front of a node."""
        return Site(self, before)

    def new_loop(
        self,
        *,
        before: fx.Node,
        bounds: tuple[Value, ...],
        carried: tuple[Value, ...] = (),
        known: facts.LoopFacts | None = None,
        like: fx.Node | None = None,
    ) -> LoopBuilder:
        """Start a loop in front of a node: fill its body, then ``close`` it."""
        return LoopBuilder(Site(self, before), bounds, carried, known or facts.LoopFacts(), like)

    def new_branch(self, pred: Value, *, before: fx.Node, like: fx.Node, name: str) -> fx.Node:
        """A branch in front of a node, with empty arms: fill them, then :meth:`hand_out`."""
        site = Site(self, before)
        return site.branch(pred, site.nested(), (), site.nested(), (), like=like, name=name)

    def hand_out(self, branch: fx.Node, then: Sequence[Value], orelse: Sequence[Value]) -> None:
        """Give a branch of :meth:`new_branch` its results, as many from each arm."""
        for graph, values in zip(bodies.graphs_of(branch), (then, orelse), strict=True):
            used = tuple(self.use(v, graph) for v in values)
            program.output_node(graph).args = (used,)
        self._changed()

    def clone(
        self,
        node: fx.Node,
        args_map: Mapping[fx.Node, Value],
        *,
        before: fx.Node,
        name: str | None = None,
    ) -> fx.Node:
        """A copy of a node, bodies included, its arguments replaced where ``args_map`` has them.

        A copied alloc is a new instance. Where a state is replaced by another one, the aliases of
        the copy follow.
        """
        renamed = {
            facts.get(old).state: facts.get(new).state
            for old, new in args_map.items()
            if isinstance(new, fx.Node) and facts.get(old).state and facts.get(new).state
        }
        module = before.graph.owning_module
        assert module is not None
        with before.graph.inserting_before(before):
            attributes: dict[fx.Node, Value] = {}
            for used in node.all_input_nodes:
                if used.op == "get_attr":
                    child = bodies.copied(
                        program.body_of(node, used), self.program, renamed, self.pass_name
                    )
                    attribute = bodies.attach(module, str(used.target), child)
                    attributes[used] = before.graph.create_node("get_attr", attribute)

            def mapped(used: fx.Node) -> Value:
                return self.use(attributes.get(used, args_map.get(used, used)), before.graph)

            args = fx.node.map_arg(node.args, mapped)
            copy = before.graph.create_node(
                node.op, node.target, args, dict(node.kwargs), name=name or node.name
            )
        facts.copy(node, copy, pass_name=self.pass_name)
        bodies.rename(copy, renamed)
        if is_call(node) and not is_call(node, STATE) and facts.get(node).state.startswith("%"):
            facts.put(copy, state=bodies.fresh_state(self.program, f"%{copy.name}"))
        if is_call(copy, LOOP) or is_call(copy, BRANCH):
            self._inline(copy)
            bodies.merge_captured(copy)
            bodies.sync(copy)
        self._changed()
        return copy

    # -- changing nodes

    def set_facts(self, node: fx.Node, **changes: Any) -> None:
        """Change some facts of a node."""
        facts.put(node, **changes)
        if not changes.keys() <= _OBSERVED:
            facts.put(node, origin=facts.get(node).origin.stamped(self.pass_name))
        if not changes.keys() <= _PLACEMENT:
            self._changed()

    def replace(
        self, node: fx.Node, value: Value, *, users: Iterable[fx.Node] | None = None
    ) -> None:
        """Let every user of a node use ``value`` instead; ``value`` itself may go on using it.

        In bodies that captured the node the new value is seen, a constant included. ``users`` are
        the ones to change, all of them if left out.
        """
        value = self.use(value, node.graph)
        for user in list(node.users if users is None else users):
            if user is value:
                continue
            captured = bodies.captures(user, node)
            user.args = fx.node.map_arg(user.args, lambda n: value if n is node else n)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda n: value if n is node else n)
            if captured and not isinstance(value, fx.Node):
                self._inline(user)
            elif captured:
                bodies.merge_captured(user)
                bodies.sync(user)
            if user.op != "output":
                facts.put(user, origin=facts.get(user).origin.stamped(self.pass_name))
        self._changed()

    def retarget(self, node: fx.Node, op: Op, *args: Value) -> None:
        """Let a node call another operation, with other arguments; its users stay with it.

        A loop or branch loses its bodies by that.
        """
        bodies_of = [n for n in node.all_input_nodes if n.op == "get_attr"]
        node.target = op
        node.args = fx.node.map_aggregate(args, lambda v: self.use(v, node.graph))
        facts.put(node, origin=facts.get(node).origin.stamped(self.pass_name))
        self.register(op)
        for used in bodies_of:
            self._drop_body(used)

    def repick(self, picked: fx.Node, of: fx.Node, position: int) -> None:
        """Let a pick take a result of another tuple, made in front of it."""
        picked.args = (of, position)
        facts.put(picked, origin=facts.get(picked).origin.stamped(self.pass_name))
        self._changed()

    def erase(self, node: fx.Node) -> None:
        """Take a node out that nobody uses, with its bodies.

        Raises:
            ValueError: when the node is still used.
        """
        if node.users:
            raise ValueError(f"{node} is still used by {', '.join(map(str, node.users))}")
        attributes = [n for n in node.all_input_nodes if n.op == "get_attr"]
        node.graph.erase_node(node)
        for used in attributes:
            self._drop_body(used)
        self._changed()

    def _drop_body(self, used: fx.Node) -> None:
        if not used.users:
            used.graph.erase_node(used)
            delattr(used.graph.owning_module, str(used.target))

    def move(
        self, node: fx.Node, *, before: fx.Node | None = None, after: fx.Node | None = None
    ) -> None:
        """Put a node at another place of its body.

        Raises:
            VerifyError: when a dependence holds it where it is.
            ValueError: when the place is none of this body, or not exactly one is given.
        """
        anchor = before if before is not None else after
        if anchor is None or (before is not None and after is not None):
            raise ValueError("exactly one of before= and after= is needed")
        if anchor.graph is not node.graph:
            raise ValueError(f"{anchor} is in another body than {node}")
        if anchor.op == "placeholder" or (anchor.op == "output" and before is None):
            raise ValueError(f"nothing stands beside {anchor} there")
        if anchor is node:
            return
        if edge := motion.crossed(self.deps, node, anchor, behind=before is None):
            raise self._illegal(node, edge.dst if edge.src is node else edge.src, str(edge))
        if before is not None:
            before.prepend(node)
        else:
            anchor.append(node)
        for used in node.all_input_nodes:
            # bodies and states below a root stand anywhere in front of their user
            if (used.op == "get_attr" or is_call(used, STATE)) and used > node:
                node.prepend(used)
        facts.put(node, origin=facts.get(node).origin.stamped(self.pass_name))
        self._changed()

    def hoist(self, node: fx.Node, *, out_of: LoopView | fx.Node) -> fx.Node:
        """Move an operation of a loop's body in front of the loop; the body captures its value.

        Raises:
            VerifyError: when it varies from trip to trip, writes, or reads what the loop writes.
            ValueError: when the node is not directly in the loop's body.
        """
        loop = out_of if isinstance(out_of, LoopView) else LoopView(out_of)
        if node.graph is not loop.graph:
            raise ValueError(f"{node} is not directly in the body of {loop.label}")
        if pinned := motion.pinned(self.deps, node):
            raise self._illegal(node, *pinned)
        for used in node.all_input_nodes:
            if is_call(used, STATE):
                self.hoist(used, out_of=loop)
        outside = {used: self._outside(loop, node, used) for used in node.all_input_nodes}
        moved = self._lifted(loop, node, outside)
        self.replace(node, self.import_value(loop.node, moved))
        self.erase(node)
        return moved

    def _outside(self, loop: LoopView, node: fx.Node, used: fx.Node) -> Value:
        if used in loop.captured_params:
            return loop.outer(used)
        if used.op == "get_attr":
            return used
        raise self._illegal(node, used, f"{used} varies from trip to trip")

    def _lifted(self, loop: LoopView, node: fx.Node, outside: dict[fx.Node, Value]) -> fx.Node:
        moved = self.clone(node, outside, before=loop.node)
        if facts.get(node).state:
            facts.put(moved, state=facts.get(node).state)
        return moved

    def tidy(self) -> None:
        """Drop what runs nothing and is not used: picks, states below roots, captured values.

        Passes leave these behind; none of them counts as a rewrite.
        """
        for graph in list(self.program.graphs()):
            for node in reversed(list(graph.nodes)):
                if is_call(node, LOOP) or is_call(node, BRANCH):
                    if bodies.drop_unused_captured(node):
                        self._changed()
                elif not node.users and (is_item(node) or is_call(node, STATE)):
                    self.erase(node)

    # -- carried values

    def begin(self, loop: fx.Node, bounds: tuple[Value, ...], carried: tuple[Value, ...]) -> None:
        """Let a loop make other trips, from other values on."""
        used = [tuple(self.use(v, loop.graph) for v in values) for values in (bounds, carried)]
        loop.args = (loop.args[0], *used, loop.args[3])
        self._changed()

    def add_carried(
        self,
        loop: LoopView | fx.Node,
        init: Value,
        next_value: Value | Callable[[fx.Node], Value],
        *,
        name: str = "carried",
    ) -> tuple[fx.Node, fx.Node]:
        """Carry one more value from trip to trip; its placeholder in the body and its final value.

        ``next_value`` is a value of the body, or a function that makes it from the placeholder. An
        exit in front of the next value hands out the current one.
        """
        view = loop if isinstance(loop, LoopView) else LoopView(loop)
        count = len(view.carried_init)
        param = bodies.add_carried_placeholder(view, self.use(init, view.node.graph), name)
        self._changed()
        following = next_value(param) if callable(next_value) else next_value
        following = self.use(following, view.graph)
        bodies.hand_on(view, following)
        for at in bodies.exits(view.graph):
            top = at
            while top.graph is not view.graph:
                top = self._owner_of(top)
            ready = not isinstance(following, fx.Node) or following < top
            handed = self.use(following if ready else param, at.graph)
            at.args = (at.args[0], (*at.args[1], handed))  # type: ignore[misc]
        self._changed()
        return param, self.item(view.node, count)

    # -- inner workings

    @contextmanager
    def _at(self, before: fx.Node | None, after: fx.Node | None) -> Iterator[fx.Graph]:
        anchor = before if before is not None else after
        if anchor is None or (before is not None and after is not None):
            raise ValueError("exactly one of before= and after= is needed")
        if before is not None:
            point = anchor.graph.inserting_before(anchor)
        else:
            if anchor.op == "placeholder":
                anchor = program.placeholders(anchor.graph)[-1]
            point = anchor.graph.inserting_after(anchor)
        with point:
            yield anchor.graph

    def register(self, op: Op) -> None:
        """Enter an operation into the program's table, unless it is a builtin."""
        if op.name not in BUILTINS or BUILTINS[op.name].op is not op:
            self.program.ops.add(op)
        self._changed()

    def stamp(self, node: fx.Node, like: fx.Node | None, known: Mapping[str, Any]) -> None:
        """Give a new node its facts: line and modes of ``like``, this pass as its maker."""
        source = facts.get(like) if like is not None else facts.Facts()
        stamped = known.get("origin", source.origin).stamped(self.pass_name)
        facts.put(node, **{"context": source.context, **known, "origin": stamped})

    def _inline(self, owner: fx.Node) -> None:
        """Let bodies use constants where their owner captures them."""
        for graph in bodies.graphs_of(owner):
            params = bodies.captured_params(owner, graph)
            for param, outer in zip(params, owner.args[3], strict=True):  # type: ignore[arg-type]
                if not isinstance(outer, fx.Node):
                    self.replace(param, outer)
                    graph.erase_node(param)
        captured = tuple(n for n in owner.args[3] if isinstance(n, fx.Node))  # type: ignore[union-attr]
        owner.args = (*owner.args[:3], captured)

    def _illegal(self, node: fx.Node, other: fx.Node, found: str) -> VerifyError:
        error = fail(
            "verify-dependence",
            f"pass {self.pass_name!r} moves {title(node)}, which depends on {title(other)}",
            where=place(node),
            expected="a place that no dependence forbids",
            found=found,
        )
        assert isinstance(error, VerifyError)
        return error
