"""Functions and methods of numpy and torch that keep the rows of a batch apart, for blocks."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.rows import (
    Count,
    Items,
    NotRows,
    RowsValue,
    Same,
    elementwise,
    reshaped,
    without_axes,
)
from rose_compiler.ir.functions import name_of
from rose_compiler.ir.separable_math import is_pointwise

Args = list[Any]
Keywords = dict[str, Any]

#: methods whose result has the receiver's rows and shape, whatever else they are given
_KEEPING = frozenset(
    ("cpu", "cuda", "numpy", "detach", "clone", "copy", "float", "double", "half", "bfloat16")
) | {*("long", "int", "short", "bool", "byte", "contiguous", "astype", "to", "type", "pin_memory")}
_POINTWISE_METHODS = frozenset(("clip", "clamp", "round", "conj", "abs", "logical_not"))
_REDUCTIONS = frozenset(
    ("sum", "mean", "any", "all", "prod", "std", "var", "amax", "amin", "argmax", "argmin")
)
_CONVERSIONS = (
    *(torch.as_tensor, torch.asarray, torch.tensor, torch.from_numpy),
    *(torch.Tensor, torch.FloatTensor, torch.DoubleTensor, torch.LongTensor),
    *(np.asarray, np.array, np.ascontiguousarray, np.asanyarray, np.copy),
    *(np.zeros_like, np.ones_like, np.full_like, torch.zeros_like, torch.ones_like),
    *(torch.full_like, torch.clone, torch.detach, np.nan_to_num, np.round),
)
_CONVERSION_KEYWORDS = {"dtype", "device", "copy", "order", "requires_grad", "pin_memory"}
_NUMPY_REDUCTIONS = (
    *(np.sum, np.mean, np.any, np.all, np.prod, np.max, np.min, np.std, np.var, np.argmax),
    *(np.argmin, np.amax, np.amin),
)
_ELEMENTWISE = (np.clip, np.where, torch.where, np.around, np.isclose)
_FORBIDDEN = ("out", "where", "axis", "dim", "keepdims", "generator", "inplace", "initial")


def function(called: Any, args: Args, keywords: Keywords) -> Any:
    """The value of a call of a function that is known by identity."""
    values = [*args, *keywords.values()]
    if all(isinstance(v, Same) for v in values):
        if type(called) is np.ufunc and called.signature is None and called.nout == 1:
            known = elementwise(args) if args and not keywords else Same()
            return Same(shape=known.shape)  # broadcast, element by element
        if _is_numeric(called):
            return Same()
        raise NotRows(f"`{_title(called)}` is not known to treat rows apart")
    plain = not any(k in _FORBIDDEN for k in keywords)
    if any(called is c for c in _CONVERSIONS):
        return _converted(args, keywords)
    if type(called) is np.ufunc:
        if not plain:
            raise NotRows(f"`{called.__name__}` with out=, where= or an axis")
        if called.signature is not None:
            raise NotRows(f"`{called.__name__}` works on whole axes")
        return elementwise(args)
    if any(called is c for c in _ELEMENTWISE):
        if not plain or len(args) == 1:
            raise NotRows(f"`{_title(called)}` in a form that looks at the whole batch")
        return elementwise([*args, *keywords.values()])
    qualified = name_of(called)
    if qualified is not None and qualified.startswith("torch"):
        name = qualified.rpartition(".")[2]
        if name in ("max", "min") and len(args) == 1:
            raise NotRows(f"`{name}` over all rows", "batch-coupling")
        if is_pointwise(name) and plain and not name.endswith("_"):
            return elementwise([*args, *keywords.values()])
        if name in _REDUCTIONS and args:
            return _reduced(args[0], args[1:], keywords)
    if any(called is c for c in _NUMPY_REDUCTIONS) and args:
        return _reduced(args[0], args[1:], keywords)
    if (called is np.expand_dims or called is torch.unsqueeze) and len(values) == 2 and args:
        return _expanded(values[0], values[1])
    if any(called is c for c in (torch.cat, torch.concat, np.concatenate)):
        return _joined(args, keywords)
    if called is len:
        return Count()
    raise NotRows(f"`{_title(called)}` is not known to treat rows apart")


def _is_numeric(called: Any) -> bool:
    """Whether a call makes of the same values the same result: no draws, nothing of the user's."""
    qualified = name_of(called) or ""
    drawing = qualified.startswith("torch") and any(
        part in qualified for part in ("rand", "normal", "multinomial", "bernoulli", "dropout")
    )
    known = (
        type(called) is np.ufunc
        or any(called is c for c in (*_CONVERSIONS, *_ELEMENTWISE))
        or any(called is c for c in (float, int, bool, len, abs, min, max, round, tuple))
        or isinstance(called, torch.dtype)
        or (isinstance(called, type) and issubclass(called, np.generic))
        or qualified.startswith(("torch", "math", "operator"))
    )
    return known and not drawing


