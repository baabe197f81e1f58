"""Rules of the separability proof for arithmetic: pointwise, reductions, products of matrices."""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.separable_base import (
    ALL,
    Axis,
    Call,
    Rule,
    dims_of,
    is_tensor,
    normal_dim,
    shape_of,
)

# Pointwise, although the operators of these names don't carry the tag.
_POINTWISE = frozenset(
    ("hardswish", "logsigmoid", "log_sigmoid", "softsign", "tanhshrink", "isclose", "floor_divide")
) | {*("polar", "erf", "special_expit", "special_logit", "expit", "log_ndtr", "special_ndtr")}


@functools.cache
def is_pointwise(name: str) -> bool:
    """Whether operators of a name work element by element, with broadcasting."""
    if name in _POINTWISE:
        return True
    if name in ("equal", "frexp", "rrelu"):  # tagged, but not one tensor, or drawing
        return False
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def aligned(call: Call, operands: list[fx.Node], shape: tuple[int, ...]) -> int:
    """The batch axis of operands broadcast to ``shape``; fails unless they share it."""
    found: set[int] = set()
    for operand in operands:
        axis = call.axis(operand)
        if axis is not None:
            found.add(call.row_axis(operand) + len(shape) - len(shape_of(operand)))
    if len(found) != 1:
        call.refuse("batch-coupling", "operands have their batches along different axes")
    axis = found.pop()
    for operand in operands:
        own = axis - len(shape) + len(shape_of(operand))
        if call.axis(operand) is None and own >= 0 and shape_of(operand)[own] != 1:
            call.refuse(
                "not-proven-separable",
                f"`{operand.name}` has {shape_of(operand)[own]} rows and is not part of the batch",
            )
    return axis


def pointwise(call: Call) -> Axis:
    """Element by element."""
    return aligned(call, call.tensors(), call.shape)


def _reduced(call: Call, dims: tuple[int, ...] | None) -> Axis:
    """The axis after a reduction over ``dims``."""
    source = call.args[0]
    call.only(source)
    axis, rank = call.row_axis(source), len(shape_of(source))
    if dims is None or axis in dims:
        call.coupled("reduces over")
    assert dims is not None
    return axis if _rank(call) == rank else axis - sum(1 for d in dims if d < axis)


def _rank(call: Call) -> int:
    """The number of axes of a result, of the first item if it is a tuple."""
    spec = facts.get(call.node).spec
    if spec is not None and spec.kind == "tuple" and spec.items:
        return len(spec.items[0].shape)
    return len(call.shape)


def _is_tuple(call: Call) -> bool:
    spec = facts.get(call.node).spec
    return spec is not None and spec.kind == "tuple"


def _reduction(position: int) -> Rule:
    def rule(call: Call) -> Axis:
        given = call.arg(position, "dim", call.node.kwargs.get("axis"))
        if is_tensor(given):
            return pointwise(call)  # torch.max(a, b)
        axis = _reduced(call, dims_of(given, len(shape_of(call.args[0]))))
        return ("each", axis) if _is_tuple(call) else axis

    return rule


def _truth(call: Call) -> Axis:
    """``all``: without an axis, one truth value about all rows, which a check may look at."""
    given = call.arg(1, "dim")
    if given is None:
        return ALL
    return _reduced(call, dims_of(given, len(shape_of(call.args[0]))))


def _std(call: Call) -> Axis:
    given = call.arg(1, "dim")
    if isinstance(given, bool):
        given = None  # std(unbiased)
    axis = _reduced(call, dims_of(given, len(shape_of(call.args[0]))))
    return ("each", axis) if _is_tuple(call) else axis


def _along(position: int, name: str = "dim", default: int | None = None) -> Rule:
    """Works along one axis and keeps all of them: softmax, cumsum, sort."""

    def rule(call: Call) -> Axis:
        source = call.args[0]
        call.only(source)
        axis = call.row_axis(source)
        dims = dims_of(call.arg(position, name, default), len(shape_of(source)))
        if dims is None or axis in dims:
            call.coupled("works along")
        return ("each", axis) if _is_tuple(call) else axis

    return rule


def _linear(call: Call) -> Axis:
    source = call.args[0]
    call.only(source)
    axis = call.row_axis(source)
    if axis == len(shape_of(source)) - 1:
        call.coupled("sums over")
    return axis


def _matmul(call: Call) -> Axis:
    a, b = call.args[0], call.arg(1, "other", call.node.kwargs.get("mat2"))
    return _product(call, a, b)


