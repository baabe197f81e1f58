"""Where the rows of a minibatch lie in what an ATen operation makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from rose_compiler.runtime import row_layers, row_views
from rose_compiler.runtime.row_places import (
    ALL,
    SUM,
    Coupled,
    Front,
    Known,
    Place,
    Rows,
    coupled,
    cut_others,
    dims_of,
    name,
    shape,
    writes,
)
from rose_compiler.runtime.row_views import FILLED, expanded, filled


def placed(node: fx.Node, known: Known) -> Place:
    """The place of what an operation makes.

    Raises:
        Front: where it can only be computed of the whole batch.
        Coupled: where not even that would do.
    """
    given = [known.places[n] for n in node.all_input_nodes]
    called = name(node)
    if _draws(node, called):
        raise Coupled(f"`{called}` draws random numbers")
    if called in FILLED:
        return filled(node, known, FILLED[called])
    if called.endswith("_like"):
        return None if given[0] in (SUM, ALL) else given[0]
    if ALL in given:
        return _all(node, called, given)
    if called == "expand":
        return expanded(node, known)
    if not any(given):
        return None
    rule = _RULES.get(called)
    if rule is None and is_pointwise(node, called):
        rule = _pointwise
    if rule is None:
        raise Front(node)
    place = rule(node, known)
    if writes(node) and place != known.place(node.args[0]):
        raise Coupled(f"`{called}` writes what is the same in all tiles")
    return place


def _draws(node: fx.Node, called: str) -> bool:
    if called == row_layers.FLASH and not any(isinstance(a, float) and a for a in node.args[3:4]):
        return False  # nothing is dropped
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_pointwise(node: fx.Node, called: str) -> bool:
    """Whether each entry of what an operation makes follows from those at its place."""
    target: Any = node.target
    tagged = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return tagged or called in _POINTWISE


def _all(node: fx.Node, called: str, given: list[Place]) -> Place:
    if called in ("all", "detach", "bitwise_and", "logical_and", "alias", "clone") and set(
        given
    ) <= {ALL, None}:
        return ALL
    raise Coupled(f"`{called}` takes what is known of all rows only")


def _pointwise(node: fx.Node, known: Known) -> Place:
    given = {n: known.places[n] for n in node.all_input_nodes}
    if SUM in given.values():
        return _linear(node, known)
    out = shape(node)
    rank = len(out)
    found = {
        Rows(p.axis + rank - len(shape(n)), p.each) for n, p in given.items() if isinstance(p, Rows)
    }
    if len(found) != 1:
        raise Coupled(f"`{name(node)}` takes rows along two axes")
    (rows,) = found
    cut_others(node, known, rows, rank)
    return rows


def _linear(node: fx.Node, known: Known) -> Place:
    """What is linear in sums over rows; the sum itself is computed in front for anything else."""
    called, args = name(node), node.args
    sums = [a for a in node.all_input_nodes if known.places[a] == SUM]
    places = [known.place(a) for a in args[:2]]
    floating = node.meta["val"].dtype.is_floating_point
    if not floating or any(isinstance(p, Rows) for p in map(known.place, node.all_input_nodes)):
        raise Front(sums[0])
    if called in ("neg", "positive"):
        return SUM
    if called == "mul" and places.count(SUM) == 1 and None in places:
        return SUM
    if called == "div" and places[0] == SUM and places[1] is None and not node.kwargs:
        return SUM
    if called in ("add", "sub", "rsub"):
        if None in places:
            known.weigh_operand(node, places.index(None))
        return SUM
    raise Front(sums[0])


def _reduced(node: fx.Node, known: Known) -> Place:
    """sum, mean, and what reduces along other axes than the rows'."""
    source, called = node.args[0], name(node)
    if len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        return _pointwise(node, known)  # the greater one of two
    place, linear = known.place(source), called in ("sum", "mean")
    if not isinstance(place, Rows):
        if not linear:
            raise Front(source)  # type: ignore[arg-type]  # it has a place
        return place
    rank = len(shape(source))
    dims = dims_of(node.args[1] if len(node.args) > 1 else None, rank)
    if place.axis in dims:
        if not linear or node.kwargs.get("dtype") is not None:
            raise Front(node)
        if not node.meta["val"].dtype.is_floating_point:
            return SUM if called == "sum" else coupled(node)
        if called == "mean":
            known.weigh(node)
        return SUM
    last = node.target._schema.arguments  # type: ignore[union-attr]
    keeps = next((k for k, a in enumerate(last) if a.name == "keepdim"), None)
    kept = keeps is not None and len(node.args) > keeps and bool(node.args[keeps])
    kept = kept or bool(node.kwargs.get("keepdim"))
    axis = place.axis if kept else place.axis - sum(d < place.axis for d in dims)
    moved = Rows(axis, place.each)
    several = not isinstance(node.meta["val"], torch.Tensor)
    return (moved,) * len(node.meta["val"]) if several else moved


