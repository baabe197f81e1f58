"""Calls of components in hosts, begun as early and awaited as late as the dependences allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse
from typing import ClassVar

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, Edge
from rose_compiler.ir.effects import GLOBAL_STATES
from rose_compiler.ir.ops import BRANCH, LOOP, STATE
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    children,
    is_call,
    is_hosted,
    op_of,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, context_of, is_work
from rose_compiler.passes.late import write_slots
from rose_compiler.passes.modulo import Modulo


@dataclass(frozen=True)
class Hosts(Pass):
    """Give each component in a host a lane of its own, ``host:<state>``.

    Where another pass has placed a body's operations, they keep their order.
    """

    name: ClassVar[str] = "hosts"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        found = [
            (owner, graph, calls)
            for owner, graph in _bodies(program)
            if (calls := _calls(graph, runs_once(owner, graph, rewrite.deps)))
        ]
        for owner, graph, calls in found:
            if not any(facts.get(n).slot for n in calls):  # a branch may have placed them
                self._body(owner, graph, calls, rewrite)
        if found:
            program.stage = "scheduled"

    def _body(
        self, owner: fx.Node | None, graph: fx.Graph, calls: list[fx.Node], rewrite: Rewriter
    ) -> None:
        nodes = [n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE)]
        edges = tuple(e for e in rewrite.deps.edges(graph) if e.src in nodes and e.dst in nodes)
        placed = {n: slot for n in nodes if (slot := facts.get(n).slot) is not None}
        if placed:
            order = sorted((n for n in nodes if n in placed), key=lambda n: placed[n].order)
            stage = {n: placed[n].stage for n in order}
            within = tuple(e for e in edges if e.src in placed and e.dst in placed)
            modulo = Modulo(tuple(order), stage, within)
        else:
            modulo = Modulo(in_order(nodes, edges, calls), dict.fromkeys(nodes, 0), edges)
        lanes: dict[fx.Node, str] = {}
        for call in (*filterfalse(at_once, calls), *filter(at_once, calls)):
            inside = call if is_hosted(call) else _inside(call)[0]
            lane = f"host:{component(inside, rewrite.deps)}"
            if at_once(call) and lane not in lanes.values():
                continue  # the coordinator hands parameters over itself
            blocker = self.why_not(owner, call, modulo, rewrite)
            if blocker is not None:
                rewrite.missed(call, blocker)
            elif rewrite.spend():
                lanes[call] = lane
                beside = sum(map(is_work, modulo.beside(call)))
                what = f"runs on lane {lane!r} beside {beside} operations"
                if at_once(call):
                    what = f"hands parameters over on lane {lane!r}, in front of later calls"
                if not is_hosted(call):
                    self._arms(call, lane, rewrite)
                rewrite.applied(call, what)
        if not lanes:
            return
        if placed:
            for call, lane in lanes.items():
                rewrite.set_facts(call, slot=replace(placed[call], lane=lane))
        else:
            write_slots(modulo, lanes, rewrite)

    def _arms(self, branch: fx.Node, lane: str, rewrite: Rewriter) -> None:
        """Calls in the arms of a branch begin where it stands; the rest of the arm that waits for
        them follows where the branch is awaited."""
        view = BranchView(branch)
        for graph in (view.then.graph, view.orelse.graph):
            nodes = [n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE)]
            calls = [n for n in nodes if is_hosted(n)]
            if not calls:
                continue
            edges = tuple(e for e in rewrite.deps.edges(graph) if e.src in nodes and e.dst in nodes)
            order = in_order(nodes, edges, calls)
            modulo = Modulo(order, dict.fromkeys(nodes, 0), edges)
            write_slots(modulo, dict.fromkeys(calls, lane), rewrite)

    def why_not(
        self, owner: fx.Node | None, call: fx.Node, modulo: Modulo, rewrite: Rewriter
    ) -> Blocker | None:
        """Why the coordinator waits for a call where it stands, or None."""
        context = context_of(rewrite)
        if not context.options.hosted:
            return Blocker("switched-off", "the decision waits for every component in a host")
        if not context.run_ahead:
            return Blocker("may-raise", "run_ahead=False starts nothing beside a call")
        loop = LoopView(owner) if owner is not None and is_call(owner, LOOP) else None
        if loop is not None and loop.facts.kind == "while":
            return Blocker("early-exit", f"{loop.label} may stop after any trip")
        if not at_once(call) and not any(map(is_work, modulo.beside(call))):
            return Blocker("no-window", "the next operation waits for the call")
        return None


def component(call: fx.Node, deps: Dependences) -> str:
    """The state of the component that a call is made to."""
    written = (e.state for e in deps.effects(call) if e.write)
    return next(state for state in written if state not in GLOBAL_STATES)


def in_order(
    nodes: Sequence[fx.Node],
    edges: Sequence[Edge],
    calls: Sequence[fx.Node],
    lanes: Mapping[fx.Node, str] | None = None,
) -> tuple[fx.Node, ...]:
    """Calls as early as what they need allows, what needs their results as late: first all that
    needs no call, then what needs one, and so on; in program order otherwise. A call waits for none
    on its own lane, where that is told."""
    before: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for edge in edges:
        if edge.least == 0 and edge.src is not edge.dst:
            before[edge.dst].append(edge.src)
    slow = {n for n in calls if not at_once(n)}
    on = lanes or {}

    def waits(node: fx.Node, first: fx.Node) -> bool:
        return first in slow and (node not in on or on[node] != on.get(first))

    level: dict[fx.Node, int] = {}
    for node in nodes:  # program order: what a node needs stands in front of it
        level[node] = max((level[n] + waits(node, n) for n in before[node]), default=0)
    rank = {n: k for k, n in enumerate(nodes)}
    order: dict[fx.Node, None] = {}

    def put(node: fx.Node) -> None:
        needed = {node}
        todo = [node]
        while todo:
            for n in before[todo.pop()]:
                if n not in needed and n not in order:
                    needed.add(n)
                    todo.append(n)
        for n in sorted(needed, key=rank.__getitem__):
            order.setdefault(n)

    for at in range(max(level.values(), default=0) + 1):
        here = [n for n in nodes if level[n] == at]
        for node in (*(n for n in here if n in slow), *here):
            put(node)
    return tuple(order)


def _calls(graph: fx.Graph, once: bool) -> list[fx.Node]:
    return [n for n in graph.nodes if is_hosted(n) or (once and splits(n))]


def runs_once(owner: fx.Node | None, graph: fx.Graph, deps: Dependences) -> bool:
    """Whether a body is the program's own, or that of a loop with one trip, as a trip of the user's
    loop over iterations is."""
    if owner is None:
        return True
    known = deps.scope.iteration.get(graph) if is_call(owner, LOOP) else None
    return known is not None and known.trips == 1


def splits(node: fx.Node) -> bool:
    """Whether a node is a branch that can be left with calls of one component under way: its arms
    go on once they are answered."""
    if not is_call(node, BRANCH):
        return False
    calls = _inside(node)
    view = BranchView(node)
    if any(bodies.exits(g) for g in (view.then.graph, view.orelse.graph)):
        return False
    return any(not at_once(c) for c in calls) and len({_target(c) for c in calls}) == 1


def _inside(branch: fx.Node) -> list[fx.Node]:
    """The calls of components in hosts that stand in the arms of a branch themselves."""
    view = BranchView(branch)
    graphs = (view.then.graph, view.orelse.graph)
    return [n for graph in graphs for n in graph.nodes if is_hosted(n)]


def _target(call: fx.Node) -> fx.Node | None:
    """What the branch around a call captures as its component."""
    signature = op_of(call).signature
    written = next((w for w in signature.writes or () if w in signature.params), None)
    found = None if written is None else call.args[signature.params.index(written)]
    return found if isinstance(found, fx.Node) else None


def at_once(call: fx.Node) -> bool:
    """Whether a call has its answer when it is begun: parameters are copied there and then."""
    return is_hosted(call) and bool(op_of(call).attributes["hosted"] == "publish")


def _bodies(program: Program) -> list[tuple[fx.Node | None, fx.Graph]]:
    def below(module: fx.GraphModule) -> list[tuple[fx.Node | None, fx.Graph]]:
        found: list[tuple[fx.Node | None, fx.Graph]] = []
        for owner, child in children(module):
            found += [(owner, child.graph), *below(child)]
        return found

    return [(None, program.root.graph), *below(program.root)]
