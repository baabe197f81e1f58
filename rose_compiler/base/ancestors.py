"""What values of a graph are computed from."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any, Protocol, TypeVar


class _Node(Hashable, Protocol):
    """A node of a ``torch.fx`` graph, which this layer does not import."""

    @property
    def all_input_nodes(self) -> list[Any]: ...


N = TypeVar("N", bound=_Node)


def ancestors(nodes: Iterable[N], ends: Collection[N] = ()) -> set[N]:
    """Nodes of a graph and all that they are computed from; what ``ends`` are computed from is left
    out."""
    found: set[N] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += () if node in ends else node.all_input_nodes
    return found
