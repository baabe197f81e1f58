"""Modulo schedules of one loop body: which trip an operation runs in, and in what order.

After Rau's iterative modulo scheduling (1994), for one resource: operations are issued one after
the other, and only steps run beside them. An operation of stage ``s`` runs, for trip ``t`` of the
program, in emitted trip ``t + s``. A dependence of distance ``d`` holds if
``(stage(src), order(src)) < (d + stage(dst), order(dst))``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from rose_compiler.ir.deps import Edge


@dataclass(frozen=True)
class Modulo:
    """Nodes of one body in issue order, and the stage of each."""

    order: tuple[fx.Node, ...]
    stage: dict[fx.Node, int]
    edges: tuple[Edge, ...]

    def position(self, node: fx.Node) -> int:
        """Where a node stands in the issue order."""
        return self.order.index(node)

    def beside(self, step: fx.Node) -> tuple[fx.Node, ...]:
        """What is issued between a step and the first operation that waits for it."""
        place = {n: k for k, n in enumerate(self.order)}
        here, size = place[step], len(self.order)
        gap = size
        for edge in self.edges:
            if edge.src is step and edge.dst in place:
                trips = edge.least + self.stage[edge.dst] - self.stage[step]
                gap = min(gap, place[edge.dst] - here + trips * size)
        return tuple(self.order[(here + k) % size] for k in range(1, gap))


def later_stage(
    nodes: Sequence[fx.Node], edges: Iterable[Edge], steps: set[fx.Node]
) -> dict[fx.Node, int]:
    """Stage 1 for what a step of the same trip has to be over for, stage 0 for the rest."""
    below: dict[fx.Node, list[fx.Node]] = {}
    for edge in edges:
        if edge.least == 0:
            below.setdefault(edge.src, []).append(edge.dst)
    stage = dict.fromkeys(nodes, 0)
    todo = list(steps)
    while todo:
        for node in below.get(todo.pop(), ()):
            if not stage.get(node, 1):
                stage[node] = 1
                todo.append(node)
    return stage


def schedule(
    nodes: Sequence[fx.Node],
    edges: Sequence[Edge],
    stage: dict[fx.Node, int],
    first: Sequence[fx.Node],
) -> Modulo:
    """Issue ``first`` as early as the dependences allow, one after the other, then the rest.

    The rest keeps program order within a trip, an earlier trip's before a later one's. Where trips
    don't overlap, what waits for none of ``first`` comes before what does.

    Raises:
        ValueError: when the stages break a dependence.
    """
    needs: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for edge in edges:
        gap = edge.least + stage[edge.dst] - stage[edge.src]
        if gap < 0:
            raise ValueError(f"the stages break {edge}")
        if gap == 0 and edge.src is not edge.dst:
            needs[edge.dst].append(edge.src)
    rank = {n: k for k, n in enumerate(sorted(nodes, key=lambda n: -stage[n]))}
    for found in needs.values():
        found.sort(key=rank.__getitem__)
    order: dict[fx.Node, None] = {}
    waiting = _waiting(nodes, edges, stage, set(first))
    early: dict[fx.Node, None] = {}
    for node in first:
        _emit(node, needs, early)
    # what is needed anyway and waits for no step is done before the first wait
    ready = [n for n in early if n not in waiting]
    rest = sorted(nodes, key=rank.__getitem__)
    if not any(stage.values()):
        rest.sort(key=waiting.__contains__)
    for node in (*ready, *first, *rest):
        _emit(node, needs, order)
    return Modulo(tuple(order), stage, tuple(edges))


def _waiting(
    nodes: Sequence[fx.Node],
    edges: Sequence[Edge],
    stage: dict[fx.Node, int],
    steps: set[fx.Node],
) -> set[fx.Node]:
    """What waits, in an emitted trip, for a step issued in it or in the one before."""
    users: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for edge in edges:
        gap = edge.least + stage[edge.dst] - stage[edge.src]
        if gap == 0 or (gap == 1 and edge.src in steps):
            users[edge.src].append(edge.dst)
    found = set(steps)
    todo = list(steps)
    while todo:
        for node in users[todo.pop()]:
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def _emit(node: fx.Node, needs: dict[fx.Node, list[fx.Node]], order: dict[fx.Node, None]) -> None:
    # depth first without recursion: bodies may hold thousands of nodes
    stack = [(node, iter(needs[node]))]
    under_way = {node}
    while stack:
        at, rest = stack[-1]
        if at in order:
            stack.pop()
            continue
        for before in rest:
            if before not in order:
                if before in under_way:
                    raise ValueError(f"{before} and {at} wait for each other")
                under_way.add(before)
                stack.append((before, iter(needs[before])))
                break
        else:
            order[at] = None
            stack.pop()