def _title(called: Any) -> str:
    return str(getattr(called, "__qualname__", None) or getattr(called, "__name__", called))


def _converted(args: Args, keywords: Keywords) -> Any:
    if any(not isinstance(v, Same) for v in [*args[1:], *keywords.values()]) or not args:
        raise NotRows("a conversion is told its type by a batch")
    if set(keywords) - _CONVERSION_KEYWORDS or not isinstance(args[0], RowsValue):
        raise NotRows("it is made of something else than one batch")
    return args[0]


def method(name: str, receiver: Any, args: Args, keywords: Keywords) -> Any:
    """The value of a method call on a value of the block."""
    if not isinstance(receiver, RowsValue):
        raise NotRows(f"`{name}` of what is about the whole batch", "batch-coupling")
    others = [*args, *keywords.values()]
    if name in _KEEPING:
        if any(not isinstance(v, Same) for v in others):
            raise NotRows(f"`{name}` is told its type by a batch")
        return receiver
    if name in ("reshape", "view"):
        if keywords:
            raise NotRows(f"`{name}` with keywords")
        sizes = args[0].items if len(args) == 1 and isinstance(args[0], Items) else args
        return reshaped(receiver, list(sizes))
    if name in ("flatten", "ravel"):
        if args or receiver.tail is None or math.prod(receiver.tail) != 1:
            raise NotRows(f"`{name}` merges rows with other axes", "batch-coupling")
        return RowsValue(())
    if name == "unsqueeze" and len(others) == 1:
        return _expanded(receiver, others[0])
    if name == "squeeze":
        return _squeezed(receiver, others)
    if name == "size":
        return _size(receiver, args)
    if name in _REDUCTIONS or name in ("max", "min"):
        if name in ("max", "min") and "axis" not in keywords:
            raise NotRows(f"`{name}` over all rows, or of a tensor, which gives two things")
        return _reduced(receiver, args, keywords)
    pointwise = is_pointwise(name) or name in _POINTWISE_METHODS
    if pointwise and not name.endswith("_") and not any(k in _FORBIDDEN for k in keywords):
        return elementwise([receiver, *others])
    raise NotRows(f"the method `{name}` is not known to treat rows apart")


def _size(receiver: RowsValue, args: Args) -> Any:
    if len(args) == 1 and isinstance(args[0], Same) and args[0].value == 0:
        return Count()
    raise NotRows("the size of a batch")


def _reduced(value: Any, args: Args, keywords: Keywords) -> Any:
    if not isinstance(value, RowsValue):
        raise NotRows("something else than one batch is reduced")
    if len(args) > 1 or set(keywords) - {"axis", "dim", "keepdim", "keepdims"}:
        raise NotRows("a reduction with more than an axis")
    given = args[0] if args else keywords.get("axis", keywords.get("dim", Same(None, ())))
    keep = keywords.get("keepdim", keywords.get("keepdims", Same(False, ())))
    if not isinstance(keep, Same) or type(keep.value) is not bool:
        raise NotRows("a reduction that keeps its axis or not")
    axes: Any = None
    if isinstance(given, Items):
        axes = tuple(i.value if isinstance(i, Same) else None for i in given.items)
    elif isinstance(given, Same):
        axes = given.value
    return without_axes(value, axes, keep.value)


def _expanded(value: Any, dim: Any) -> RowsValue:
    if not isinstance(value, RowsValue) or value.tail is None or not isinstance(dim, Same):
        raise NotRows("an axis is added somewhere")
    if type(dim.value) is not int:
        raise NotRows("an axis is added somewhere")
    rank = len(value.tail) + 2
    place = dim.value + rank if dim.value < 0 else dim.value
    if place == 0:
        raise NotRows("an axis is added in front of the rows", "unsupported-shape")
    return RowsValue((*value.tail[: place - 1], 1, *value.tail[place - 1 :]))


