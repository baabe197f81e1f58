"""Rules of the separability proof for what is the same for all rows and joined to a batch.

``torch.cat([x, obs, time.expand(64, 8)], 1)``: the third part holds 64 equal rows, because the
batch has 64. It is rows of the batch like the others, if its rows are as many as the batch has.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.ir.separable_base import (
    Axis,
    Call,
    Rule,
    Spread,
    is_tensor,
    name_of_call,
    normal_dim,
    shape_of,
)

_EXPAND = frozenset(("expand", "broadcast_to"))
_FILL = frozenset(("full", "zeros", "ones"))


def _cat(call: Call) -> Axis:
    parts = [p for p in call.args[0] if is_tensor(p)]
    dim = normal_dim(call.arg(1, "dim", 0), len(call.shape))
    first = next(p for p in parts if call.axis(p) is not None)
    axis = call.row_axis(first)
    if dim == axis:
        call.coupled("joins along")
    for each in parts:
        if call.axis(each) is None and (found := _equal_rows(call, each, axis, first)):
            call.rows.spreads[each] = found
            call.rows.axes[each] = axis
        if call.axis(each) != axis:
            call.refuse(
                "not-proven-separable", "some of the parts are not batched, or along other axes"
            )
    return axis


def _equal_rows(call: Call, part: fx.Node, axis: int, like: fx.Node) -> Spread | None:
    """How a part that is no batch makes as many equal rows as the batch has, for this call alone;
    ``None`` where it does not."""
    sizes, shape = sizes_of(part), shape_of(part)
    if sizes is None or len(part.users) != 1 or len(sizes) != len(shape):
        return None
    if type(sizes[axis]) is not int or sizes[axis] != call.rows.count:
        return None
    if name_of_call(part) in _EXPAND:
        source = shape_of(part.args[0])  # type: ignore[arg-type]
        own = axis - len(shape) + len(source)
        if own >= 0 and source[own] != 1:
            return None
    one = tuple(1 if k == axis else s for k, s in enumerate(sizes))
    return Spread(one, axis, like, call.row_axis(like))


def sizes_of(node: fx.Node) -> tuple[Any, ...] | None:
    """The sizes that a call gives its result, all equal along axes of its own; ``None`` for any
    other call."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = name_of_call(node)
    if name in _EXPAND and not node.kwargs:
        given = node.args[1:]
    elif name in _FILL and "size" not in node.kwargs and "out" not in node.kwargs:
        given = node.args[:1] if name == "full" else node.args
    else:
        return None
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = tuple(given[0])
    return given if all(type(s) is int for s in given) else None


def resized(node: fx.Node, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of such a call, for other sizes."""
    name = name_of_call(node)
    if name in _EXPAND:
        return (node.args[0], *sizes) if name == "expand" else (node.args[0], sizes)
    return (sizes, *node.args[1:]) if name == "full" else (sizes,)


def _spread(call: Call) -> Axis:
    value, axis, like, like_axis = call.args
    if call.axis(value) is not None or call.axis(like) != like_axis:
        call.refuse("not-proven-separable", "it is spread along another axis than the batch")
    return axis


RULES: dict[str, Rule] = {"cat": _cat, "spread": _spread}
