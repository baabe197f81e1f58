"""Where the rows of a minibatch lie in each value of a graph of ATen operations.

A value is the same in all tiles of rows (``None``), has the rows of the batch along an axis
(:class:`Rows`), is a sum over the rows (:data:`SUM`: those of the tiles add up to that of the
batch), or says whether something holds in all rows (:data:`ALL`). What is the same in all tiles and
meets rows is cut to those of the tile. An operation that no rule knows, or that does more with a
sum than what is linear, has to be computed in front, of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """A value with the rows of the batch along ``axis``, a run of ``each`` entries for one row."""

    axis: int
    each: int = 1


SUM: Literal["sum"] = "sum"
ALL: Literal["all"] = "all"
#: None, Rows, SUM or ALL; a tuple of them for an operation with several results.
Place = Any
#: Gives a call that was copied into the graph of a tile its form for the rows ``start`` to
#: ``start + rows``, and returns what makes its value.
Edit = Callable[[fx.Node, int, int], fx.Node]


class Coupled(Exception):
    """Rows of the batch are not computed apart."""


class Front(Exception):
    """A value has to be computed of the whole batch, in front."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass
class Known:
    """The places of the values so far, and how calls change in a tile, for ``count`` rows."""

    count: int
    places: dict[fx.Node, Place] = field(default_factory=dict)
    edits: dict[fx.Node, list[Edit]] = field(default_factory=dict)

    def place(self, value: Any) -> Place:
        """The place of an operand; numbers are the same in all tiles."""
        return self.places[value] if isinstance(value, fx.Node) else None

    def edit(self, node: fx.Node, edit: Edit) -> None:
        """Change a call in each tile."""
        self.edits.setdefault(node, []).append(edit)

    def cut(self, node: fx.Node, value: fx.Node, axis: int, each: int) -> None:
        """Let a call take a tile's rows of an operand that is the same in all tiles."""

        position = node.all_input_nodes.index(value)

        def cut(made: fx.Node, start: int, rows: int) -> fx.Node:
            one = made.all_input_nodes[position]
            low, high = start * each, (start + rows) * each
            with made.graph.inserting_before(made):
                part = made.graph.call_function(aten.slice.Tensor, (one, axis, low, high))
            made.replace_input_with(one, part)
            return made

        self.edit(node, cut)

    def resize(self, node: fx.Node, argument: int, position: int, each: int = 1) -> None:
        """Put the rows of the tile in place of those of the batch among a call's sizes."""

        def resize(made: fx.Node, start: int, rows: int) -> fx.Node:
            sizes = list(made.args[argument])  # type: ignore[arg-type]  # they are sizes
            if sizes[position] == self.count * each:
                sizes[position] = rows * each
            args = list(made.args)
            args[argument] = sizes
            made.args = tuple(args)
            return made

        self.edit(node, resize)

    def weigh(self, node: fx.Node) -> None:
        """Weigh what a call makes with the tile's share of the rows."""

        def weigh(made: fx.Node, start: int, rows: int) -> fx.Node:
            with made.graph.inserting_after(made):
                return made.graph.call_function(aten.mul.Scalar, (made, rows / self.count))

        self.edit(node, weigh)

    def weigh_operand(self, node: fx.Node, position: int) -> None:
        """Weigh an operand, which is the same in all tiles, with the tile's share of the rows."""

        def weigh(made: fx.Node, start: int, rows: int) -> fx.Node:
            args = list(made.args)
            value: Any = args[position]
            if isinstance(value, fx.Node):
                with made.graph.inserting_before(made):
                    args[position] = made.graph.call_function(
                        aten.mul.Scalar, (value, rows / self.count)
                    )
            else:
                args[position] = value * (rows / self.count)
            made.args = tuple(args)
            return made

        self.edit(node, weigh)


def shape(node: Any) -> tuple[int, ...]:
    """The shape of a value when it was traced; empty for what is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def name(node: fx.Node) -> str:
    """The name of an ATen operation, without its namespace; else that of the function."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target._schema.name.partition("::")[2])
    return str(getattr(target, "__name__", target))


def writes(node: fx.Node) -> bool:
    """Whether an operation writes an operand."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def cut_others(node: fx.Node, known: Known, rows: Rows, rank: int) -> None:
    """Let a call take a tile's rows of what is the same in all tiles and has as many entries as
    there are, at the place of ``rows`` in values of ``rank`` axes."""
    for n in node.all_input_nodes:
        own = rows.axis - rank + len(shape(n))
        if known.places[n] is None and own >= 0 and shape(n)[own] == known.count * rows.each:
            known.cut(node, n, own, rows.each)


def dims_of(value: Any, rank: int) -> set[int]:
    """Axes counted from the front; all of them for ``None``."""
    if value is None or value == []:
        return set(range(rank))
    return {d % rank for d in ([value] if isinstance(value, int) else value)} if rank else set()


def coupled(node: fx.Node) -> NoReturn:
    """End the proof at a call.

    Raises:
        Coupled: always.
    """
    raise Coupled(f"`{name(node)}` takes all rows of the batch together")
