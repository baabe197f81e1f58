"""Dependences between the nodes of one body: values, effects, control and the order of recording,
with distances.

A dependence of distance d says that its destination, in the trip d after that of its source, has to
wait for it. ``docs/house.md`` states what may leave program order: whatever no dependence holds.
"""

from __future__ import annotations

import re
import textwrap
from collections import deque
from collections.abc import Iterable

import networkx as nx
import torch.fx as fx

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts, program
from rose_compiler.ir.casts import CASTS, Casts
from rose_compiler.ir.edges import Edge as Edge
from rose_compiler.ir.edges import Finder, takes_part
from rose_compiler.ir.effects import EVERYTHING, Effect
from rose_compiler.ir.ops import LOOP, OpTable
from rose_compiler.ir.program import LoopView, Program, is_call, is_item
from rose_compiler.ir.recorded import Recorded
from rose_compiler.ir.scope import OUTPUTS, root_of
from rose_compiler.ir.summary import Summary


def effects_of(node: fx.Node, of: Program | None = None) -> tuple[Effect, ...]:
    """What a node reads and writes.

    Loops and branches have the union of what is in them, with the indices of inner loops left out.
    Without the program, names are resolved in the node's own graph and below only: an index that
    comes from outside then covers its axis.
    """
    if of is None:
        owner = node.graph.owning_module
        assert isinstance(owner, fx.GraphModule)
        of = Program("", owner, OpTable())
    return Summary(of).effects(node)


class Dependences:
    """The dependences of a program as it stands; after a rewrite, build a new one."""

    def __init__(self, of: Program) -> None:
        self.program = of
        self.scope = Summary(of)
        self.recorded = Recorded(self.scope)
        self.casts = Casts(self.scope)
        self._edges: dict[fx.Graph, tuple[Edge, ...]] = {}
        self._by_source: dict[fx.Graph, dict[fx.Node, list[Edge]]] = {}

    def effects(self, node: fx.Node) -> tuple[Effect, ...]:
        """What a node reads and writes."""
        return self.scope.effects(node)

    summary = effects

    def edges(self, graph: fx.Graph) -> tuple[Edge, ...]:
        """All dependences between nodes of one body, those between trips of its loop included."""
        if graph not in self._edges:
            self._edges[graph] = tuple(Finder(self.scope, self.recorded, self.casts, graph).run())
        return self._edges[graph]

    def between(self, a: fx.Node, b: fx.Node, distance: int = 0) -> tuple[Edge, ...]:
        """The direct dependences of ``b`` on ``a``, ``distance`` trips of their loop earlier.

        Nodes of different bodies are taken as the nodes of the innermost common body they lie in.
        """
        a, b = self.common(a, b, distance)
        return tuple(e for e in self._outgoing(a) if e.dst is b and e.applies(distance))

    def path(self, a: fx.Node, b: fx.Node, distance: int = 0) -> tuple[Edge, ...] | None:
        """A shortest chain by which ``b``, ``distance`` trips later, waits for ``a``, if any."""
        a, b = self.common(a, b, distance)
        # a state is (node, trips gone by); an inexact edge may take any number from its least on
        start = (a, 0)
        came: dict[tuple[fx.Node, int], tuple[tuple[fx.Node, int], Edge]] = {}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            node, gone = here
            for edge in self._outgoing(node):
                if edge.distance is not None:
                    reach: Iterable[int] = (gone + edge.distance,)
                else:
                    reach = range(gone + edge.least, distance + 1)
                for trips in reach:
                    there = (edge.dst, trips)
                    if trips > distance or there in came or there == start:
                        continue
                    came[there] = (here, edge)
                    if there == (b, distance):
                        return _unwind(came, there, start)
                    queue.append(there)
        return None

    def network(self, graph: fx.Graph) -> nx.MultiDiGraph:
        """The dependences of one body as a networkx graph; edges carry ``edge``."""
        net = nx.MultiDiGraph()
        net.add_nodes_from(n for n in graph.nodes if takes_part(n))
        net.add_edges_from((e.src, e.dst, {"edge": e}) for e in self.edges(graph))
        return net

    def common(self, a: fx.Node, b: fx.Node, distance: int = 0) -> tuple[fx.Node, fx.Node]:
        """The nodes of the innermost common body that ``a`` and ``b`` are or lie in.

        With a distance it is the body of the innermost common loop.

        Raises:
            ValueError: when a distance is asked for and no loop holds both.
        """
        chain_a, chain_b = self._chain(a), self._chain(b)
        for graph, at in chain_a.items():
            if graph in chain_b and (distance == 0 or graph in self.scope.iteration):
                return at, chain_b[graph]
        raise ValueError(f"no loop holds both {a} and {b}")

    def _chain(self, node: fx.Node) -> dict[fx.Graph, fx.Node]:
        found = {node.graph: node}
        owner = self.scope.owner[node.graph]
        while owner is not None:
            found[owner.graph] = owner
            owner = self.scope.owner[owner.graph]
        return found

    def _outgoing(self, node: fx.Node) -> list[Edge]:
        graph = node.graph
        if graph not in self._by_source:
            index: dict[fx.Node, list[Edge]] = {}
            for edge in self.edges(graph):
                index.setdefault(edge.src, []).append(edge)
            self._by_source[graph] = index
        return self._by_source[graph].get(node, [])


def _unwind(
    came: dict[tuple[fx.Node, int], tuple[tuple[fx.Node, int], Edge]],
    at: tuple[fx.Node, int],
    start: tuple[fx.Node, int],
) -> tuple[Edge, ...]:
    edges: list[Edge] = []
    while not edges or at != start:
        at, edge = came[at]
        edges.append(edge)
    return tuple(reversed(edges))


# -- questions