def _product(call: Call, a: fx.Node, b: fx.Node) -> Axis:
    axis_a, axis_b = call.axis(a), call.axis(b)
    rank_a, rank_b, rank = len(shape_of(a)), len(shape_of(b)), len(call.shape)
    inner_a = rank_a - 1
    inner_b = max(rank_b - 2, 0)
    if axis_a == inner_a or axis_b == inner_b:
        call.coupled("sums over")
    # batch dimensions of both, aligned from the right
    leading = max(rank_a, rank_b, 2) - 2
    if axis_a is not None and axis_a == rank_a - 2:
        if axis_b is not None:
            call.refuse("batch-coupling", "every row meets every row of the other operand")
        return rank - 2 if rank_b > 1 else rank - 1
    if axis_b is not None and axis_b == rank_b - 1:
        if axis_a is not None:
            call.refuse("batch-coupling", "every row meets every row of the other operand")
        return rank - 1
    places = set()
    for axis, own in ((axis_a, rank_a), (axis_b, rank_b)):
        if axis is not None:
            places.add(axis + leading - (own - 2))
    if len(places) != 1:
        call.refuse("batch-coupling", "operands have their batches along different axes")
    place = places.pop()
    for axis, operand, own in ((axis_a, a, rank_a), (axis_b, b, rank_b)):
        mine = place - leading + (own - 2)
        if axis is None and mine >= 0 and own > 2 and shape_of(operand)[mine] != 1:
            call.refuse("not-proven-separable", f"`{operand.name}` is not part of the batch")
    return place


def _addmm(call: Call) -> Axis:
    bias, a, b = call.args[:3]
    axis = _product(call, a, b)
    if call.axis(bias) is None:
        own = axis - len(call.shape) + len(shape_of(bias))
        if own >= 0 and shape_of(bias)[own] != 1:
            call.refuse("not-proven-separable", f"`{bias.name}` is not part of the batch")
    elif call.row_axis(bias) + len(call.shape) - len(shape_of(bias)) != axis:
        call.coupled("adds across")
    return axis


def _einsum(call: Call) -> Axis:
    equation = str(call.args[0]).replace(" ", "")
    operands = call.args[1] if isinstance(call.args[1], tuple | list) else call.args[1:]
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        call.refuse("not-proven-separable", "its equation has no explicit result, or dots")
    letters = {
        term[call.row_axis(operand)]
        for term, operand in zip(left.split(","), operands, strict=True)
        if call.axis(operand) is not None
    }
    if len(letters) != 1:
        call.coupled("mixes")
    letter = letters.pop()
    for term, operand in zip(left.split(","), operands, strict=True):
        if term.count(letter) > 1 or (call.axis(operand) is None and letter in term):
            call.coupled("mixes")
    if letter not in right:
        call.coupled("sums over")
    return right.index(letter)


def _norm(call: Call) -> Axis:
    """``vector_norm(x, ord, dim, keepdim)``."""
    return _reduced(call, dims_of(call.arg(2, "dim"), len(shape_of(call.args[0]))))


def _diff(call: Call) -> Axis:
    if call.arg(3, "prepend") is not None or call.arg(4, "append") is not None:
        call.refuse("not-proven-separable", "something is put in front or behind")
    axis = call.row_axis(call.args[0])
    if normal_dim(call.arg(2, "dim", -1), len(shape_of(call.args[0]))) == axis:
        call.coupled("works along")
    return axis


def _matrices(call: Call) -> Axis:
    """Works on the matrices in the last two axes."""
    call.only(call.args[0])
    axis = call.row_axis(call.args[0])
    if axis >= len(shape_of(call.args[0])) - 2:
        call.coupled("works along")
    return ("each", axis) if _is_tuple(call) else axis


def _first_pointwise(call: Call) -> Axis:
    """Element by element of the first operand; the others are tables."""
    call.only(call.args[0])
    return call.row_axis(call.args[0])


def _cosine(call: Call) -> Axis:
    """``cosine_similarity(a, b, dim, eps)``."""
    a, b = call.args[:2]
    rank = len(shape_of(a))
    if len(shape_of(b)) != rank:
        call.refuse("not-proven-separable", "its operands differ in rank")
    sizes = zip(shape_of(a), shape_of(b), strict=True)
    axis = aligned(call, [a, b], tuple(max(x, y) for x, y in sizes))
    dim = normal_dim(call.arg(2, "dim", 1), rank)
    if dim == axis:
        call.coupled("sums over")
    return axis - 1 if dim < axis else axis


def _check(call: Call) -> Axis:
    """A check raises if some rows alone would make it raise."""
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("sum", "mean", "prod", "amax", "amin", "max", "min", "median", "nanmedian", "nansum"),
            *("nanmean", "logsumexp", "any", "argmax", "argmin", "count_nonzero", "mode"),
        ),
        _reduction(1),
    ),
    "aminmax": _reduction(9),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _std),
    "kthvalue": _reduction(2),
    **dict.fromkeys(("vector_norm", "linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("all", "_is_all_true"), _truth),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "special_softmax"), _along(1)),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "glu", "flip"),
        _along(1),
    ),
    **dict.fromkeys(("sort", "argsort"), _along(1, default=-1)),
    "topk": _along(2, default=-1),
    "roll": _along(2, "dims"),
    "diff": _diff,
    **dict.fromkeys(
        (
            *("tril", "triu", "matrix_exp", "linalg_inv", "inverse", "linalg_cholesky", "cholesky"),
            *("linalg_det", "det", "logdet", "linalg_slogdet", "slogdet", "linalg_matrix_exp"),
        ),
        _matrices,
    ),
    "bucketize": _first_pointwise,
    "cosine_similarity": _cosine,
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _addmm),
    "einsum": _einsum,
    **dict.fromkeys(("check_valid", "check_probabilities", "check_deviations"), _check),
}
