"""A loss and its gradients in tiles of rows: proof that they add up to the whole, and their graphs.

The proof goes through the graph of ATen operations of forward and backward together: gradients of
parameters contract the rows of a minibatch, so they are sums over them. What takes all rows
together ends it, unless that is cheap, as the mean and deviation that advantages are whitened with:
then it is computed in front, of the whole batch. The proof hangs on no guess of which inputs are
rows; a wrong one only ends it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import OpOverload

from rose_compiler.base.ancestors import ancestors
from rose_compiler.runtime.row_places import (
    Coupled,
    Front,
    Known,
    Place,
    Rows,
    aten,
    name,
    shape,
    writes,
)
from rose_compiler.runtime.row_rules import placed

#: What computes too much to be done in front for the whole batch.
_HEAVY = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "native_layer_norm"}
    | {"_scaled_dot_product_flash_attention_for_cpu"}
)


@dataclass
class Tiling:
    """How the graph of a loss is computed in tiles of rows.

    ``count`` is the number of rows, ``given`` has the place of each input, ``made`` that of each
    output. ``front`` are the values that are computed of the whole batch and handed to each tile.
    """

    graph: fx.GraphModule
    count: int
    given: list[Place]
    made: list[Place] = field(default_factory=list)
    front: list[fx.Node] = field(default_factory=list)
    known: Known = field(default_factory=lambda: Known(0))

    def fronts(self) -> fx.GraphModule:
        """The graph of the values in front, of all inputs."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        needed = ancestors(self.front)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder" or node in needed:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[n] for n in self.front])
        return fx.GraphModule(self.graph, graph)

    def tile(self, start: int, rows: int) -> fx.GraphModule:
        """The graph of the tile of the rows ``start`` to ``start + rows``, of all inputs and the
        values in front."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        for node in inputs:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for node in self.front:
            copies[node] = graph.placeholder(f"front_{node.name}")
        for node, place in zip(inputs, self.given, strict=True):
            if isinstance(place, Rows):
                low, high = start * place.each, (start + rows) * place.each
                copies[node] = graph.call_function(
                    aten.slice.Tensor, (copies[node], place.axis, low, high)
                )
        for node in self.graph.graph.nodes:
            if node in copies:
                continue
            made = copies[node] = graph.node_copy(node, copies.__getitem__)
            for edit in self.known.edits.get(node, ()):
                changed = edit(made, start, rows)
                if changed is not made:
                    copies[node] = changed
        graph.eliminate_dead_code()
        return fx.GraphModule(self.graph, graph)


def tiling(graph: fx.GraphModule, whole: Collection[int], least: int) -> Tiling:
    """How a graph of ATen operations on tensors may be computed in tiles of rows.

    Args:
        graph: as ``make_fx`` traces it, with the shapes of its values.
        whole: positions of inputs that are no rows: parameters.
        least: rows that there must be.

    Raises:
        Coupled: with the operation that keeps rows from being computed apart.
    """
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    free = {n for k, n in enumerate(inputs) if k not in whole and shape(n) and not _picked_from(n)}
    why = f"nothing that it is handed has {least} rows"
    for count in sorted({shape(n)[0] for n in free if shape(n)[0] >= least}):
        places = [_rows_of(n, count) if n in free else None for n in inputs]
        try:
            return _proved(Tiling(graph, count, places))
        except Coupled as found:
            why = str(found)
    raise Coupled(why)


def _rows_of(node: fx.Node, count: int) -> Place:
    """The place of an input that may have a run of entries for each row."""
    size = shape(node)[0]
    return Rows(0, size // count) if size and size % count == 0 else None


def _picked_from(node: fx.Node) -> bool:
    """Whether rows are picked from an input: a buffer, of which a minibatch takes some."""
    for user in node.users:
        if user.target is aten.detach.default:
            if _picked_from(user):
                return True
        elif user.target is aten.index.Tensor and user.args[0] is node:
            return True
    return False


def _proved(found: Tiling) -> Tiling:
    """The tiling with all places; values are moved in front until the proof holds.

    Raises:
        Coupled: where it does not.
    """
    written = _written(found.graph.graph)
    while True:
        found.known = Known(found.count)
        try:
            found.made = _followed(found)
        except Front as asked:
            _movable(asked.node, written)
            found.front.append(asked.node)
            continue
        return found


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Values that an operation writes, and those that they are views of."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        while writes(node) or (node in found and _is_view(node)):
            node = node.args[0]
            found.add(node)
    return found


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.arguments:
        return False
    return target._schema.arguments[0].alias_info is not None


def _movable(node: fx.Node, written: set[fx.Node]) -> None:
    """Refuse to compute a value in front that takes too much, or is written.

    Raises:
        Coupled: then.
    """
    if not isinstance(node.meta.get("val"), torch.Tensor):
        raise Coupled(f"`{node.name}` takes all rows of the batch together")
    for one in ancestors([node]):
        if name(one) in _HEAVY:
            raise Coupled(f"`{node.name}` takes all rows of the batch together, behind {name(one)}")
        if one in written:
            raise Coupled(f"`{node.name}` is computed from what is written in place")


def _followed(found: Tiling) -> list[Place]:
    known = found.known
    given = iter(found.given)
    for node in found.graph.graph.nodes:
        if node.op == "placeholder":
            known.places[node] = next(given)
        elif node.op == "output":
            return [known.places[n] for n in node.args[0]]
        elif node in found.front:
            known.places[node] = None
        else:
            known.places[node] = placed(node, known)
    raise AssertionError("a graph without an output")
