"""Updates of models that have nothing to do with each other, as wholes.

A curiosity model with an optimizer of its own, one of two critics: what such a model records, its
way back and its step touch nothing that another update touches. A graph that is recorded on one
thread and gone back through on the same adds its gradients up in the order that it always did, so
one of two such updates may run beside the other; a graph of two threads may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, Edge, place, title, why
from rose_compiler.ir.effects import GLOBAL_STATES
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import is_call, is_item, is_state, op_of
from rose_compiler.ir.recorded import goes_back, has_graph, picked_from

#: ``why_not(node)``: why an operation can't run on a thread, whatever it records.
WhyNot = Callable[[fx.Node], Blocker | None]


def updates(
    nodes: Sequence[fx.Node], train: Sequence[fx.Node], edges: Sequence[Edge]
) -> list[list[fx.Node]]:
    """What records gradients or trains in one body, in program order, one list for each update:
    operations that share a graph, gradients, parameters or an optimizer are of the same one."""
    net = nx.Graph()
    net.add_nodes_from(train)
    inside = set(train)
    for edge in edges:
        ends = picked_from(edge.src), picked_from(edge.dst)
        if ends[0] in inside and ends[1] in inside and not _of_all(edge.state):
            net.add_edge(*ends)
    found = [[n for n in nodes if n in part] for part in nx.connected_components(net)]
    return sorted(found, key=lambda part: nodes.index(part[0]))


def apart(
    nodes: Sequence[fx.Node],
    train: Sequence[fx.Node],
    edges: Sequence[Edge],
    deps: Dependences,
    why_not: WhyNot,
) -> tuple[list[list[fx.Node]], dict[fx.Node, Blocker]]:
    """Updates that may run beside the largest one of a body, each with what only it needs; and why
    others may not."""
    parts = [p for p in updates(nodes, train, edges) if any(map(goes_back, p))]
    found: list[list[fx.Node]] = []
    missed: dict[fx.Node, Blocker] = {}
    if len(parts) < 2:
        return found, missed
    largest = max(parts, key=lambda part: sum(map(_size, part)))
    for part in parts:
        if part is largest:
            continue
        if blocker := _held(part, largest, deps, why_not):
            missed[part[0]] = blocker
        else:
            found.append(_with_inputs(part, nodes, edges, why_not))
    return found, missed


def _held(
    part: Sequence[fx.Node], largest: Sequence[fx.Node], deps: Dependences, why_not: WhyNot
) -> Blocker | None:
    """Why one update can't run on a thread beside another, or None."""
    for node in part:
        if blocker := why_not(node):
            return blocker
        if any(is_call(n) and op_of(n).kind == "loss" for n in _all(node)):
            what = f"the compiled loss of {title(node)} runs where it is compiled"
            return Blocker("no-lane", what, where=_places(node))
        for value in node.all_input_nodes:
            made = picked_from(value)
            if made not in part and not is_state(value) and has_graph(facts.get(value).spec):
                return Blocker(
                    "grad-graph",
                    f"{title(node)} goes on recording from `{value.name}`, which another thread "
                    "has recorded",
                    where=_places(node),
                )
    for one in part:
        for other in largest:
            if blocker := why(deps, one, other):
                return blocker
    return None


def _with_inputs(
    part: Sequence[fx.Node], nodes: Sequence[fx.Node], edges: Sequence[Edge], why_not: WhyNot
) -> list[fx.Node]:
    """An update with what only it waits for: zeroed gradients, targets."""
    users: dict[fx.Node, set[fx.Node]] = {}
    for edge in edges:
        if not edge.least:
            users.setdefault(edge.src, set()).add(edge.dst)
    inside = set(part)
    for node in reversed(nodes):
        below = users.get(node, set()) - {node}
        if node in inside or not below or not below <= inside:
            continue
        simulates = any(is_call(n) and op_of(n).kind == "step" for n in _all(node))
        if is_item(node) or (is_call(node) and not simulates and why_not(node) is None):
            inside.add(node)
    return [n for n in nodes if n in inside and is_call(n)]


def _size(node: fx.Node) -> int:
    return sum(1 for n in _all(node) if is_call(n))


def _all(node: fx.Node) -> Iterator[fx.Node]:
    yield node
    if is_call(node, LOOP) or is_call(node, BRANCH):
        for graph in bodies.graphs_of(node):
            for inner in graph.nodes:
                yield from _all(inner)


def _of_all(state: str | None) -> bool:
    """Whether a state is one of the process: what draws or prints shares nothing else by that."""
    return state is not None and (state in GLOBAL_STATES or state.startswith("rng:"))


def _places(node: fx.Node) -> tuple:
    return (at,) if (at := place(node)) else ()
