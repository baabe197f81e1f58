"""Two copies of work in front of a branch that only some trips take: one on the way to the next
step, for those trips, and one that no step waits for, for the others.

An actor that is trained every other update keeps the whole update in front of the next action,
since the update of its critic comes first. On the trips between, nothing waits for the critic. With
the branch's condition tested ahead of all that, the update of these trips is late work.

Loop unswitching (Allen and Cocke, 1972) takes a condition out of a loop; here it is taken out of
the part of a trip that hangs on it, and tested on every trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Edge, title
from rose_compiler.ir.effects import related
from rose_compiler.ir.ops import BRANCH, UNBOUND
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Value,
    is_call,
    is_item,
    maker_of,
    op_of,
    output_node,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import nodes_in
from rose_compiler.passes.base import Pass, context_of
from rose_compiler.passes.late import staged
from rose_compiler.passes.place import TRAINING
from rose_compiler.passes.recurrence import is_step, items


@dataclass(frozen=True)
class Gate:
    """A branch that holds up the next step by what one arm does, and how that arm is reached.

    ``inner`` is that branch itself, or the one in its first arm that does it; ``test`` are the
    operations in that arm which make its condition.
    """

    node: fx.Node
    inner: fx.Node
    test: tuple[fx.Node, ...]
    moved: tuple[fx.Node, ...]  # what is copied with it, in program order, picks apart


@dataclass(frozen=True)
class Unswitch(Pass):
    """Let work that a rare branch keeps in front of the next step be late on the other trips."""

    name: ClassVar[str] = "unswitch"

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        steps = [n for n in loop.graph.nodes if is_step(n)]
        if not steps or context_of(rewrite).options.late != "shadow":
            return
        for _ in range(len(loop.graph.nodes)):
            gate = self.gate(loop, steps, rewrite)
            if gate is None or not rewrite.spend():
                return
            rewrite.applied(
                gate.node,
                f"{len(gate.moved)} operations in front of {title(gate.inner)} wait for it to be "
                "taken; on other trips no step waits for them",
            )
            _rewrite(gate, rewrite)

    def gate(self, loop: LoopView, steps: Sequence[fx.Node], rewrite: Rewriter) -> Gate | None:
        """The last branch of a body that it pays to test early, if there is one."""
        found = staged(loop, steps, rewrite.deps, context_of(rewrite))
        if isinstance(found, Blocker) or found.within is not None:
            return None
        edges, stage = found.edges, found.stage
        tight = [e for e in edges if e.least + stage[e.dst] == stage[e.src]]
        needed = _above(steps, tight)
        for node in reversed(list(loop.graph.nodes)):
            if node in needed and stage[node] and is_call(node, BRANCH):
                apart = _above(steps, [e for e in tight if node not in (e.src, e.dst)])
                held = {n for n in needed - apart - {node} if stage[n]}
                onward = [e for e in tight if e.src is node and e.dst in apart]
                gate = self._gate(node, held, onward, edges, rewrite)
                if gate is not None:
                    return gate
        return None

    def _gate(
        self,
        node: fx.Node,
        held: set[fx.Node],
        onward: Sequence[Edge],
        edges: Sequence[Edge],
        rewrite: Rewriter,
    ) -> Gate | None:
        inner = _holding(node, onward, rewrite)
        if inner is None or bodies.exits(BranchView(inner).then.graph):
            return None
        test = () if inner is node else _test_of(node, inner, rewrite)
        if test is None:
            return None
        same = [e for e in edges if e.least == 0]
        tested = set(nodes_in(node.args[0]))
        params = dict(_outer(node, BranchView(node).then.graph))
        for op in test:
            tested |= {params[n] for n in op.all_input_nodes if n in params}
        first = {maker_of(n) for n in _above(tested, same) | tested}
        moved = {n for n in held if maker_of(n) not in first}
        moved = _closed(moved, node, edges)
        if not any(map(_trains, moved)) or _overwritten(test, moved, rewrite):
            return None
        told = [*nodes_in(node.args[0]), *nodes_in(inner.args[0])]
        if _changed(told, [*moved, *inner.graph.nodes] if inner is not node else moved, rewrite):
            return None
        return Gate(node, inner, test, tuple(n for n in node.graph.nodes if n in moved))


def _above(nodes: Iterable[fx.Node], edges: Sequence[Edge]) -> set[fx.Node]:
    """What these nodes wait for."""
    needs: dict[fx.Node, list[fx.Node]] = {}
    for edge in edges:
        needs.setdefault(edge.dst, []).append(edge.src)
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        for node in needs.get(todo.pop(), ()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def _holding(node: fx.Node, onward: Sequence[Edge], rewrite: Rewriter) -> fx.Node | None:
    """The branch, this one or one in its first arm, in whose first arm all lies that a later trip
    waits for; ``None`` where it waits for more than that."""
    if not onward or any(e.state is None for e in onward):
        return None
    view = BranchView(node)
    if _touching(view.orelse.graph, onward, rewrite):
        return None
    inside = _touching(view.then.graph, onward, rewrite)
    if len(inside) == 1 and is_call(inside[0], BRANCH):
        within = BranchView(inside[0])
        if _acts(within.orelse.graph):
            return None
        return inside[0]
    return None if _acts(view.orelse.graph) else node


def _touching(graph: fx.Graph, onward: Sequence[Edge], rewrite: Rewriter) -> list[fx.Node]:
    """The operations of an arm by which these dependences on its branch hold."""
    return [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and any(
            related(effect.state, str(edge.state)) and (effect.write or edge.kind == "anti")
            for effect in rewrite.deps.effects(n)
            for edge in onward
        )
    ]


def _acts(graph: fx.Graph) -> bool:
    """Whether an arm does more than to hand on what it captured."""
    return any(n.op == "call_function" for n in graph.nodes)


def _test_of(node: fx.Node, inner: fx.Node, rewrite: Rewriter) -> tuple[fx.Node, ...] | None:
    """The operations of an arm that make the condition of a branch in it, if they can be done
    ahead: they touch nothing, and raise nothing."""
    arm = inner.graph
    wanted: set[fx.Node] = set()
    todo = [n for n in nodes_in(inner.args[0]) if n.op == "call_function"]
    while todo:
        at = todo.pop()
        if at in wanted:
            continue
        wanted.add(at)
        todo += [n for n in at.all_input_nodes if n.op == "call_function"]
    for op in wanted:
        if is_item(op):
            continue
        signature = op_of(op).signature if is_call(op) else None
        if signature is None or signature.writes != () or signature.may_raise:
            return None
        if signature.reads is None or any(r.startswith(("rng:", "host")) for r in signature.reads):
            return None
    test = tuple(n for n in arm.nodes if n in wanted)
    others = [n for n in arm.nodes if n.op == "call_function" and n not in wanted]
    return None if _overwritten(test, others, rewrite) else test


def _overwritten(test: Sequence[fx.Node], others: Iterable[fx.Node], rewrite: Rewriter) -> bool:
    """Whether some of the others write what the test reads."""
    reads = [e.state for op in test for e in rewrite.deps.effects(op)]
    if not reads:
        return False
    writes = [e.state for n in others for e in rewrite.deps.effects(n) if e.write]
    return any(related(r, w) for r in reads for w in writes)


def _changed(tested: Iterable[fx.Node], others: Iterable[fx.Node], rewrite: Rewriter) -> bool:
    """Whether some of the others write the memory of values that are tested as they are: a list
    that is empty or not, a tensor of one truth value."""
    scope = rewrite.deps.scope
    names = {f"%{d.name}" for n in tested for d in scope.definers(n)}
    names |= {a for n in tested for a in scope.aliases(n)} | {scope.state(n) for n in tested}
    writes = {e.state for n in others for e in rewrite.deps.effects(n) if e.write}
    return any(related(name, w) for name in names if name for w in writes)


def _closed(moved: set[fx.Node], gate: fx.Node, edges: Sequence[Edge]) -> set[fx.Node]:
    """Those of the operations that can be done right in front of the gate: nothing that stays and
    stands before it waits for them, and no instance that is born in them leaves."""
    order = {n: k for k, n in enumerate(gate.graph.nodes)}
    moved = {n for n in moved if order[n] < order[gate] and not is_item(n)}
    waits = [(maker_of(e.src), maker_of(e.dst)) for e in edges if not e.least]
    while True:
        kept = {
            n
            for n in moved
            if not facts.get(n).state or all(u in moved or u is gate for u in n.users)
        }
        kept -= {
            src
            for src, dst in waits
            if src in kept and dst not in kept and order[dst] < order[gate]
        }
        if kept == moved:
            return moved
        moved = kept


def _trains(node: fx.Node) -> bool:
    """Whether a node is, or holds, an operation that trains."""
    if not is_call(node):
        return False
    if op_of(node).name in ("loop", "branch"):
        return any(_trains(n) for graph in bodies.graphs_of(node) for n in graph.nodes)
    return bool({op_of(node).kind, *op_of(node).attributes.get("calls", ())} & TRAINING)


def _outer(owner: fx.Node, graph: fx.Graph) -> Iterable[tuple[fx.Node, fx.Node]]:
    return zip(bodies.captured_params(owner, graph), owner.args[3], strict=True)  # type: ignore[arg-type]


# -- the rewrite


def _rewrite(gate: Gate, rewrite: Rewriter) -> None:
    node = gate.node
    taken = _early_test(gate, rewrite)
    inside = {*gate.moved, node}
    picks = [u for n in inside for u in items(n)]
    inside.update(picks)
    order = {n: k for k, n in enumerate(node.graph.nodes)}
    leaving = sorted(
        (n for n in inside if n is not node and any(u not in inside for u in n.users)),
        key=order.__getitem__,
    )
    early = rewrite.new_branch(taken, before=node, like=node, name="early")
    late = rewrite.new_branch(taken, before=node, like=node, name="late")
    made = _copies(gate, picks, BranchView(early).then.graph, rewrite)
    rewrite.hand_out(early, [made[v] for v in leaving], [UNBOUND] * len(leaving))
    passed = [rewrite.item(early, k, name=v.name) for k, v in enumerate(leaving)]
    for pick, value in zip(passed, leaving, strict=True):
        _like(pick, value, rewrite, unbound=True)
    made = _copies(gate, picks, BranchView(late).orelse.graph, rewrite)
    _never_taken(gate, made, rewrite)
    rewrite.hand_out(late, passed, [made[v] for v in leaving])
    results = [rewrite.item(late, k, name=v.name) for k, v in enumerate(leaving)]
    for pick, value in zip(results, leaving, strict=True):
        _like(pick, value, rewrite)
        users = [u for u in value.users if u not in inside]
        rewrite.replace(value, pick, users=users)
    for old in sorted(inside, key=order.__getitem__, reverse=True):
        rewrite.erase(old)


def _early_test(gate: Gate, rewrite: Rewriter) -> Value:
    """The condition under which the gate holds up a step, in front of all that it held up."""
    outer = BranchView(gate.node).pred
    if gate.inner is gate.node:
        return outer
    arm = BranchView(gate.node).then.graph
    branch = rewrite.new_branch(outer, before=gate.node, like=gate.node, name="taken")
    values: dict[fx.Node, Any] = dict(_outer(gate.node, arm))
    before = output_node(BranchView(branch).then.graph)
    for op in gate.test:
        values[op] = rewrite.clone(op, values, before=before)
    pred = gate.inner.args[0]
    found = values[pred] if isinstance(pred, fx.Node) else pred
    rewrite.hand_out(branch, [found], [False])
    return rewrite.item(branch, 0, name="taken")


def _copies(
    gate: Gate, picks: Sequence[fx.Node], arm: fx.Graph, rewrite: Rewriter
) -> dict[fx.Node, Any]:
    """The operations and the gate once more, in an arm; the copy of each and of what it picks."""
    made: dict[fx.Node, Any] = {}
    wanted = {*gate.moved, gate.node, *picks}
    for old in [n for n in gate.node.graph.nodes if n in wanted]:
        made[old] = rewrite.clone(old, made, before=output_node(arm), name=old.name)
    return made


def _never_taken(gate: Gate, made: dict[fx.Node, Any], rewrite: Rewriter) -> None:
    """Leave out of a copy of the gate what it is there for."""
    copy = made[gate.node]
    if gate.inner is not gate.node:
        place = list(gate.inner.graph.nodes).index(gate.inner)
        copy = list(BranchView(copy).then.graph.nodes)[place]
        assert is_call(copy, BRANCH)
    arm = BranchView(copy).orelse.graph
    outer = dict(_outer(copy, arm))
    results: Any = output_node(arm).args[0]
    for pick in list(items(copy)):
        value = results[pick.args[1]]
        value = outer.get(value, value)
        rewrite.replace(pick, value)
        for old, new in made.items():
            if new is pick:
                made[old] = value
        rewrite.erase(pick)
    for old, new in list(made.items()):
        if new is copy:
            del made[old]
    rewrite.erase(copy)


def _like(pick: fx.Node, value: fx.Node, rewrite: Rewriter, *, unbound: bool = False) -> None:
    """Give a result the facts of the value that it stands for; who shared its memory still does."""
    known = facts.get(value)
    rewrite.set_facts(
        pick,
        spec=known.spec,
        alias=tuple(dict.fromkeys([*known.alias, f"%{value.name}"])),
        borrowed=known.borrowed,
        maybe_unbound=known.maybe_unbound or unbound,
    )
