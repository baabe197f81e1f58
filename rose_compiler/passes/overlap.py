"""Work that no training waits for, and branches that meet again, on threads of their own.

An evaluation on environments of its own, a checkpoint, a log: nothing that trains uses what they
make, so they may go on while it does, as long as what they read stays as it is. Of two operations
that both lead to an update and do not need each other (log-probabilities of a reference, and
advantages) one may run beside the other. Loops and branches go as wholes. What is handed over keeps
its order with all that it shares a state with: it is awaited in front of the first operation that
may write what it reads or read what it writes, in the next trip at the latest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, Edge, place, title, why
from rose_compiler.ir.effects import EVERYTHING, HOST
from rose_compiler.ir.ops import BRANCH, LOOP, STATE
from rose_compiler.ir.program import (
    LoopView,
    Program,
    children,
    is_call,
    is_exit,
    is_hosted,
    op_of,
)
from rose_compiler.ir.recorded import records
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import Pass, PassContext, context_of, is_work
from rose_compiler.passes.hosts import in_order
from rose_compiler.passes.lanes import why_casts
from rose_compiler.passes.late import write_slots
from rose_compiler.passes.modulo import Modulo
from rose_compiler.passes.place import TRAINING
from rose_compiler.passes.rendering import why_bound
from rose_compiler.passes.trainers import apart

#: Kinds of calls that take long enough to be worth a hand-over.
WORK = frozenset({"module", "step", "reset", "log", "component", "scan", "copy"})


@dataclass(frozen=True)
class Found:
    """What of one body may run aside.

    ``lanes`` has the lane of each operation that goes there; ``missed`` why others do not.
    """

    lanes: dict[fx.Node, str] = field(default_factory=dict)
    missed: dict[fx.Node, Blocker] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlap(Pass):
    """Give work that may run beside the training lanes of its own, ``thread:<name>``."""

    name: ClassVar[str] = "overlap"

    def run_program(self, program: Program, rewrite: Rewriter) -> None:
        context = context_of(rewrite)
        for owner, graph in list(bodies_of(program)):
            found = find(owner, graph, rewrite.deps)
            for node, blocker in found.missed.items():
                rewrite.missed(node, blocker)
            lanes = {}
            if found.lanes:
                lanes = self._body(owner, graph, found.lanes, rewrite, context)
            if lanes:
                program.stage = "scheduled"

    def _body(
        self,
        owner: fx.Node | None,
        graph: fx.Graph,
        wanted: dict[fx.Node, str],
        rewrite: Rewriter,
        context: PassContext,
    ) -> dict[fx.Node, str]:
        if blocker := _switched_off(context):
            rewrite.missed(next(iter(wanted)), blocker)
            return {}
        deps = rewrite.deps
        nodes = [n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE)]
        edges = tuple(e for e in deps.edges(graph) if e.src in nodes and e.dst in nodes)
        placed = {n: slot for n in nodes if (slot := facts.get(n).slot) is not None}
        if placed:
            order = tuple(sorted(placed, key=lambda n: placed[n].order))
            within = tuple(e for e in edges if e.src in placed and e.dst in placed)
            modulo = Modulo(order, {n: placed[n].stage for n in order}, within)
        else:
            order = in_order(nodes, edges, [n for n in nodes if n in wanted], wanted)
            modulo = Modulo(order, dict.fromkeys(nodes, 0), edges)
        alone = drains(owner, graph, deps)
        lanes: dict[fx.Node, str] = {}
        for lane in dict.fromkeys(wanted.values()):
            mine = [n for n in modulo.order if wanted.get(n) == lane]
            beside = beside_of(modulo, mine, wanted, alone)
            if not beside:
                rewrite.missed(mine[0], Blocker("no-window", "everything else waits for it"))
            elif rewrite.spend():
                lanes.update(dict.fromkeys(mine, lane))
                first = max(mine, key=_weight)
                what = f"runs on lane {lane!r} beside {len(beside)} operations"
                if any(is_call(n, LOOP) for n in beside):
                    what += f", {title(next(n for n in beside if is_call(n, LOOP)))} among them"
                rewrite.applied(first, what)
        if not lanes:
            return {}
        for node in lanes:
            for inner in below(node):
                if facts.get(inner).slot is not None:  # a thread has no lanes of its own
                    rewrite.set_facts(inner, slot=None)
        if placed:
            for node, lane in lanes.items():
                rewrite.set_facts(node, slot=replace(placed[node], lane=lane))
        else:
            write_slots(modulo, lanes, rewrite)
        return lanes


def _switched_off(context: PassContext) -> Blocker | None:
    if not context.options.overlap:
        return Blocker("switched-off", "the decision leaves it where it stands")
    if not context.run_ahead:
        return Blocker("may-raise", "run_ahead=False starts nothing beside a call")
    return None


def beside_of(
    modulo: Modulo, mine: Sequence[fx.Node], wanted: dict[fx.Node, str], alone: bool
) -> list[fx.Node]:
    """What the coordinator, or another lane, does while operations of one lane are under way."""
    found: dict[fx.Node, None] = {}
    for node in mine:
        after = modulo.position(node)
        for other in modulo.beside(node):
            if alone and modulo.position(other) < after:
                continue  # of the next trip, which begins when this one is over
            if wanted.get(other) != wanted[node] and is_heavy(other):
                found[other] = None
    return list(found)


def drains(owner: fx.Node | None, graph: fx.Graph, deps: Dependences) -> bool:
    """Whether nothing of one trip of a body may be under way in the next."""
    if owner is None or not is_call(owner, LOOP) or bodies.exits(graph):
        return True
    trips = deps.scope.iteration[graph].trips
    return trips is not None and trips < 2


# -- what may go


def find(owner: fx.Node | None, graph: fx.Graph, deps: Dependences) -> Found:
    """The operations of one body that may run on lanes of their own."""
    if owner is not None and not (is_call(owner, LOOP) and LoopView(owner).facts.kind != "while"):
        return Found()
    nodes = [n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE)]
    train = [n for n in nodes if kinds(n) & TRAINING or records(n)]
    if not train:
        return Found()
    found = Found()
    edges = deps.edges(graph)
    needed = leading_to(train, edges)
    for node in _only_by_draws(nodes, train, edges, needed):
        if blocker := _drawn(deps, node, needed):
            found.missed[node] = blocker
    side = [n for n in nodes if n not in needed and is_heavy(n) and not is_hosted(n)]
    taken: list[fx.Node] = []
    for node in side:
        blocker = why_not(node, deps)
        if blocker is None:
            taken.append(node)
        else:
            found.missed[node] = blocker
    # what only its results are for goes with it, or the coordinator would wait for them
    below = _following(taken, [n for n in nodes if n not in needed], edges, deps)
    for group in _groups([*taken, *below], edges):
        lane = _lane(max((n for n in nodes if n in group), key=_weight), found.lanes)
        found.lanes.update({n: lane for n in nodes if n in group})
    whole = functools.partial(why_not, deps=deps, whole=True)
    free = [n for n in nodes if n not in found.lanes]
    others, missed = apart(free, train, edges, deps, whole)
    found.missed.update(missed)
    for part in others:
        lane = _lane(max(part, key=lambda n: (records(n), _weight(n))), found.lanes)
        found.lanes.update(dict.fromkeys(part, lane))
    found.lanes.update(_parallel(nodes, train, found.lanes, edges, deps))
    return found


def _weight(node: fx.Node) -> int:
    """What of a group names it: a loop or branch, else the first that takes time."""
    return is_heavy(node) * (2 if is_call(node, LOOP) or is_call(node, BRANCH) else 1)


def _lane(node: fx.Node, taken: dict[fx.Node, str]) -> str:
    """A lane that nobody has yet, by the user's line."""
    where = place(node)
    name = f"thread:{node.name}" if where is None else f"thread:line{where.line}"
    return name if name not in taken.values() else f"{name}.{node.name}"


