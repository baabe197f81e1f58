"""Expressions of a dump, read from syntax trees: constants, arguments, calls and operators."""

from __future__ import annotations

import ast
import builtins
import keyword
import operator
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.errors import RoseError, SourceLocation, fail, nearest
from rose_compiler.ir import functions
from rose_compiler.ir.dump_expr import RESERVED
from rose_compiler.ir.ops import BUILTINS, UNBOUND, Op

Value = Any  # fx.Node, or a Python constant

BINARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
#: Bits of a whole number: more can be read, written as hexadecimals, but not be shown again.
MOST_BITS = 4096
UNARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
_TORCH_CONSTANTS = {
    str(found): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype | torch.layout | torch.memory_format)
}
# fx gives nodes of these names a suffix.
_UNUSABLE = frozenset((*dir(builtins), *keyword.kwlist, *dir(types.ModuleType("m")))) | {
    *("torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree")
}


@dataclass
class Reader:
    """What all parts of one parse share: the text for messages, operations and names in use."""

    lines: list[str]
    file: str
    ops: dict[str, Op] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def error(
        self,
        where: Any,
        what: str,
        *,
        code: str = "parse-syntax",
        expected: object = None,
        found: object = None,
    ) -> RoseError:
        """A ``ParseError`` at a syntax node, or at a line number."""
        line = where if isinstance(where, int) else getattr(where, "lineno", 1)
        column = None if isinstance(where, int) else getattr(where, "col_offset", None)
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        place = SourceLocation(self.file, line, column, text)
        return fail(code, what, where=place, expected=expected, found=found)

    def fresh(self, stem: str) -> str:
        """A node name that no name of the text, and no other such name, can clash with."""
        stem = re.sub(r"\W", "_", stem, flags=re.ASCII) or "v"
        name, n = stem, 0
        while name in self.taken or name in _UNUSABLE:
            n += 1
            name = f"{stem}_{n}"
        self.taken.add(name)
        return name


def dotted(expr: ast.expr) -> str | None:
    """``a.b.c`` as text, or None for any other expression."""
    parts = []
    while isinstance(expr, ast.Attribute):
        parts.append(expr.attr)
        expr = expr.value
    if not isinstance(expr, ast.Name):
        return None
    return ".".join([expr.id, *reversed(parts)])


def qualified(expr: ast.expr) -> str | None:
    """A dotted name below one of the known roots, or None."""
    name = dotted(expr)
    return name if name is not None and name.split(".")[0] in functions.ROOTS else None


def makes_node(expr: ast.expr) -> bool:
    """Whether an expression calls something, rather than only naming values and constants."""
    if isinstance(expr, ast.Call):
        name = dotted(expr.func)
        return name not in ("float", "frozenset", "slice", "torch.device")
    if isinstance(expr, ast.Attribute):
        return qualified(expr) is None
    if isinstance(expr, ast.UnaryOp):
        return not isinstance(expr.operand, ast.Constant)
    return isinstance(expr, ast.BinOp | ast.Compare | ast.Subscript)


