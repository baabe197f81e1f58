"""Proof that a block of plain Python keeps the rows of a batch apart, from its statements.

Every expression is followed as one of two things: *uniform*, the same for any rows, or *rows*, one
row of the result from the same row of the operands along the first axis. What no rule knows ends the
proof.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

UNIFORM = "uniform"
ROWS = "rows"

#: Methods of tensors and arrays that compute each element, or each row, from its own.
_METHODS = frozenset(
    {
        *(
            "cpu",
            "numpy",
            "detach",
            "clone",
            "contiguous",
            "float",
            "double",
            "half",
            "long",
            "int",
        ),
        *(
            "bool",
            "copy",
            "astype",
            "to",
            "type",
            "cuda",
            "abs",
            "neg",
            "exp",
            "log",
            "sqrt",
            "tanh",
        ),
        *("sigmoid", "clamp", "clip", "round", "floor", "ceil", "sign", "square", "isnan", "isinf"),
        *(
            "logical_not",
            "logical_or",
            "logical_and",
            "add",
            "sub",
            "mul",
            "div",
            "pow",
            "requires_grad_",
        ),
    }
)
#: Functions that convert a whole batch, row by row.
_CONVERTERS: tuple[Any, ...] = (
    *(
        torch.as_tensor,
        torch.tensor,
        torch.from_numpy,
        torch.asarray,
        torch.Tensor,
        torch.FloatTensor,
    ),
    *(np.asarray, np.array, np.ascontiguousarray, np.copy, np.clip, np.nan_to_num),
    *(
        torch.clamp,
        torch.clip,
        torch.tanh,
        torch.exp,
        torch.log,
        torch.abs,
        torch.sigmoid,
        torch.sqrt,
    ),
    *(torch.logical_or, torch.logical_and, torch.logical_not, torch.isnan, torch.nan_to_num),
)


class NotKept(Exception):
    """The proof ends; says where."""


def kept_rows(
    statements: Sequence[ast.stmt],
    batched: Mapping[str, int],
    ranks: Mapping[str, int],
    resolve: Callable[[ast.expr], Any],
) -> set[str]:
    """Names that hold one row a row of the batched names, after straight-line statements.

    Args:
        batched: names of values with a batch along their first axis.
        ranks: number of axes of the values, where known.
        resolve: the live object that an expression names, or ``None``.

    Raises:
        NotKept: when a statement is not known to keep rows apart.
    """
    found: dict[str, str] = dict.fromkeys(batched, ROWS)
    walk = _Walk(found, dict(ranks), resolve)
    for statement in statements:
        walk.statement(statement)
    return {name for name, kind in found.items() if kind == ROWS}


class _Walk:
    def __init__(
        self, names: dict[str, str], ranks: dict[str, int], resolve: Callable[[ast.expr], Any]
    ) -> None:
        self.names = names
        self.ranks = ranks
        self.resolve = resolve

    def statement(self, node: ast.stmt) -> None:
        if not isinstance(node, ast.Assign):
            raise NotKept(f"line {node.lineno}: only assignments are followed")
        if (
            len(node.targets) == 1
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(node.targets[0].elts) == len(node.value.elts)
        ):
            kinds = [self.kind(v) for v in node.value.elts]
            for target, kind in zip(node.targets[0].elts, kinds, strict=True):
                self.bind(target, kind)
            return
        kind = self.kind(node.value)
        for target in node.targets:
            self.bind(target, kind)

    def bind(self, target: ast.expr, kind: str) -> None:
        if not isinstance(target, ast.Name):
            raise NotKept(f"line {target.lineno}: only names are assigned")
        self.names[target.id] = kind
        self.ranks.pop(target.id, None)

    def kind(self, node: ast.expr) -> str:
        """What an expression is."""
        if isinstance(node, ast.Constant):
            return UNIFORM
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNIFORM)
        if isinstance(node, ast.Attribute):
            kind = self.kind(node.value)
            if kind == ROWS and node.attr not in ("real", "imag", "data"):
                # a shape knows how many rows there are
                if node.attr in ("dtype", "device", "ndim"):
                    return UNIFORM
                raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}`")
            return kind
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Not):
                return self.uniform(node, [node.operand])
            return self.kind(node.operand)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.MatMult):
                return self.uniform(node, [node.left, node.right])
            return self.elementwise(node, [node.left, node.right])
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            if isinstance(node.ops[0], (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
                return self.uniform(node, [node.left, *node.comparators])
            return self.elementwise(node, [node.left, *node.comparators])
        if isinstance(node, ast.Subscript):
            return self.subscript(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, (ast.Tuple, ast.List)):
            return self.uniform(node, node.elts)
        raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}`")

    def uniform(self, node: ast.expr, parts: Sequence[ast.expr]) -> str:
        """Something that must not see rows."""
        if any(self.kind(p) == ROWS for p in parts):
            raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}` sees all rows at once")
        return UNIFORM

    def elementwise(self, node: ast.expr, parts: Sequence[ast.expr]) -> str:
        """Broadcasting aligns last axes: rows stay apart when all batched operands have the same
        number of axes, and the others are single numbers."""
        kinds = [self.kind(p) for p in parts]
        if ROWS not in kinds:
            return UNIFORM
        ranks = {self.rank(p) for p, k in zip(parts, kinds, strict=True) if k == ROWS}
        if len(ranks) > 1 or (kinds.count(ROWS) > 1 and None in ranks):
            raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}` may broadcast over rows")
        for part, kind in zip(parts, kinds, strict=True):
            if kind == UNIFORM and not self.single(part):
                raise NotKept(f"line {node.lineno}: `{ast.unparse(part)}` may be one value a row")
        return ROWS

    def rank(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Name):
            return self.ranks.get(node.id)
        if isinstance(node, (ast.UnaryOp,)):
            return self.rank(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.rank(node.func.value)
        return None

    def single(self, node: ast.expr) -> bool:
        """Whether a uniform operand is one number: it can't be a value for each row."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.UnaryOp):
            return self.single(node.operand)
        if isinstance(node, ast.BinOp):
            return self.single(node.left) and self.single(node.right)
        value = self.resolve(node)
        return isinstance(value, (int, float, bool)) or (
            isinstance(node, ast.Name) and self.ranks.get(node.id) == 0
        )

    def subscript(self, node: ast.Subscript) -> str:
        """``x[:, k]``, ``x[..., k]`` and ``x[:]`` keep rows."""
        if self.kind(node.value) != ROWS:
            return self.uniform(node, [node.slice])
        axes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        first = axes[0]
        whole = isinstance(first, ast.Slice) and first.lower is first.upper is first.step is None
        if not whole:
            raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}` picks rows")
        for axis in axes[1:]:
            if not isinstance(axis, (ast.Slice, ast.Constant)):
                self.uniform(node, [axis])
        return ROWS

    def call(self, node: ast.Call) -> str:
        keywords = [k.value for k in node.keywords]
        if any(k.arg is None or k.arg in ("out", "axis", "dim") for k in node.keywords):
            raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}`")
        target = self.resolve(node.func)
        if target is not None:
            if not any(self.kind(a) == ROWS for a in [*node.args, *keywords]):
                return self.uniform(node, [*node.args, *keywords])
            if isinstance(target, np.ufunc) and target.signature is None:
                return self.elementwise(node, node.args)
            if any(target is c for c in _CONVERTERS):
                self.uniform(node, keywords)
                operands = [a for a in node.args if not _is_type(a)]
                return self.elementwise(node, operands)
            raise NotKept(
                f"line {node.lineno}: `{ast.unparse(node.func)}` is not known to keep rows"
            )
        if isinstance(node.func, ast.Attribute) and self.kind(node.func.value) == ROWS:
            name = node.func.attr
            if name == "reshape" or name == "view":
                return self.reshape(node)
            if name not in _METHODS:
                raise NotKept(f"line {node.lineno}: `.{name}` is not known to keep rows")
            for argument in [*node.args, *keywords]:
                if self.kind(argument) == ROWS:
                    return self.elementwise(node, [node.func.value, *node.args])
            return ROWS
        raise NotKept(f"line {node.lineno}: `{ast.unparse(node.func)}`")

    def reshape(self, node: ast.Call) -> str:
        """``x.view(-1)`` of one axis is the same rows; anything else may mix them."""
        assert isinstance(node.func, ast.Attribute)
        one = len(node.args) == 1 and ast.unparse(node.args[0]) == "-1"
        if one and self.rank(node.func.value) == 1:
            return ROWS
        raise NotKept(f"line {node.lineno}: `{ast.unparse(node)}` may mix rows")


def _is_type(node: ast.expr) -> bool:
    """Whether an argument names a dtype or device, which has no rows."""
    return isinstance(node, ast.Attribute) and node.attr.startswith(
        ("float", "int", "uint", "bool", "double")
    )
