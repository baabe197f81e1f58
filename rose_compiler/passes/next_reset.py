"""The reset at the beginning of the next trip, beside the update that this one ends with.

A reset needs nothing of the update in front of it: its environments have taken their last step by
then. So its trip begins with it and all else comes one trip later: the reset of trip t + 1 is
handed to a thread as soon as the dependences allow, behind the last step of trip t, and awaited
where its observations are used. Resets of evaluation environments go the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
import torch.fx as fx

from rose_compiler.base.decision import Decision
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, Edge, place, title, why
from rose_compiler.ir.ops import BRANCH, LOOP, STATE
from rose_compiler.ir.program import LoopView, Program, is_call
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of
from rose_compiler.passes.late import write_slots
from rose_compiler.passes.modulo import Modulo, schedule
from rose_compiler.passes.overlap import bodies_of, drains, find, is_heavy, kinds, why_not
from rose_compiler.passes.place import TRAINING


@dataclass(frozen=True)
class NextReset(Pass):
    """Begin the resets of the next trip while the trip in front of them still trains."""

    name: ClassVar[str] = "next_reset"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        for owner, graph in list(bodies_of(program)):
            resets = _resets(owner, graph, rewrite.deps)
            if resets and self._body(owner, graph, resets, rewrite):
                program.stage = "scheduled"

    def _body(
        self,
        owner: fx.Node | None,
        graph: fx.Graph,
        resets: Sequence[fx.Node],
        rewrite: Rewriter,
    ) -> bool:
        deps = rewrite.deps
        if blocker := _held(owner, graph, deps, context_of(rewrite)):
            rewrite.missed(resets[0], blocker)
            return False
        nodes, edges = _parts(graph, deps)
        free: dict[fx.Node, int] = {}  # a reset, and where it could stand
        for reset in resets:
            found = _earliest(reset, nodes, edges, deps)
            if isinstance(found, Blocker):
                rewrite.missed(reset, found)
            elif rewrite.spend():
                free[reset] = found
        if not free:
            return False
        first = sorted(free, key=free.__getitem__)  # none waits for a later one's trip to end
        modulo = _modulo(first, nodes, edges)
        for reset in first:
            beside = [n for n in modulo.beside(reset) if is_heavy(n)]
            trains = [n for n in beside if _trains(n)]
            rewrite.applied(
                reset,
                f"the next trip's runs beside {len(beside)} operations of this one"
                + (f", {title(trains[0])} among them" if trains else ""),
            )
        write_slots(modulo, {n: _lane(n) for n in first}, rewrite)
        return True


def _resets(owner: fx.Node | None, graph: fx.Graph, deps: Dependences) -> list[fx.Node]:
    """Resets in a body that trains, and that stand in it themselves."""
    if owner is not None and not is_call(owner, LOOP):
        return []
    calls = [n for n in graph.nodes if is_call(n)]
    if not any(_trains(n) for n in calls):
        return []
    found = [
        n for n in calls if "reset" in kinds(n) and not (is_call(n, LOOP) or is_call(n, BRANCH))
    ]
    aside = find(owner, graph, deps).lanes if found else {}
    return [n for n in found if n not in aside]


def _trains(node: fx.Node) -> bool:
    """Whether a node trains, and is no whole training that steps its simulator too."""
    found = kinds(node)
    return bool(found & TRAINING) and "step" not in found


def _held(
    owner: fx.Node | None, graph: fx.Graph, deps: Dependences, context: PassContext
) -> Blocker | None:
    """Why no trip of a body can begin before the one in front of it has ended, or None."""
    if not context.options.overlap:
        return Blocker("switched-off", "the decision resets where the reset stands")
    if not context.run_ahead:
        return Blocker("may-raise", "run_ahead=False resets nothing before the update is over")
    if owner is not None and (exits := bodies.exits(graph)):
        return Blocker(
            "early-exit",
            f"{LoopView(owner).label} may stop at {title(exits[0])}, and then nothing is reset",
            where=(at,) if (at := place(exits[0])) else (),
        )
    if owner is not None and LoopView(owner).facts.kind != "range":
        return Blocker("early-exit", f"{LoopView(owner).label} may stop after any trip")
    if drains(owner, graph, deps):
        return Blocker(
            "single-trip",
            "the next reset is not known before the function is called again",
            "a function that holds the loop over iterations",
        )
    if any(facts.get(n).slot is not None for n in graph.nodes):
        return Blocker("no-window", "its body steps a simulator, and is scheduled around that")
    return None


def _earliest(
    reset: fx.Node, nodes: Sequence[fx.Node], edges: Sequence[Edge], deps: Dependences
) -> int | Blocker:
    """Where among a trip's operations the next trip's reset may begin, or why it may not."""
    if blocker := why_not(reset, deps):
        return blocker
    for node in _heads([reset], edges):
        if node is not reset and (is_heavy(node) or why_not(node, deps)):
            return why(deps, node, reset) or Blocker("no-window", f"{title(node)} comes first")
    modulo = _modulo([reset], nodes, edges)
    if any(map(_trains, modulo.beside(reset))):
        return modulo.position(reset)
    for node in nodes:
        if _trains(node) and (blocker := why(deps, node, reset, distance=1)):
            return blocker
    return Blocker("no-window", "nothing trains between the last step and the reset")


def _parts(graph: fx.Graph, deps: Dependences) -> tuple[list[fx.Node], list[Edge]]:
    nodes = [n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE)]
    return nodes, [e for e in deps.edges(graph) if e.src in nodes and e.dst in nodes]


def _heads(resets: Sequence[fx.Node], edges: Sequence[Edge]) -> set[fx.Node]:
    """Resets and all that they wait for on the same trip."""
    net = nx.DiGraph()
    net.add_nodes_from(resets)
    net.add_edges_from((e.src, e.dst) for e in edges if not e.least)
    return {n for reset in resets for n in (reset, *nx.ancestors(net, reset))}


def _modulo(resets: Sequence[fx.Node], nodes: Sequence[fx.Node], edges: Sequence[Edge]) -> Modulo:
    heads = _heads(resets, edges)
    return schedule(nodes, edges, {n: int(n not in heads) for n in nodes}, resets)


def _lane(reset: fx.Node) -> str:
    where = place(reset)
    return f"thread:{reset.name}" if where is None else f"thread:reset{where.line}"


def resetting(program: Program) -> bool:
    """Whether a reset of a program may run beside an update."""
    deps, context = Dependences(program), PassContext(options=Decision(overlap=True))
    for owner, graph in bodies_of(program):
        resets = _resets(owner, graph, deps)
        if not resets or _held(owner, graph, deps, context):
            continue
        nodes, edges = _parts(graph, deps)
        if any(isinstance(_earliest(r, nodes, edges, deps), int) for r in resets):
            return True
    return False