class Expressions:
    """Reads expressions into values, a node per call. Subclasses know the names and the graph."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    # What a subclass decides.

    def lookup(self, expr: ast.Name) -> Value:
        raise self.reader.error(expr, f"{expr.id!r} stands where only constants may")

    def make(
        self, where: ast.expr, kind: str, target: Any, args: Any, kwargs: Any, name: str
    ) -> Value:
        """Add a node of fx ``kind`` ("call_function", "call_method")."""
        raise self.reader.error(where, "a call stands where only constants may")

    def call_name(self, expr: ast.Call, function: ast.Name, name: str | None) -> Value:
        """A call of a plain name: an operation."""
        raise self.reader.error(expr, "a call stands where only constants may")

    def attribute(self, expr: ast.Attribute, base: Value, name: str | None) -> Value:
        raise self.reader.error(expr, f"attribute {expr.attr!r} can't be read here")

    # The language.

    def constant(self, expr: ast.expr | None) -> Any:
        """A value in which no names occur."""
        assert expr is not None
        return Expressions(self.reader).value(expr)

    def value(self, expr: ast.expr, name: str | None = None) -> Value:
        """The value of an expression; its outermost call becomes a node called ``name``."""
        match expr:
            case ast.Constant():
                return self._literal(expr)
            case ast.Name():
                if expr.id == "UNBOUND":
                    return UNBOUND
                if expr.id in RESERVED:
                    raise self.reader.error(expr, f"{expr.id!r} is no value")
                return self.lookup(expr)
            case ast.Tuple():
                return tuple(self.value(e) for e in expr.elts)
            case ast.List():
                return [self.value(e) for e in expr.elts]
            case ast.Dict():
                return self._dict(expr)
            case ast.UnaryOp():
                return self._unary(expr, name)
            case ast.BinOp() if type(expr.op) in BINARY:
                return self._operator(expr, BINARY[type(expr.op)], [expr.left, expr.right], name)
            case ast.Compare(ops=[op], comparators=[right]) if type(op) in BINARY:
                return self._operator(expr, BINARY[type(op)], [expr.left, right], name)
            case ast.Subscript():
                base = self.value(expr.value)
                if not isinstance(base, fx.Node):
                    raise self.reader.error(expr, "a constant is indexed")
                index = self._index(expr.slice)
                return self._function(expr, operator.getitem, [base, index], {}, name)
            case ast.Attribute():
                found = qualified(expr)
                if found is not None:
                    return self._torch_constant(expr, found)
                return self.attribute(expr, self.value(expr.value), name)
            case ast.Call():
                return self._call(expr, name)
        what = type(expr).__name__
        raise self.reader.error(expr, f"an expression of kind {what} is not part of the language")

    def _literal(self, expr: ast.Constant) -> Any:
        if expr.value is None or expr.value is Ellipsis:
            return expr.value
        if type(expr.value) not in (bool, int, float, str):
            raise self.reader.error(expr, f"a constant of type {type(expr.value).__name__}")
        if type(expr.value) is int and expr.value.bit_length() > MOST_BITS:
            raise self.reader.error(expr, f"a number of {expr.value.bit_length()} bits")
        return expr.value

    def _dict(self, expr: ast.Dict) -> dict[Any, Value]:
        found: dict[Any, Value] = {}
        for key, item in zip(expr.keys, expr.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise self.reader.error(expr, "a key of a dict must be a literal")
            found[self._literal(key)] = self.value(item)
        return found

    def _unary(self, expr: ast.UnaryOp, name: str | None) -> Value:
        operand = expr.operand
        if isinstance(operand, ast.Constant) and isinstance(expr.op, ast.USub):
            if type(operand.value) not in (int, float):
                raise self.reader.error(expr, "`-` stands before something that is no number")
            return -self._literal(operand)
        if type(expr.op) not in UNARY:
            raise self.reader.error(expr, "this unary operator is not part of the language")
        return self._operator(expr, UNARY[type(expr.op)], [operand], name)

    def _operator(
        self, expr: ast.expr, function: Any, operands: list[ast.expr], name: str | None
    ) -> Value:
        return self._function(expr, function, [self.value(o) for o in operands], {}, name)

    def _index(self, expr: ast.expr) -> Value:
        if isinstance(expr, ast.Slice):
            ends = (expr.lower, expr.upper, expr.step)
            return slice(*(None if e is None else self.value(e) for e in ends))
        if isinstance(expr, ast.Tuple):
            return tuple(self._index(e) for e in expr.elts)
        return self.value(expr)

    def _torch_constant(self, expr: ast.expr, name: str) -> Any:
        if name not in _TORCH_CONSTANTS:
            raise self.reader.error(
                expr,
                f"{name} is no constant",
                code="parse-unknown-name",
                expected="a dtype, layout or memory format of torch",
            )
        return _TORCH_CONSTANTS[name]

    def _function(
        self, where: ast.expr, function: Any, args: list[Value], kwargs: Any, name: str | None
    ) -> Value:
        name = name or self.reader.fresh(getattr(function, "__name__", "call").split(".")[0])
        return self.make(where, "call_function", function, tuple(args), kwargs, name)

    def _call(self, expr: ast.Call, name: str | None) -> Value:
        function = expr.func
        if isinstance(function, ast.Name):
            if function.id in ("float", "frozenset", "slice"):
                return self._constructed(expr, function.id)
            return self.call_name(expr, function, name)
        if not isinstance(function, ast.Attribute):
            raise self.reader.error(expr, "only names can be called")
        path = qualified(function)
        if path == "torch.device":
            return self._constructed(expr, path)
        if path is not None:
            resolved = functions.resolve(path)
            if resolved is None:
                raise self.reader.error(
                    expr,
                    f"{path} is none of the functions that a program may call",
                    code="parse-unknown-op",
                )
            args, kwargs = self.arguments(expr)
            return self._function(expr, resolved, args, kwargs, name)
        if function.attr not in functions.methods():
            known = nearest(function.attr, functions.methods())
            raise self.reader.error(
                expr, f"{function.attr!r} is no method of tensors{known}", code="parse-unknown-op"
            )
        base = self.value(function.value)
        if not isinstance(base, fx.Node):
            raise self.reader.error(expr, "a method of a constant is called")
        args, kwargs = self.arguments(expr)
        name = name or self.reader.fresh(function.attr)
        return self.make(expr, "call_method", function.attr, (base, *args), kwargs, name)

    def arguments(self, expr: ast.Call) -> tuple[list[Value], dict[str, Value]]:
        """Positional and keyword arguments of a call."""
        args = [self.value(a) for a in expr.args]
        kwargs: dict[str, Value] = {}
        for word in expr.keywords:
            if word.arg is None or word.arg in kwargs:
                raise self.reader.error(expr, "`**` or an argument given twice")
            kwargs[word.arg] = self.value(word.value)
        return args, kwargs

    def _constructed(self, expr: ast.Call, name: str) -> Any:
        args, kwargs = self.arguments(expr)
        if not kwargs:
            if name == "slice" and len(args) == 3:
                return slice(*args)
            if name == "float" and args in (["inf"], ["-inf"], ["nan"]):
                return float(args[0])
            if name == "frozenset" and len(args) == 1 and _are_plain(args[0]):
                return frozenset(args[0])
            if name == "torch.device" and len(args) == 1 and type(args[0]) is str:
                try:
                    return torch.device(args[0])
                except RuntimeError:
                    pass
        raise self.reader.error(
            expr,
            f"{name}(...) with arguments that it does not take",
            expected='float("inf"), slice(a, b, c) or torch.device("type:index")',
        )


def is_strings(found: Any) -> bool:
    """Whether a constant is a list of strings."""
    return isinstance(found, list) and all(type(i) is str for i in found)


def _are_plain(items: Any) -> bool:
    return isinstance(items, list) and all(type(i) in (bool, int, float, str) for i in items)


def builtin(name: str) -> Op | None:
    row = BUILTINS.get(name)
    return row.op if row else None
