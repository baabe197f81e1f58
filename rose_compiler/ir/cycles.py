"""The recurrence that bounds how fast trips can follow each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import networkx as nx

N = TypeVar("N", bound=Hashable)

#: Differences below this are rounding.
_EPSILON = 1e-12


def max_ratio_cycle(
    edges: Iterable[tuple[N, N, int]], latency: Callable[[N], float]
) -> tuple[list[N], float, int] | None:
    """The cycle with the largest latency over distance: its nodes, latency and distance.

    Newton's method on the ratio (Dinkelbach, 1967): as long as some cycle beats the best ratio so
    far, that is as long as it is negative under distance * ratio - latency, take its ratio. A cycle
    without any distance would be a contradiction.
    """
    graph = nx.DiGraph()
    for src, dst, distance in edges:
        known = graph.get_edge_data(src, dst)
        if known is None or distance < known["distance"]:
            graph.add_edge(src, dst, distance=distance)
    best: tuple[list[N], float, int] | None = None
    for part in nx.strongly_connected_components(graph):
        # in the order given: which of two equal cycles is told must not hang on hashes
        inside: nx.DiGraph = nx.DiGraph()
        inside.add_nodes_from(n for n in graph if n in part)
        inside.add_edges_from(
            (u, v, data) for u, v, data in graph.edges(data=True) if u in part and v in part
        )
        if inside.number_of_edges() == 0:
            continue
        while True:
            ratio = 0.0 if best is None else best[1] / best[2]
            cycle = _beating(inside, latency, ratio)
            if cycle is None:
                break
            pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
            distance = sum(inside.edges[pair]["distance"] for pair in pairs)
            seconds = sum(latency(n) for n in cycle)
            if distance <= 0 or (best is not None and seconds / distance <= ratio + _EPSILON):
                break
            best = cycle, seconds, distance
    return best


def _beating(graph: nx.DiGraph, latency: Callable[[Any], float], ratio: float) -> list[Any] | None:
    """A cycle whose latency over distance is above ``ratio`` (Bellman-Ford)."""
    weights = [
        (u, v, data["distance"] * ratio - latency(u)) for u, v, data in graph.edges(data=True)
    ]
    far = dict.fromkeys(graph.nodes, 0.0)
    came: dict[Any, Any] = {}
    changed = None
    for _ in range(graph.number_of_nodes() + 1):
        changed = None
        for u, v, weight in weights:
            if far[u] + weight < far[v] - _EPSILON:
                far[v] = far[u] + weight
                came[v] = u
                changed = v
        if changed is None:
            return None
    at = changed
    for _ in range(graph.number_of_nodes()):  # back onto the cycle
        at = came[at]
    cycle = [at]
    while came[cycle[-1]] is not at:
        cycle.append(came[cycle[-1]])
    return cycle[::-1]