def kinds(node: fx.Node) -> frozenset[str]:
    """The kinds of component that a node calls, or the nodes in its bodies."""
    if is_call(node, LOOP) or is_call(node, BRANCH):
        return frozenset(k for g in bodies.graphs_of(node) for n in g.nodes for k in kinds(n))
    if not is_call(node):
        return frozenset()
    return frozenset({op_of(node).kind, *op_of(node).attributes.get("calls", ())})


def is_heavy(node: fx.Node) -> bool:
    """Whether an operation may take longer than handing it to another thread does."""
    if is_call(node, LOOP):
        return any(map(is_heavy, LoopView(node).graph.nodes))
    if is_call(node, BRANCH):
        return any(is_heavy(n) for g in bodies.graphs_of(node) for n in g.nodes)
    if not is_work(node):
        return is_call(node) and op_of(node).kind == "step"
    writes = op_of(node).signature.writes
    return bool(kinds(node) & (WORK | TRAINING)) or HOST in (writes or ())


def why_not(node: fx.Node, deps: Dependences, *, whole: bool = False) -> Blocker | None:
    """Why an operation can't run on a thread of its own, or None; ``whole``: together with all that
    its graph of gradients has to do with."""
    where = (at,) if (at := place(node)) else ()
    if records(node) and not whole:
        return Blocker(
            "grad-graph",
            f"{title(node)} records gradients, and of a graph made on two threads backward adds "
            "them up in another order",
            "`with torch.no_grad():` around it, if no gradient is wanted",
            where=where,
        )
    if any(e.state == EVERYTHING for e in deps.effects(node)):
        return Blocker(
            "unknown-effects",
            f"nothing is known of what {title(node)} reads and writes",
            "declare its reads and writes with `rose_compiler.component` or `declare`",
            where=where,
        )
    if blocker := why_casts(node):
        return blocker
    inside = list(below(node))
    if blocker := why_bound([n for n in (node, *inside) if is_work(n)], deps):
        return blocker
    if is_hosted(node) or any(map(is_hosted, inside)):
        return Blocker("no-lane", f"{title(node)} calls a component that has a host", where=where)
    if is_exit(node) or (is_call(node, BRANCH) and any(map(bodies.exits, bodies.graphs_of(node)))):
        return Blocker("early-exit", f"{title(node)} may end the trip", where=where)
    return None