def why(of: Program | Dependences, a: fx.Node, b: fx.Node, *, distance: int = 0) -> Blocker | None:
    """What stops ``b`` of the trip ``distance`` later from running beside or before ``a``.

    ``None``: nothing does, directly or through other operations. Nodes of different bodies are
    taken as the loops or branches of the innermost common body that they lie in. On the same trip
    the answer does not depend on the order of the two.

    Raises:
        ValueError: when a distance is asked for and no loop holds both.
    """
    deps = of if isinstance(of, Dependences) else Dependences(of)
    top_a, top_b = deps.common(a, b, distance)
    if distance == 0:
        if top_a is top_b:
            return None if a is b else _nested(a, b)
        if program_position(top_b) < program_position(top_a):
            a, b, top_a, top_b = b, a, top_b, top_a
    chain = deps.path(top_a, top_b, distance)
    return None if chain is None else _blocker(deps, a, b, chain, distance)


def program_position(node: fx.Node) -> int:
    """Where a node stands in its graph."""
    return next(k for k, n in enumerate(node.graph.nodes) if n is node)


def place(node: fx.Node) -> SourceLocation | None:
    """The user's line that a node comes from."""
    return facts.get(node).origin.where


#: Why nothing comes between the operations of a region of autocast, in words.
TOGETHER = "lies in a region of autocast that keeps casts of weights, and stays as it is"

#: Names that capture gives to statements.
_NUMBERED = re.compile(r"blk(_\d+)?")


def title(node: fx.Node) -> str:
    """A node as remarks name it, with the user's line."""
    if is_item(node) and isinstance(node.args[0], fx.Node):
        name = title_name(node.args[0])
    else:
        name = title_name(node)
    where = place(node)
    return f"`{name}` ({where})" if where else f"`{name}`"


def title_name(node: fx.Node) -> str:
    """A node's name without its line: the label of a loop, the user's statement where capture has
    only numbered it, else what it calls."""
    if is_call(node, LOOP):
        return LoopView(node).label
    if not is_call(node):
        return node.name
    op = program.op_of(node)
    if op.source and _NUMBERED.fullmatch(op.name):
        lines = op.source[0].splitlines()
        return textwrap.shorten(lines[0], 48, placeholder=" …") + (" …" if lines[1:] else "")
    return op.name


def _nested(a: fx.Node, b: fx.Node) -> Blocker:
    return Blocker(
        "unsupported-shape",
        f"{title(a)} and {title(b)} lie in one branch, or one holds the other",
        where=_places(a, b),
    )


def _places(*nodes: fx.Node) -> tuple[SourceLocation, ...]:
    return tuple(dict.fromkeys(w for n in nodes if (w := place(n)) is not None))


def _blocker(
    deps: Dependences, a: fx.Node, b: fx.Node, chain: tuple[Edge, ...], distance: int
) -> Blocker:
    telling = next((e for e in chain if e.kind != "value"), chain[0])
    code, what, allow = _explain(deps, telling, distance)
    between = [title(e.dst) for e in chain[:-1] if not is_item(e.dst)]
    through = [t for t in dict.fromkeys(between) if t not in (title(a), title(b))]
    if through:
        what = f"{title(b)} waits for {title(a)} through {', '.join(through)}: {what}"
    return Blocker(code, what, allow, where=_places(a, b))


def _explain(deps: Dependences, edge: Edge, distance: int) -> tuple[str, str, str | None]:
    src, dst, state = title(edge.src), title(edge.dst), edge.state
    later = "" if edge.applies(0) or distance == 0 else " on a later trip"
    if edge.kind == "value":
        code = "value-dependence" if edge.distance == 0 else "carried-dependence"
        return code, f"{dst} uses what {src} makes{later}", None
    if edge.kind == "control":
        return "early-exit", f"whether {dst} runs hangs on {src}{later}", None
    if edge.kind == "record":
        return "grad-graph", recorded_order(edge) + later, None
    if state == CASTS:
        held = src if deps.casts.keeps(edge.src) else dst
        return "mode-change", f"{held} {TOGETHER}", None
    unknown = [n for n in (edge.src, edge.dst) if _unknown(deps, n)]
    does = {"flow": "reads", "anti": "writes", "output": "writes"}[edge.kind]
    did = "reads" if edge.kind == "anti" else "writes"
    what = f"{src} {did} {state} and {dst} {does} it{later}"
    if unknown:
        names = " and ".join(title(n) for n in dict.fromkeys(unknown))
        return (
            "unknown-effects",
            f"nothing is known of what {names} reads and writes, so it may touch everything",
            "declare its reads and writes with `rose_compiler.component` or `declare`",
        )
    assert state is not None
    if state.startswith("rng:"):
        return "draw-order", f"{src} and {dst} draw from {state}{later}", None
    if state.endswith(f".{OUTPUTS}") and edge.kind == "anti":
        return (
            "borrowed-buffer",
            f"{src} reads a buffer of {state.rsplit('.', 1)[0]} that {dst} overwrites{later}",
            "a snapshot of the value",
        )
    if root_of(state) in deps.scope.retained(edge.src.graph):
        return "retained-instance", f"{what}; a call may have kept it", None
    if edge.kind == "flow" and edge.distance != 0 and not edge.applies(0):
        return "carried-dependence", what, None
    return "effects-conflict", what, None


def recorded_order(edge: Edge) -> str:
    """Why two operations that record gradients keep their order, in words."""
    named = edge.state is not None and edge.state[0] not in "%*"
    shared = edge.state if named else "what they share"
    return (
        f"{title(edge.src)} and {title(edge.dst)} record gradients, and those of {shared} add up "
        "in the order that they run in"
    )


def _unknown(deps: Dependences, node: fx.Node) -> bool:
    return any(e.state == EVERYTHING for e in deps.effects(node))
