"""Where the rows of a minibatch lie behind operations that lay out values anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rose_compiler.runtime.row_places import (
    SUM,
    Front,
    Known,
    Place,
    Rows,
    coupled,
    cut_others,
    dims_of,
    name,
    shape,
)


def filled(node: fx.Node, known: Known, position: int) -> Place:
    """Equal rows, if as many as the batch has."""
    if shape(node)[:1] != (known.count,) or len(args_of(node)) <= position:
        return None
    known.resize(node, position, 0)
    return Rows(0)


def _permuted(node: fx.Node, known: Known) -> Place:
    place = known.place(args_of(node)[0])
    if not isinstance(place, Rows):
        return place
    rank = len(shape(args_of(node)[0]))
    order = list(range(rank))
    if name(node) == "permute":
        order = [d % rank for d in args_of(node)[1]]
    else:
        one, two = (0, rank - 1) if name(node) == "t" else args_of(node)[1:3]
        order[one], order[two] = order[two], order[one]
    return Rows(order.index(place.axis), place.each)


def _viewed(node: fx.Node, known: Known) -> Place:
    place = known.place(args_of(node)[0])
    if not isinstance(place, Rows):
        return place
    old, new = shape(args_of(node)[0]), shape(node)
    before = math.prod(old[: place.axis])
    for k, size in enumerate(new):
        if size and size % known.count == 0 and math.prod(new[:k]) == before:
            known.resize(node, 1, k, size // known.count)
            return Rows(k, size // known.count)
    return coupled(node)


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a call, whose types its schema says."""
    return node.args


def expanded(node: fx.Node, known: Known) -> Place:
    source = args_of(node)[0]
    place, old, new = known.place(source), shape(source), shape(node)
    added = len(new) - len(old)
    if isinstance(place, Rows):
        known.resize(node, 1, place.axis + added, place.each)
        return Rows(place.axis + added, place.each)
    each = new[0] // known.count if new and new[0] % known.count == 0 else 0
    repeated = each > 0 and (added or old[0] == 1)
    if repeated and place is None:
        known.resize(node, 1, 0, each)
        return Rows(0, each)
    if repeated:
        raise Front(source)
    return place


def _same(node: fx.Node, known: Known) -> Place:
    place = known.place(args_of(node)[0])
    if place == SUM and not node.meta["val"].dtype.is_floating_point:
        raise Front(args_of(node)[0])
    return place


def _unsqueezed(node: fx.Node, known: Known) -> Place:
    place = known.place(args_of(node)[0])
    if not isinstance(place, Rows):
        return place
    dim = args_of(node)[1] % len(shape(node))
    return Rows(place.axis + (dim <= place.axis), place.each)


def _squeezed(node: fx.Node, known: Known) -> Place:
    place = known.place(args_of(node)[0])
    if not isinstance(place, Rows):
        return place
    if len(args_of(node)) < 2:
        return coupled(node)
    old = shape(args_of(node)[0])
    gone = [d for d in dims_of(args_of(node)[1], len(old)) if old[d] == 1]
    return Rows(place.axis - sum(d < place.axis for d in gone), place.each)


def _picked(node: fx.Node, known: Known) -> Place:
    """slice and select."""
    place = known.place(args_of(node)[0])
    if not isinstance(place, Rows):
        return place
    dim = (args_of(node)[1] if len(args_of(node)) > 1 else 0) % len(shape(args_of(node)[0]))
    if dim == place.axis:
        if shape(node) == shape(args_of(node)[0]):
            return place  # of a tile too: its end is behind the last row
        raise Front(node)
    return Rows(place.axis - (name(node) == "select" and dim < place.axis), place.each)


def _put_back(node: fx.Node, known: Known) -> Place:
    """slice_backward and select_backward."""
    place = known.place(args_of(node)[0])
    if not isinstance(place, Rows):
        return place
    dim = args_of(node)[2] % len(shape(node))
    axis = place.axis + (name(node) == "select_backward" and dim <= place.axis)
    if dim == axis:
        return coupled(node)
    known.resize(node, 1, axis, place.each)
    return Rows(axis, place.each)


def _joined(node: fx.Node, known: Known) -> Place:
    places = {known.place(n) for n in node.all_input_nodes}
    if places == {SUM}:
        return SUM
    if SUM in places:
        raise Front(next(n for n in node.all_input_nodes if known.places[n] == SUM))
    rows = {p for p in places if isinstance(p, Rows)}
    dim = (args_of(node)[1] if len(args_of(node)) > 1 else 0) % len(shape(node))
    if len(rows) != 1 or len({len(shape(n)) for n in node.all_input_nodes}) != 1:
        raise Front(node)
    (one,) = rows
    if name(node) == "cat":
        if dim == one.axis:
            raise Front(node)
        cut_others(node, known, one, len(shape(node)))
        return one
    cut_others(node, known, one, len(shape(node)) - 1)
    return Rows(one.axis + (dim <= one.axis), one.each)


def _indexed(node: fx.Node, known: Known) -> Place:
    source, indices = args_of(node)[:2]
    place = known.place(indices[0]) if len(indices) == 1 else None
    if known.place(source) is None and isinstance(place, Rows) and place.axis == 0:
        if indices[0].meta["val"].dtype in (torch.bool, torch.uint8):
            return coupled(node)
        return place
    raise Front(node)


def _item(node: fx.Node, known: Known) -> Place:
    places = known.place(args_of(node)[0])
    return places[args_of(node)[1]] if isinstance(places, tuple) else None


#: Operations with sizes, by the position of these.
FILLED = {"full": 0, "zeros": 0, "ones": 0, "empty": 0, "new_zeros": 1, "new_full": 1}
RULES: dict[str, Callable[[fx.Node, Known], Place]] = {
    **dict.fromkeys(("t", "transpose", "permute"), _permuted),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _viewed),
    **dict.fromkeys(("detach", "alias", "clone", "_to_copy", "lift_fresh_copy"), _same),
    **dict.fromkeys(("slice", "select"), _picked),
    **dict.fromkeys(("slice_backward", "select_backward"), _put_back),
    **dict.fromkeys(("cat", "stack"), _joined),
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "index": _indexed,
    "getitem": _item,
}