def leading_to(train: Sequence[fx.Node], edges: Sequence[Edge]) -> set[fx.Node]:
    """Training and all whose values or writes it uses, on this trip or a later one."""
    before: dict[fx.Node, list[fx.Node]] = {}
    for edge in edges:
        if edge.kind in ("value", "flow", "control", "record"):
            before.setdefault(edge.dst, []).append(edge.src)
    needed = set(train)
    todo = list(train)
    while todo:
        for node in before.get(todo.pop(), ()):
            if node not in needed:
                needed.add(node)
                todo.append(node)
    return needed


def _only_by_draws(
    nodes: Sequence[fx.Node],
    train: Sequence[fx.Node],
    edges: Sequence[Edge],
    needed: set[fx.Node],
) -> list[fx.Node]:
    """What training needs for nothing but the numbers that it draws."""
    others = [e for e in edges if not (e.state or "").startswith("rng:")]
    less = leading_to(train, others)
    return [n for n in nodes if n in needed and n not in less and is_heavy(n)]


def _drawn(deps: Dependences, node: fx.Node, needed: set[fx.Node]) -> Blocker | None:
    for edge in deps.edges(node.graph):
        if edge.src is node and edge.kind == "flow" and edge.dst in needed:
            if not (edge.state or "").startswith("rng:"):
                continue
            distance = edge.least
            if blocker := why(deps, node, edge.dst, distance=distance):
                return blocker
    return None


def _following(
    taken: Sequence[fx.Node],
    rest: Sequence[fx.Node],
    edges: Sequence[Edge],
    deps: Dependences,
) -> list[fx.Node]:
    """What of the rest uses what was taken, on the same trip, and can go with it."""
    free = set(rest)
    found: dict[fx.Node, None] = dict.fromkeys(taken)
    todo = list(taken)
    while todo:
        node = todo.pop()
        for edge in edges:
            if edge.src is not node or edge.least or edge.dst in found or edge.dst not in free:
                continue
            if edge.dst.op == "call_function" and (
                not is_call(edge.dst) or why_not(edge.dst, deps) is None
            ):
                found[edge.dst] = None
                todo.append(edge.dst)
    return [n for n in found if n not in set(taken) and is_call(n)]


def _groups(members: Sequence[fx.Node], edges: Sequence[Edge]) -> list[set[fx.Node]]:
    """Operations that wait for each other, through picks of results too, in one group each."""
    graph = nx.Graph()
    graph.add_nodes_from(members)
    inside = set(members)
    for edge in edges:
        ends = [_source(n) for n in (edge.src, edge.dst)]
        if all(n in inside for n in ends):
            graph.add_edge(*ends)
    return [set(g) for g in nx.connected_components(graph)]


def _source(node: fx.Node) -> fx.Node:
    while not is_call(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _parallel(
    nodes: Sequence[fx.Node],
    train: Sequence[fx.Node],
    lanes: dict[fx.Node, str],
    edges: Sequence[Edge],
    deps: Dependences,
) -> dict[fx.Node, str]:
    """Operations on the way to training that do not need each other: one of two goes aside."""
    net = nx.DiGraph()
    net.add_nodes_from(nodes)
    net.add_edges_from((e.src, e.dst) for e in edges if not e.least)
    heavy = [n for n in nodes if is_heavy(n) and n not in lanes]
    stays = set(train) | {n for n in heavy if "step" in kinds(n) or why_not(n, deps)}
    found: dict[fx.Node, str] = {}
    for node in heavy:
        if node in stays or not kinds(node) & {"module"}:
            continue
        tied = {node, *nx.ancestors(net, node), *nx.descendants(net, node)}
        others = [n for n in heavy if n not in tied and n not in found]
        if others:
            stays.add(others[0])
            found[node] = _lane(node, {**lanes, **found})
    return found


def below(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes in the bodies of a loop or branch, those in bodies inside them included."""
    if is_call(node, LOOP) or is_call(node, BRANCH):
        for graph in bodies.graphs_of(node):
            for inner in graph.nodes:
                yield inner
                yield from below(inner)


def bodies_of(program: Program) -> Iterator[tuple[fx.Node | None, fx.Graph]]:
    """Every body of a program with the loop or branch it is of, an outer one first; the program's
    own is of none."""

    def below(module: fx.GraphModule) -> Iterator[tuple[fx.Node | None, fx.Graph]]:
        for owner, child in children(module):
            yield owner, child.graph
            yield from below(child)

    yield None, program.root.graph
    yield from below(program.root)


def overlapping(program: Program) -> bool:
    """Whether anything of a program may run on a lane of its own."""
    deps = Dependences(program)
    return any(find(owner, graph, deps).lanes for owner, graph in bodies_of(program))