def _along(position: int) -> Callable[[fx.Node, Known], Place]:
    """What works along the axis in an argument, and leaves others as they are."""

    def rule(node: fx.Node, known: Known) -> Place:
        place = known.place(node.args[0])
        dim = node.args[position] if len(node.args) > position else 0
        assert isinstance(dim, int)
        tensors = node.all_input_nodes
        found = {p for n in tensors if isinstance(p := known.places[n], Rows)}
        if SUM in map(known.place, tensors):
            raise Front(next(n for n in tensors if known.places[n] == SUM))
        (rows,) = found if len(found) == 1 else (None,)
        rank = len(shape(node.args[0]))
        if rows is None or dim % rank == rows.axis or any(len(shape(n)) != rank for n in tensors):
            raise Front(node)
        cut_others(node, known, rows, rank)
        assert place is None or place == rows
        return rows

    return rule


def _loss(node: fx.Node, known: Known) -> Place:
    reduction = node.args[2] if len(node.args) > 2 else 1
    place = _pointwise_of(node, known, 2)
    if reduction == 1:
        known.weigh(node)
    return SUM if reduction else place


def _pointwise_of(node: fx.Node, known: Known, count: int, first: int = 0) -> Place:
    operands: list[Any] = list(node.args[first : first + count])
    (place, *others), shapes = {known.place(a) for a in operands}, set(map(shape, operands))
    if others or not isinstance(place, Rows) or place.axis != 0 or len(shapes) != 1:
        raise Front(node)
    return place


def _loss_backward(node: fx.Node, known: Known) -> Place:
    gradient: Any = node.args[0]
    if known.place(gradient) == SUM:
        raise Front(gradient)
    place = _pointwise_of(node, known, 2, 1)
    if (known.place(gradient) is None) != bool(node.args[3]) or shape(gradient) not in (
        (),
        shape(node),
    ):
        raise Front(node)
    if node.args[3] == 1:
        known.weigh(node)
    return place


def _product(node: fx.Node, known: Known) -> Place:
    """Products of matrices: rows of one of them, or a sum over the rows of both."""
    a, b = map(known.place, node.args[-2:])
    rows = {p for p in (a, b) if isinstance(p, Rows)}
    axes = tuple(p.axis if isinstance(p, Rows) else p for p in (a, b))
    if len({p.each for p in rows}) > 1:
        return coupled(node)
    if name(node) == "addmm":
        bias: Any = node.args[0]
        if axes == (0, None) and known.place(bias) is None and shape(bias)[:-1] in ((), (1,)):
            return a
        return coupled(node)
    if name(node) == "bmm":
        return a if axes == (0, 0) else coupled(node)
    if axes in ((0, None), (None, 1)):
        return a or b
    if axes == (1, 0) or axes in ((SUM, None), (None, SUM)):
        return SUM
    return coupled(node)


#: Not marked as such by every version of torch.
_POINTWISE = frozenset(
    {"mish_backward", "tanh_backward", "threshold_backward", "sigmoid_backward", "gelu_backward"}
    | {"silu_backward", "elu_backward", "softplus_backward", "leaky_relu_backward"}
    | {"hardtanh_backward", "log_sigmoid_backward", "masked_fill", "masked_fill_", "logical_and_"}
)
_RULES: dict[str, Callable[[fx.Node, Known], Place]] = {
    **row_views.RULES,
    **row_layers.RULES,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "logsumexp"), _reduced),
    **dict.fromkeys(("argmax", "argmin", "any", "prod", "std", "var"), _reduced),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum"), _along(1)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along(2)),
    **dict.fromkeys(("gather", "scatter_add", "scatter"), _along(1)),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _loss),
    **dict.fromkeys(
        ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"), _loss_backward
    ),
    **dict.fromkeys(("mm", "addmm", "bmm"), _product),
    **dict.fromkeys(
        ("_is_all_true",),
        lambda node, known: ALL if isinstance(known.place(node.args[0]), Rows) else None,
    ),
    "all": lambda node, known: (
        ALL if len(node.args) == 1 and isinstance(known.place(node.args[0]), Rows) else _front(node)
    ),
}


def _front(node: fx.Node) -> Place:
    raise Front(node)
