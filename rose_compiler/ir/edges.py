"""The dependences between the nodes of one body: values, effects and control, with distances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch.fx as fx

from rose_compiler.ir import program, sym
from rose_compiler.ir.casts import CASTS, Casts, indifferent
from rose_compiler.ir.effects import EVERYTHING, Effect, related
from rose_compiler.ir.ops import BRANCH, BREAK_IF, SHARD, STATE
from rose_compiler.ir.program import LoopView, is_call
from rose_compiler.ir.recorded import Recorded
from rose_compiler.ir.scope import Iteration, nodes_in, root_of
from rose_compiler.ir.summary import Summary

Kind = Literal["value", "flow", "anti", "output", "control", "record"]


class Edge(NamedTuple):
    """``dst`` waits for ``src``.

    ``state`` names what both touch, for dependences through effects, or the tensor that both record
    graphs from (see :mod:`rose_compiler.ir.recorded`). ``distance`` is the exact
    number of trips between them, or ``None`` for any number from ``least`` on.
    """

    src: fx.Node
    dst: fx.Node
    kind: Kind
    state: str | None = None
    distance: int | None = 0
    least: int = 0

    def applies(self, distance: int) -> bool:
        """Whether it holds between trips that lie this far apart."""
        return distance >= self.least if self.distance is None else distance == self.distance

    def __str__(self) -> str:
        far = f"{self.least}.." if self.distance is None else str(self.distance)
        return f"{self.src} -> {self.dst} [{self.kind} {self.state or ''} {far}]"


def takes_part(node: fx.Node) -> bool:
    """Whether a node does something: bodies, shards and states below a root do not."""
    return node.op == "call_function" and not (is_call(node, STATE) or is_call(node, SHARD))


class Finder:
    """Finds the edges of one body; :meth:`run` once."""

    def __init__(self, scope: Summary, recorded: Recorded, casts: Casts, graph: fx.Graph) -> None:
        self.scope = scope
        self.recorded = recorded
        self.casts = casts
        self.graph = graph
        self.is_loop = graph in scope.iteration
        self.iteration = scope.iteration.get(graph, Iteration())
        self.nodes = [n for n in graph.nodes if takes_part(n)]
        # taking the next item of an iterator is a node of its own, in front of the trip
        heads = program.placeholders(graph)[:1] if self.is_loop else []
        self.heads = [h for h in heads if scope.effects(h)]
        self.private = scope.private(graph)
        # no two trips of a loop lie farther apart
        trips = self.iteration.trips
        self.farthest = float("inf") if trips is None else max(trips - 1, 0)
        # but what is handed down from value to value moves through all of them on the way, also
        # what no trip is left to read; a loop of one trip hands nothing on
        self.handed = float("inf") if self.farthest else 0
        # by (src, dst, kind, state): exact distances, and the least of the inexact ones
        self.exact: dict[tuple[fx.Node, fx.Node, Kind, str | None], set[int]] = {}
        self.any_from: dict[tuple[fx.Node, fx.Node, Kind, str | None], int] = {}

    def run(self) -> Iterator[Edge]:
        self._values()
        self._effects()
        self._control()
        self._casts()
        for first, second, tensor, trips in self.recorded.orders(self.graph, self.nodes):
            self._add(first, second, "record", tensor, None if trips else 0, trips)
        for key in dict.fromkeys([*self.exact, *self.any_from]):
            least = self.any_from.get(key)
            for d in sorted(self.exact.get(key, ())):
                if least is None or d < least:
                    yield Edge(*key, d, d)
            if least is not None:
                yield Edge(*key, None, least)

    def _add(
        self,
        src: fx.Node,
        dst: fx.Node,
        kind: Kind,
        state: str | None,
        distance: int | None,
        least: int = 0,
    ) -> None:
        key = (src, dst, kind, state)
        if distance is not None:
            if distance <= self.farthest:
                self.exact.setdefault(key, set()).add(distance)
        elif least < self.farthest:
            known = self.any_from.get(key)
            if known is None or least < known:
                self.any_from[key] = least
        elif least == self.farthest:
            self.exact.setdefault(key, set()).add(int(least))

    # -- values

    def _values(self) -> None:
        for node in self.nodes:
            for used in node.all_input_nodes:
                if takes_part(used):
                    self._add(used, node, "value", None, 0)
        if self.is_loop and (owner := self.scope.owner[self.graph]) is not None:
            self._carried(LoopView(owner))

    def _carried(self, loop: LoopView) -> None:
        carried = loop.carried
        position = {p: k for k, p in enumerate(carried)}
        exits = [n for n in self.scope.exits(self.graph) if not is_call(n, BREAK_IF)]
        for param in carried:
            # carried values that are only passed on reach back further than one trip
            users = [u for u in param.users if takes_part(u)]
            seen: set[tuple[int, int]] = set()
            stack = [(position[param], 1)]
            while stack:
                k, distance = stack.pop()
                if (k, distance) in seen or distance > len(carried) + 1:
                    continue
                seen.add((k, distance))
                handed = list(nodes_in(loop.carried_next[k : k + 1]))
                for at in exits:
                    handed += nodes_in(at.args[1][k : k + 1])  # type: ignore[index]
                for source in handed:
                    source = self._lift(source)
                    if source in position:
                        stack.append((position[source], distance + 1))
                    elif takes_part(source):
                        for user in users if distance <= self.handed else ():
                            self.exact.setdefault((source, user, "value", None), set()).add(
                                distance
                            )

    def _lift(self, node: fx.Node) -> fx.Node:
        """A node in a branch of this body as the value or branch of the body that it is."""
        found = node
        while found.graph is not self.graph:
            resolved = self.scope.resolve(found)
            if resolved is not found:
                found = resolved
                continue
            owner = self.scope.owner[found.graph]
            if owner is None:
                break
            found = owner
        return found

    # -- effects

    def _effects(self) -> None:
        touched: list[tuple[int, fx.Node, Effect]] = []
        for at, node in enumerate([*self.heads, *self.nodes]):
            touched += [(at, node, e) for e in self.scope.effects(node)]
        buckets: dict[str, list[tuple[int, fx.Node, Effect]]] = {}
        everything = [t for t in touched if t[2].state == EVERYTHING]
        for t in touched:
            if t[2].state != EVERYTHING:
                buckets.setdefault(root_of(t[2].state), []).append(t)
        for root, group in buckets.items():
            carried = self.is_loop and root not in self.private
            for n, x in enumerate(group):
                for y in group[n:]:
                    self._pair(x, y, carried)
                for y in everything:
                    self._pair(x, y, carried)
        for n, x in enumerate(everything):
            for y in everything[n:]:
                self._pair(x, y, self.is_loop)

    def _pair(
        self, x: tuple[int, fx.Node, Effect], y: tuple[int, fx.Node, Effect], carried: bool
    ) -> None:
        if not (x[2].write or y[2].write) or not related(x[2].state, y[2].state):
            return
        if x[0] > y[0]:
            x, y = y, x
        (i, a, ea), (j, b, eb) = x, y
        apart: int | sym.Never | None = None
        if ea.state == eb.state:
            apart = sym.distance(
                ea.region, eb.region, self.iteration.symbol, step=self.iteration.step
            )
        if apart == "never" or (apart is not None and apart != 0 and not carried):
            return
        state = _named(ea.state, eb.state)
        if apart is None:
            if i < j:
                self._add(a, b, _kind(ea, eb), state, None if carried else 0)
            if carried:
                self._add(b, a, _kind(eb, ea), state, None, 1)
                if i == j:
                    self._add(a, b, _kind(ea, eb), state, None, 1)
        elif apart > 0 or (apart == 0 and i < j):
            self._add(a, b, _kind(ea, eb), state, apart)
        elif apart < 0:
            self._add(b, a, _kind(eb, ea), state, -apart)

    # -- regions of autocast

    def _casts(self) -> None:
        """Nothing passes an operation whose region of autocast stays together, and so nothing gets
        between two of them."""
        held = {n for n in self.nodes if self.casts.keeps(n)}
        if not held:
            return
        nodes = [n for n in self.nodes if n in held or not indifferent(n)]
        every = None if self.is_loop else 0
        for at, a in enumerate(nodes):
            for b in nodes[at:]:
                if a not in held and b not in held:
                    continue
                if a is not b:
                    self._add(a, b, "output", CASTS, every)
                if self.is_loop:
                    self._add(b, a, "output", CASTS, None, 1)

    # -- control

    def _control(self) -> None:
        for at, node in enumerate(self.nodes):
            leaves = self._leaves(node)
            if leaves is None:
                continue
            # a break holds back all trips behind it, a continue only the rest of its own
            every = None if leaves and self.is_loop else 0
            for later in self.nodes[at + 1 :]:
                self._add(node, later, "control", None, every)
            for earlier in self.nodes[:at]:
                if any(e.write for e in self.scope.effects(earlier)):
                    self._add(earlier, node, "control", None, 0)
            if not self.is_loop:
                continue
            if leaves:
                for other in [*self.heads, *self.nodes]:
                    self._add(node, other, "control", None, None, 1)
            elif (owner := self.scope.owner[self.graph]) is not None:
                for param in LoopView(owner).carried:
                    for user in param.users:
                        if takes_part(user):
                            self._add(node, user, "control", None, 1)

    def _leaves(self, node: fx.Node) -> bool | None:
        """Whether a node may leave the loop; False if it may only end the trip; None if neither."""
        if program.is_exit(node):
            return is_call(node, BREAK_IF)
        if not is_call(node, BRANCH):
            return None
        view = program.BranchView(node)
        exits = [*self.scope.exits(view.then.graph), *self.scope.exits(view.orelse.graph)]
        return any(is_call(x, BREAK_IF) for x in exits) if exits else None


def _kind(src: Effect, dst: Effect) -> Kind:
    if src.write:
        return "output" if dst.write else "flow"
    return "anti"


def _named(a: str, b: str) -> str:
    """The more specific of two related state names."""
    if EVERYTHING in (a, b):
        return b if a == EVERYTHING else a
    return max(a, b, key=len)
