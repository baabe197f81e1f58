"""Rules of the separability proof for calls that only rearrange: views, indexing, joining."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.separable_base import (
    Axis,
    Call,
    Literal,
    Rule,
    dims_of,
    is_tensor,
    normal_dim,
    product,
    shape_of,
)
from rose_compiler.ir.separable_math import aligned


def _reshaped(call: Call, sizes: tuple[Any, ...] | None) -> Axis:
    """Rows stay rows if their axis comes out whole, with as much in front of it as before."""
    source = call.args[0]
    call.only(source, *call.args[1:])
    axis, before, after = call.row_axis(source), shape_of(source), call.shape
    count = before[axis]
    lead = product(before[:axis])
    for place, size in enumerate(after):
        if size == count and product(after[:place]) == lead:
            break
    else:
        call.refuse("batch-coupling", f"rows are merged or split from {before} to {after}")
    if sizes is not None and place < len(sizes) and sizes[place] != -1:
        fixed = tuple(-1 if k == place else size for k, size in enumerate(after))
        call.rows.literals[call.node] = Literal(count, (fixed,))
    return place


def _sizes(call: Call) -> tuple[Any, ...]:
    given = call.args[1:] or tuple(call.node.kwargs.values())[:1]
    if len(given) == 1 and isinstance(given[0], tuple | list):
        return tuple(given[0])
    return given


def _reshape(call: Call) -> Axis:
    sizes = _sizes(call)
    if any(not isinstance(s, int) for s in sizes):
        call.refuse("not-proven-separable", "its sizes are not known")
    return _reshaped(call, sizes)


def _flatten(call: Call) -> Axis:
    return _reshaped(call, None)


def _reshape_as(call: Call) -> Axis:
    place = _reshaped(call, None)
    if call.axis(call.arg(1, "other")) != place:
        call.refuse("not-proven-separable", "the shape comes from what is not part of the batch")
    return place


def _unflatten(call: Call) -> Axis:
    axis = call.row_axis(call.args[0])
    dim = normal_dim(call.arg(1, "dim"), len(shape_of(call.args[0])))
    if dim == axis:
        call.coupled("splits")
    added = len(call.shape) - len(shape_of(call.args[0]))
    return axis + added if dim < axis else axis


def _squeeze(call: Call) -> Axis:
    source = call.args[0]
    axis, rank = call.row_axis(source), len(shape_of(source))
    dims = dims_of(call.arg(1, "dim"), rank)
    if dims is None:
        call.refuse(
            "not-proven-separable",
            "it drops every axis of size 1, the batch's too when there is one row",
            "name the axis: squeeze(-1)",
        )
    assert dims is not None
    if axis in dims:
        call.coupled("drops")
    return axis - sum(1 for d in dims if d < axis and shape_of(source)[d] == 1)


def _unsqueeze(call: Call) -> Axis:
    axis = call.row_axis(call.args[0])
    dim = normal_dim(call.arg(1, "dim"), len(shape_of(call.args[0])) + 1)
    return axis + 1 if dim <= axis else axis


def _transpose(call: Call) -> Axis:
    rank = len(shape_of(call.args[0]))
    a, b = (normal_dim(d, rank) for d in (call.arg(1, "dim0"), call.arg(2, "dim1")))
    return {a: b, b: a}.get(axis := call.row_axis(call.args[0]), axis)


def _t(call: Call) -> Axis:
    axis = call.row_axis(call.args[0])
    return 1 - axis if len(shape_of(call.args[0])) == 2 else axis


def _getattr(call: Call) -> Axis:
    name, rank = call.args[1], len(shape_of(call.args[0]))
    axis = call.row_axis(call.args[0])
    if name in ("real", "imag", "data"):
        return axis
    if name in ("T", "H") and rank <= 2:
        return rank - 1 - axis
    if name in ("mT", "mH"):
        return {rank - 1: rank - 2, rank - 2: rank - 1}.get(axis, axis)
    call.refuse("not-proven-separable", f"the attribute {name}")
    return None


def _permute(call: Call) -> Axis:
    dims = call.args[1] if isinstance(call.args[1], tuple | list) else call.args[1:]
    order = dims_of(tuple(dims), len(shape_of(call.args[0])))
    assert order is not None
    return order.index(call.row_axis(call.args[0]))


def _movedim(call: Call) -> Axis:
    rank = len(shape_of(call.args[0]))
    source = dims_of(call.arg(1, "source"), rank)
    target = dims_of(call.arg(2, "destination"), rank)
    assert source is not None
    assert target is not None
    order: list[int | None] = [None] * rank
    for s, t in zip(source, target, strict=True):
        order[t] = s
    rest = iter(d for d in range(rank) if d not in source)
    return [next(rest) if d is None else d for d in order].index(call.row_axis(call.args[0]))


def _expand(call: Call) -> Axis:
    source = call.args[0]
    axis = call.row_axis(source)
    place = axis + len(call.shape) - len(shape_of(source))
    sizes = _sizes(call)
    if call.shape[place] != shape_of(source)[axis]:
        call.coupled("multiplies")
    if place < len(sizes) and sizes[place] != -1:
        fixed = tuple(-1 if k == place else s for k, s in enumerate(sizes))
        call.rows.literals[call.node] = Literal(shape_of(source)[axis], (fixed,))
    return place


def _repeat(call: Call) -> Axis:
    source, times = call.args[0], _sizes(call)
    place = call.row_axis(source) + len(call.shape) - len(shape_of(source))
    lead = len(call.shape) - len(times)
    if place >= lead and times[place - lead] != 1:
        call.coupled("repeats")
    return place


def _repeat_interleave(call: Call) -> Axis:
    axis = call.row_axis(call.args[0])
    dim = call.arg(2, "dim")
    if not isinstance(dim, int) or is_tensor(call.arg(1, "repeats")):
        call.coupled("repeats along")
    if normal_dim(dim, len(shape_of(call.args[0]))) == axis:
        call.coupled("repeats along")
    return axis


def _stack(call: Call) -> Axis:
    parts = call.args[0]
    dim = normal_dim(call.arg(1, "dim", 0), len(call.shape))
    if len({call.axis(p) for p in parts}) != 1:
        call.refuse(
            "not-proven-separable", "some of the parts are not batched, or along other axes"
        )
    axis = call.row_axis(parts[0])
    return axis + 1 if dim <= axis else axis


def _pieces(call: Call) -> Axis:
    """split, chunk, tensor_split: a tuple of parts along another axis. Items take its axis."""
    dim = call.arg(2, "dim", 0)
    axis = call.row_axis(call.args[0])
    if normal_dim(dim, len(shape_of(call.args[0]))) == axis:
        call.coupled("splits")
    return ("each", axis)


def _unbind(call: Call) -> Axis:
    axis = call.row_axis(call.args[0])
    dim = normal_dim(call.arg(1, "dim", 0), len(shape_of(call.args[0])))
    if dim == axis:
        call.coupled("takes apart")
    return ("each", axis - 1 if dim < axis else axis)


def _getitem(call: Call) -> Axis:
    source, index = call.args
    axis = call.axis(source)
    if isinstance(axis, tuple):
        return axis[1] if axis[0] == "each" else axis[index]
    items = index if isinstance(index, tuple) else (index,)
    arrays = [i for i in items if is_tensor(i)]
    single = sum(1 for i in items if not (i is None or i is Ellipsis or isinstance(i, slice)))
    if (arrays and (single > 1 or is_mask(arrays[0]))) or any(isinstance(i, list) for i in items):
        call.refuse("not-proven-separable", "it is indexed by a list, a mask or several tensors")
    if axis is None:
        return _looked_up(call, source, items)
    call.only(source)
    rank = len(shape_of(source))
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    place, dim = 0, 0
    for item in items:
        if item is None:
            place += 1
        elif item is Ellipsis:
            skipped = rank - used
            if dim <= axis < dim + skipped:
                return place + axis - dim
            dim, place = dim + skipped, place + skipped
        elif dim == axis:
            if item != slice(None):
                call.coupled("picks from")
            return place
        else:
            place += _width(call, item)
            dim += 1
    return place + axis - dim


def is_mask(node: fx.Node) -> bool:
    """Whether a tensor holds truth values, or may."""
    spec = facts.get(node).spec
    return spec is None or spec.dtype in ("bool", "uint8")


def _width(call: Call, item: Any) -> int:
    """How many axes of the result one index stands for."""
    if isinstance(item, slice):
        return 1
    if is_tensor(item):
        return len(shape_of(item))
    if isinstance(item, bool):
        call.refuse("not-proven-separable", "it is indexed by a truth value")
    return 0


def _looked_up(call: Call, source: Any, items: tuple[Any, ...]) -> Axis:
    """Rows of a table that is the same for all, by an index that is batched."""
    if len(items) != 1 or not is_tensor(items[0]):
        call.refuse("not-proven-separable", "a batched index is mixed with others")
    return call.row_axis(items[0])


def _select(call: Call) -> Axis:
    call.only(call.args[0])
    axis = call.row_axis(call.args[0])
    dim = normal_dim(call.arg(1, "dim"), len(shape_of(call.args[0])))
    if dim == axis:
        call.coupled("picks from")
    return axis - 1 if dim < axis and len(call.shape) < len(shape_of(call.args[0])) else axis


def _index_select(call: Call) -> Axis:
    if call.axis(call.args[0]) is None:
        dim = normal_dim(call.arg(1, "dim"), len(shape_of(call.args[0])))
        return dim
    return _select(call)


def _gather(call: Call) -> Axis:
    source, index = call.args[0], call.arg(2, "index")
    axis = call.row_axis(source)
    dim = normal_dim(call.arg(1, "dim"), len(shape_of(source)))
    if dim == axis or call.axis(index) != axis:
        call.coupled("gathers across")
    return axis


def _scatter(call: Call) -> Axis:
    axis = _gather(call)
    value = call.arg(3, "src", call.node.kwargs.get("value"))
    if is_tensor(value) and call.axis(value) != axis:
        call.coupled("scatters across")
    return axis


def _like(call: Call) -> Axis:
    """A result that goes by the first operand alone: conversions, ``zeros_like``."""
    return call.row_axis(call.args[0]) if call.axis(call.args[0]) is not None else None


def _broadcast(call: Call) -> Axis:
    tensors = (
        call.args[0]
        if len(call.args) == 1 and isinstance(call.args[0], tuple | list)
        else call.args
    )
    shapes = [shape_of(t) for t in tensors]
    rank = max(map(len, shapes))
    full = tuple(
        max(s[k - rank + len(s)] for s in shapes if k - rank + len(s) >= 0) for k in range(rank)
    )
    return ("each", aligned(call, list(tensors), full))


def _expand_as(call: Call) -> Axis:
    return aligned(call, [n for n in call.args if isinstance(n, fx.Node)], call.shape)


def _constant(call: Call) -> Axis:
    """``x.new_zeros(sizes)``: only the type comes from the operand."""
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape"), _reshape),
    **dict.fromkeys(("flatten", "ravel"), _flatten),
    "reshape_as": _reshape_as,
    "unflatten": _unflatten,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "t": _t,
    "getattr": _getattr,
    "permute": _permute,
    "movedim": _movedim,
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    "expand_as": _expand_as,
    "broadcast_tensors": _broadcast,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "repeat_interleave": _repeat_interleave,
    "stack": _stack,
    **dict.fromkeys(
        ("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split"),
        _pieces,
    ),
    "unbind": _unbind,
    "getitem": _getitem,
    **dict.fromkeys(("select", "narrow"), _select),
    "index_select": _index_select,
    **dict.fromkeys(("gather", "take_along_dim"), _gather),
    **dict.fromkeys(("scatter", "scatter_add"), _scatter),
    **dict.fromkeys(
        (
            *(
                "to",
                "type_as",
                "type",
                "float",
                "double",
                "half",
                "bfloat16",
                "long",
                "int",
                "short",
            ),
            *("bool", "byte", "char", "clone", "contiguous", "detach", "alias", "cpu", "cuda"),
            *(
                "conj",
                "real",
                "imag",
                "zeros_like",
                "ones_like",
                "full_like",
                "positive",
                "resolve_conj",
            ),
        ),
        _like,
    ),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_tensor"), _constant),
}