def _squeezed(value: RowsValue, others: Args) -> RowsValue:
    if len(others) != 1 or not isinstance(others[0], Same) or type(others[0].value) is not int:
        raise NotRows(
            "every axis of size 1 is dropped, the rows' too when there is one", allow="squeeze(-1)"
        )
    if value.tail is None:
        raise NotRows("the number of its axes is not known")
    rank = len(value.tail) + 1
    place = others[0].value + rank if others[0].value < 0 else others[0].value
    if place == 0:
        raise NotRows("the axis of the rows is dropped", "batch-coupling")
    if value.tail[place - 1] != 1:
        return value
    return RowsValue((*value.tail[: place - 1], *value.tail[place:]))


def _joined(args: Args, keywords: Keywords) -> RowsValue:
    parts = args[0].items if args and isinstance(args[0], Items) else ()
    given = args[1] if len(args) > 1 else keywords.get("axis", keywords.get("dim"))
    tails = [p.tail for p in parts if isinstance(p, RowsValue)]
    known = [t for t in tails if t is not None]
    if not parts or len(known) != len(parts) or len({len(t) for t in known}) != 1:
        raise NotRows("arrays of which some are no batches are joined")
    if not isinstance(given, Same) or type(given.value) is not int:
        raise NotRows("arrays are joined along the rows", "batch-coupling")
    rank = len(known[0]) + 1
    place = given.value + rank if given.value < 0 else given.value
    if place == 0:
        raise NotRows("arrays are joined along the rows", "batch-coupling")
    tail = list(known[0])
    tail[place - 1] = sum(t[place - 1] for t in known)
    return RowsValue(tuple(tail))


def product(left: Any, right: Any) -> RowsValue:
    """``left @ right`` with rows on the left and one matrix on the right."""
    if not isinstance(left, RowsValue) or not isinstance(right, Same):
        raise NotRows("a product with the batch on its right side")
    if left.tail is None or right.shape is None or len(left.tail) < 1 or len(right.shape) > 2:
        raise NotRows("a product of unknown shapes")
    return RowsValue((*left.tail[:-1], *right.shape[1:]))


def indexed(value: RowsValue, index: ast.expr, evaluate: Callable[[ast.expr], Any]) -> RowsValue:
    """``x[index]``: all rows, and a fixed choice along the other axes."""
    if value.tail is None:
        raise NotRows("an array of an unknown number of axes is indexed")
    items = list(index.elts) if isinstance(index, ast.Tuple) else [index]
    used = sum(1 for i in items if not _is_constant(i, None) and not _is_constant(i, Ellipsis))
    shape: list[int | None] = [None, *value.tail]
    if any(_is_constant(i, Ellipsis) for i in items):
        place = next(k for k, i in enumerate(items) if _is_constant(i, Ellipsis))
        full: list[ast.expr] = [ast.Slice() for _ in range(len(shape) - used)]
        items = [*items[:place], *full, *items[place + 1 :]]
    result: list[int | None] = []
    at = 0
    for item in items:
        if _is_constant(item, None):
            result.append(1)
            continue
        size = shape[at]
        if at == 0:
            if not isinstance(item, ast.Slice) or item.lower or item.upper or item.step:
                raise NotRows("some rows of a batch are picked", "batch-coupling")
            result.append(None)
        elif isinstance(item, ast.Slice):
            assert size is not None
            bounds = [_constant(b, evaluate) for b in (item.lower, item.upper, item.step)]
            result.append(len(range(*slice(*bounds).indices(size))))
        elif _constant(item, evaluate) is None:
            raise NotRows("it is indexed by something that is not constant")
        at += 1
    result += shape[at:]
    if not result or result[0] is not None:
        raise NotRows("an axis is added in front of the rows", "unsupported-shape")
    return RowsValue(tuple(s for s in result[1:] if s is not None))


def _is_constant(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _constant(node: ast.expr | None, evaluate: Callable[[ast.expr], Any]) -> int | None:
    if node is None:
        return None
    value = evaluate(node)
    if not isinstance(value, Same) or type(value.value) is not int:
        raise NotRows("it is indexed by something that is not constant")
    return value.value
