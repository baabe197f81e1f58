"""The user's statements, followed on one trip of a loop (:mod:`rose_compiler.passes.scan_trip`)."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rose_compiler.passes.scan_trip import (
    Global,
    Index,
    Number,
    Path,
    Several,
    Symbol,
    Test,
    Trip,
    Value,
    other_form,
)

#: Functions of torch and numpy by what a recurrence calls them, and how many arguments they take.
_TORCH: dict[Any, tuple[str, int]] = {
    torch.add: ("add", 2),
    torch.sub: ("sub", 2),
    torch.mul: ("mul", 2),
    torch.div: ("truediv", 2),
    torch.neg: ("neg", 1),
    torch.where: ("where", 3),
    torch.maximum: ("maximum", 2),
    torch.minimum: ("minimum", 2),
    torch.exp: ("exp", 1),
    torch.log: ("log", 1),
    torch.sqrt: ("sqrt", 1),
    torch.sigmoid: ("sigmoid", 1),
    torch.tanh: ("tanh", 1),
    torch.logical_not: ("invert", 1),
    torch.clone: ("clone", 1),
}
_NUMPY: dict[Any, tuple[str, int]] = {
    np.add: ("add", 2),
    np.subtract: ("sub", 2),
    np.multiply: ("mul", 2),
    np.divide: ("truediv", 2),
    np.negative: ("neg", 1),
    np.where: ("where", 3),
    np.logical_and: ("and_", 2),
    np.logical_or: ("or_", 2),
    np.logical_not: ("invert", 1),
    np.copy: ("clone", 1),
}
_METHODS = {
    "add": ("add", 2),
    "sub": ("sub", 2),
    "mul": ("mul", 2),
    "div": ("truediv", 2),
    "neg": ("neg", 1),
    "exp": ("exp", 1),
    "log": ("log", 1),
    "sqrt": ("sqrt", 1),
    "sigmoid": ("sigmoid", 1),
    "tanh": ("tanh", 1),
    "logical_not": ("invert", 1),
    "clone": ("clone", 1),
    "detach": ("detach", 1),
    "float": ("float", 1),
    "copy": ("clone", 1),
}
_OPERATORS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
}
_COMPARES: dict[type, str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
#: Names of functions that mix the elements of a tensor.
MIXING = frozenset(
    ("sum", "mean", "std", "var", "norm", "prod", "max", "min", "amax", "amin", "median", "cumsum")
) | {
    *("cumprod", "matmul", "mm", "bmm", "mv", "dot", "einsum", "softmax", "log_softmax", "roll"),
    *("flip", "sort", "argsort", "linear", "logsumexp", "any", "all", "t", "permute", "transpose"),
}


class Statements:
    """Runs the statements of one operation on a trip.

    ``names`` are its variables; ``space`` the module's globals, where they are known.
    """

    def __init__(
        self, trip: Trip, names: Mapping[str, Symbol], space: Mapping[str, Any] | None
    ) -> None:
        self.trip = trip
        self.names = dict(names)
        self.space: Mapping[str, Any] = {"torch": torch} if space is None else space

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements, one after the other.

        Raises:
            NotScan: for anything that is not understood to the last detail.
        """
        for each in statements:
            self._statement(each)

    def _statement(self, one: ast.stmt) -> None:
        if isinstance(one, ast.Assign):
            symbol = self.of(one.value)
            for target in one.targets:
                self._assign(target, symbol)
        elif isinstance(one, ast.AnnAssign) and one.value is not None:
            self._assign(one.target, self.of(one.value))
        elif isinstance(one, ast.AugAssign):
            self._augmented(one)
        elif isinstance(one, ast.If):
            self.run(one.body if self._decide(one.test) else one.orelse)
        elif isinstance(one, ast.Pass) or (
            isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        ):
            return
        elif isinstance(one, ast.Break | ast.Continue | ast.Return | ast.Raise):
            raise other_form("a statement leaves the loop or the trip", "early-exit")
        else:
            raise other_form(f"`{ast.unparse(one).splitlines()[0]}` is not followed")

    def _assign(self, target: ast.expr, symbol: Symbol) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = symbol
        elif isinstance(target, ast.Tuple) and isinstance(symbol, Several):
            if len(target.elts) != len(symbol.items):
                raise other_form("a tuple is taken apart")
            for each, part in zip(target.elts, symbol.items, strict=True):
                self._assign(each, part)
        elif isinstance(target, ast.Subscript):
            self.trip.store(self.of(target.value), self._index(target.slice), symbol)
        else:
            raise other_form(f"`{ast.unparse(target)}` is assigned to", "not-pure")

    def _augmented(self, one: ast.AugAssign) -> None:
        function = _OPERATORS.get(type(one.op))
        target = one.target
        if function is not None and isinstance(target, ast.Name):
            self.names[target.id] = self._changed(target.id, function, one)
            return
        if function is None or not isinstance(target, ast.Subscript):
            raise other_form(f"`{ast.unparse(one)}` may change a tensor in place", "not-pure")
        base, index = self.of(target.value), self._index(target.slice)
        row = self.trip.row(base, index)
        self.trip.store(base, index, self.trip.call(function, row, self.of(one.value)))

    def _changed(self, name: str, function: str, one: ast.AugAssign) -> Symbol:
        """``name += ...``: a number is another one then, a carried tensor is changed in place."""
        old = self._name(name)
        if isinstance(old, Number):
            return self.trip.call(function, old, self.of(one.value))
        if not isinstance(old, Value) or not self.trip.owns(old):
            raise other_form(f"`{ast.unparse(one)}` may change a tensor in place", "not-pure")
        return self.trip.changed(old, self.trip.call(function, old, self.of(one.value)))

    def _index(self, slice_: ast.expr) -> Index:
        """What stands in brackets: the loop variable, and nothing of the other axes."""
        if isinstance(slice_, ast.Tuple) and slice_.elts:
            if not all(_whole(e) for e in slice_.elts[1:]):
                raise other_form("part of a row is picked", "cross-element")
            slice_ = slice_.elts[0]
        found = self.trip.integer(self.of(slice_))
        if not isinstance(found, Index):
            raise other_form("an index does not move with the loop")
        return found

    # -- tests

    def _decide(self, test: ast.expr) -> bool:
        holds = self._test(test)
        outcome = holds(self.trip.sample)
        self.trip.tests.append((holds, outcome))
        return outcome

    def _test(self, test: ast.expr) -> Test:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._test(test.operand)
            return lambda t: not inner(t)
        if isinstance(test, ast.BoolOp):
            parts = [self._test(v) for v in test.values]
            many = all if isinstance(test.op, ast.And) else any
            return lambda t: many(p(t) for p in parts)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            name = _COMPARES.get(type(test.ops[0]))
            if name is not None:
                left = self.trip.integer(self.of(test.left))
                right = self.trip.integer(self.of(test.comparators[0]))
                compare: Callable[[int, int], bool] = getattr(int, f"__{name}__")
                return lambda t: compare(_at(left, t), _at(right, t))
        raise other_form(f"`{ast.unparse(test)}` is no test of the loop variable")

    # -- expressions

    def of(self, node: ast.expr) -> Symbol:
        """What an expression stands for."""
        if isinstance(node, ast.Constant):
            return Number(node.value)
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Tuple):
            return Several(tuple(self.of(e) for e in node.elts))
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Subscript):
            return self.trip.row(self.of(node.value), self._index(node.slice))
        if isinstance(node, ast.IfExp):
            return self.of(node.body if self._decide(node.test) else node.orelse)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            name = _COMPARES.get(type(node.ops[0]))
            if name is not None:
                return self.trip.call(name, self.of(node.left), self.of(node.comparators[0]))
        if isinstance(node, ast.Call):
            return self._call(node)
        raise other_form(f"`{ast.unparse(node)}` is not followed")

    def _name(self, name: str) -> Symbol:
        if name in self.names:
            return self.names[name]
        if name in self.space:
            found = self.space[name]
            if type(found) in (int, float):
                self.trip.named.append((self.space, name, found))
                return Number(found)
            return Global(found)
        if hasattr(builtins, name):
            return Global(getattr(builtins, name))
        raise other_form(f"`{name}` is not known")

    def _attribute(self, node: ast.Attribute) -> Symbol:
        base = self.of(node.value)
        if isinstance(base, Path):
            return Path(base.argument, (*base.names, node.attr))
        known = ("torch", "numpy")
        if isinstance(base, Global) and getattr(base.found, "__name__", "").startswith(known):
            return Global(getattr(base.found, node.attr, None))
        raise other_form(f"`{ast.unparse(node)}` is not followed")

    def _unary(self, node: ast.UnaryOp) -> Symbol:
        symbol = self.of(node.operand)
        if isinstance(node.op, ast.USub):
            if isinstance(symbol, Number) and type(symbol.value) in (int, float):
                return Number(-symbol.value)
            if isinstance(symbol, Index):
                return Index(-symbol.sign, -symbol.offset)
            return self.trip.call("neg", symbol)
        if isinstance(node.op, ast.Invert):
            return self.trip.call("invert", symbol)
        raise other_form(f"`{ast.unparse(node)}` is not followed")

    def _binary(self, node: ast.BinOp) -> Symbol:
        left, right = self.of(node.left), self.of(node.right)
        if isinstance(node.op, ast.MatMult):
            raise other_form(f"`{ast.unparse(node)}` mixes elements", "cross-element")
        function = _OPERATORS.get(type(node.op))
        if function is None:
            raise other_form(f"`{ast.unparse(node)}` is not followed")
        if isinstance(left, Index) or isinstance(right, Index):
            return self._moved(function, self.trip.integer(left), self.trip.integer(right), node)
        return self.trip.call(function, left, right)

    def _moved(
        self, function: str, left: Index | int, right: Index | int, node: ast.BinOp
    ) -> Symbol:
        if function == "sub" and isinstance(right, Index):
            right = Index(-right.sign, -right.offset)
        elif function == "sub" and isinstance(right, int):
            right = -right
        elif function != "add":
            raise other_form(f"`{ast.unparse(node)}` is no index that moves by one a trip")
        if isinstance(left, Index) and isinstance(right, int):
            return Index(left.sign, left.offset + right)
        if isinstance(right, Index) and isinstance(left, int):
            return Index(right.sign, right.offset + left)
        if isinstance(left, Index) and isinstance(right, Index) and left.sign == -right.sign:
            return Number(left.offset + right.offset)
        raise other_form(f"`{ast.unparse(node)}` is no index that moves by one a trip")

    def _call(self, node: ast.Call) -> Symbol:
        named = {k.arg: k.value for k in node.keywords}
        args = [self.of(a) for a in node.args]
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            base = self.of(node.func.value)
            if not isinstance(base, Global):
                return self._function(name, _METHODS.get(name), [base, *args], named, node)
        function = self.of(node.func)
        found = function.found if isinstance(function, Global) else None
        name = getattr(found, "__name__", ast.unparse(node.func))
        told = _TORCH.get(found, _NUMPY.get(found)) if _hashable(found) else None
        self.trip.arrays |= told is not None and found in _NUMPY
        if found is torch.clamp:
            name = "clamp"
        return self._function(name, told, args, named, node)

    def _function(
        self,
        name: str,
        told: tuple[str, int] | None,
        args: list[Symbol],
        named: dict[str | None, ast.expr],
        node: ast.Call,
    ) -> Symbol:
        if name == "astype" and args[1:] == [Global(np.float32)] and not named:
            return self.trip.call("float", args[0])
        if name == "clamp" and args:
            return self._clamped(args, named, node)
        if told is not None and len(args) == told[1] and not named:
            return self.trip.call(told[0], *args)
        if name in ("zeros_like", "ones_like") and len(args) == 1 and not named:
            return self.trip.filled(0.0 if name == "zeros_like" else 1.0, args[0])
        text = ast.unparse(node)
        if name in MIXING:
            raise other_form(f"`{text}` mixes elements", "cross-element")
        if name.endswith("_") and not name.endswith("__"):
            raise other_form(f"`{text}` changes a tensor in place", "not-pure")
        raise other_form(f"`{text}` is not known to work element by element", "opaque-call")

    def _clamped(
        self, args: list[Symbol], named: dict[str | None, ast.expr], node: ast.Call
    ) -> Symbol:
        bounds: dict[str, Symbol] = dict(zip(("min", "max"), args[1:], strict=False))
        bounds.update({str(k): self.of(v) for k, v in named.items()})
        if len(args) > 3 or not bounds or set(bounds) - {"min", "max"}:
            raise other_form(f"`{ast.unparse(node)}` is not followed")
        found: Symbol = args[0]
        for word in ("min", "max"):
            if word in bounds and bounds[word] != Number(None):
                found = self.trip.call(f"clamp_{word}", found, bounds[word])
        return found


def _at(form: Index | int, t: int) -> int:
    return form.at(t) if isinstance(form, Index) else form


def _whole(node: ast.expr) -> bool:
    if isinstance(node, ast.Slice):
        return node.lower is None and node.upper is None and node.step is None
    return isinstance(node, ast.Constant) and node.value is ...


def _hashable(found: Any) -> bool:
    try:
        hash(found)
    except TypeError:
        return False
    return found is not None


def outputs_of(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements assign, in order, each once."""
    seen: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            name = node.id if isinstance(node, ast.Name) else ""
            if name and name not in seen and isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
                seen.add(name)
                yield name
