"""Proof that a few statements of Python treat the rows of a batch apart.

For the glue between simulator and policy: conversions between numpy and torch, arithmetic, picking
a step's result apart. What the statements call is looked up by identity, so a name means what it
says. Graphs of traced torch code are :mod:`rose_compiler.ir.separable`'s.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend import separable_calls
from rose_compiler.frontend.rows import (
    NOT_STATIC,
    Count,
    Entries,
    Items,
    NotRows,
    RowsValue,
    Same,
    Shape,
    elementwise,
    is_rows,
    of_spec,
    same,
)
from rose_compiler.ir.facts import Spec

Resolve = Callable[[ast.expr], Any]

__all__ = ["NOT_STATIC", "Resolve", "separable_block"]


def separable_block(
    stmts: Sequence[ast.stmt],
    batched_names: Mapping[str, int],
    resolve: Resolve,
    specs: Mapping[str, Spec] | None = None,
) -> dict[str, int] | Blocker:
    """The batch axis of every name that the statements bind to rows.

    A name that they bind and that is missing from the answer is no rows value: nothing is promised
    about it.

    Args:
        stmts: straight-line statements that write nothing but local names.
        batched_names: names the statements read whose rows are the batch, with their axis (only 0).
            A tuple counts as a step's result: its arrays are rows, its infos are not.
        resolve: the live object that a name or an attribute path stands for, wherever it is known
            and can't change; :data:`NOT_STATIC` otherwise.
        specs: recorded types of the names the statements read. Without them only what needs no
            number of axes is proven.
    """
    proof = _Proof(resolve, specs or {})
    try:
        for name, axis in batched_names.items():
            proof.names[name] = of_spec(proof.specs.get(name), axis)
        for statement in stmts:
            proof.statement(statement)
    except NotRows as found:
        return found.blocker
    return {n: 0 for n in proof.bound if is_rows(proof.names[n])}


class _Proof:
    def __init__(self, resolve: Resolve, specs: Mapping[str, Spec]) -> None:
        self.resolve = resolve
        self.specs = specs
        self.names: dict[str, Any] = {}
        self.bound: dict[str, None] = {}

    # --- statements ---

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self.bind(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.bind(node.target, self.value(node.value))
        elif isinstance(node, ast.Pass) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            pass
        else:
            raise NotRows(f"line {node.lineno}: a `{type(node).__name__.lower()}` statement")

    def bind(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            self.bound[target.id] = None
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, Items):
            if len(target.elts) != len(value.items):
                raise NotRows("a tuple of another length is taken apart")
            for each, item in zip(target.elts, value.items, strict=True):
                self.bind(each, item)
        else:
            raise NotRows(f"`{ast.unparse(target)}` is assigned")

    # --- expressions ---

    def value(self, node: ast.expr) -> Any:
        """What is known of an expression's value; fails on any that is not understood."""
        if isinstance(node, ast.Constant):
            return same(node.value)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Tuple | ast.List):
            return Items(tuple(self.value(e) for e in node.elts))
        if isinstance(node, ast.Dict | ast.DictComp):
            return self._entries(node)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise NotRows(f"`{ast.unparse(node)}` is not understood")

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.names:
            return self.names[node.id]
        found = self.resolve(node)
        if found is not NOT_STATIC:
            return same(found)
        return of_spec(self.specs.get(node.id), None)

    def _arithmetic(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.MatMult) and (
            isinstance(left, RowsValue) or isinstance(right, RowsValue)
        ):
            return separable_calls.product(left, right)
        return elementwise([left, right])

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if (
            isinstance(node.op, ast.USub)
            and isinstance(value, Same)
            and type(value.value) in (int, float)
        ):
            return same(-value.value)
        if isinstance(node.op, ast.Not) and not isinstance(value, Same):
            raise NotRows("Python asks for the truth of a batch", "host-read")
        return elementwise([value])

    def _compare(self, node: ast.Compare) -> Any:
        values = [self.value(v) for v in (node.left, *node.comparators)]
        if any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in node.ops):
            if all(isinstance(v, Same) for v in values):
                return Same()
            raise NotRows(f"`{ast.unparse(node)}` looks into a batch")
        if len(node.ops) > 1 and not all(isinstance(v, Same) for v in values):
            raise NotRows("Python asks for the truth of a batch", "host-read")
        return elementwise(values)

    def _attribute(self, node: ast.Attribute) -> Any:
        found = self.resolve(node)
        if found is not NOT_STATIC and not self._local(node):
            return same(found)
        value = self.value(node.value)
        if isinstance(value, RowsValue):
            if node.attr == "shape":
                return Shape(value.tail)
            if node.attr in ("dtype", "device", "ndim", "requires_grad", "layout"):
                return Same()
            if node.attr in ("data", "real", "imag"):
                return value
            raise NotRows(f"the attribute `{node.attr}` of a batch")
        if isinstance(value, Same):
            return Same()
        raise NotRows(f"`{ast.unparse(node)}` is about the whole batch", "batch-coupling")

    def _local(self, node: ast.expr) -> bool:
        """Whether an attribute path starts at a name that the block or the batch binds."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return not isinstance(node, ast.Name) or node.id in self.names

    def _subscript(self, node: ast.Subscript) -> Any:
        value = self.value(node.value)
        if isinstance(value, Items):
            index = self.value(node.slice)
            number = index.value if isinstance(index, Same) else NOT_STATIC
            if type(number) is int and -len(value.items) <= number < len(value.items):
                return value.items[number]
            raise NotRows("a tuple is indexed by something that is not constant")
        if isinstance(value, Entries):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if key in value.items:
                return value.items[key]
            raise NotRows("a dict is indexed by something that is not constant")
        if isinstance(value, Shape):
            index = self.value(node.slice)
            if isinstance(index, Same) and index.value == 0:
                return Count()
            if isinstance(index, Same) and type(index.value) is int and value.tail is not None:
                size = (None, *value.tail)[index.value]
                return same(size) if size is not None else Count()
            raise NotRows("a shape is taken apart")
        if isinstance(value, RowsValue):
            return separable_calls.indexed(value, node.slice, self.value)
        if isinstance(value, Same):
            self.value_or_slice(node.slice)
            return Same()
        raise NotRows(f"`{ast.unparse(node)}` is about the whole batch", "batch-coupling")

    def value_or_slice(self, node: ast.expr) -> None:
        """Check that an index of something that is no batch is no batch either."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        for part in parts:
            inner = [part.lower, part.upper, part.step] if isinstance(part, ast.Slice) else [part]
            for each in inner:
                if each is not None and not isinstance(self.value(each), Same):
                    raise NotRows(f"`{ast.unparse(node)}`: a batch is an index")

    def _entries(self, node: ast.Dict | ast.DictComp) -> Entries:
        """A dict with names as keys, written out or made of another one's entries."""
        if isinstance(node, ast.Dict):
            keys = [k.value if isinstance(k, ast.Constant) else None for k in node.keys]
            if not all(type(k) is str for k in keys):
                raise NotRows("a dict with keys that are not constant")
            return Entries({str(k): self.value(v) for k, v in zip(keys, node.values, strict=True)})
        (first, *more), target = node.generators, node.generators[0].target
        source = first.iter
        if (
            more
            or first.ifs
            or first.is_async
            or not isinstance(target, ast.Tuple)
            or not all(isinstance(e, ast.Name) for e in target.elts)
            or len(target.elts) != 2
            or ast.unparse(node.key) != ast.unparse(target.elts[0])
            or not isinstance(source, ast.Call)
            or source.args
            or source.keywords
            or not isinstance(source.func, ast.Attribute)
            or source.func.attr != "items"
            or not isinstance(of := self.value(source.func.value), Entries)
        ):
            raise NotRows(f"`{ast.unparse(node)}` is not understood")
        key, value = (e.id for e in target.elts if isinstance(e, ast.Name))
        outer, found = dict(self.names), {}
        for name, entry in of.items.items():
            self.names |= {key: same(name), value: entry}
            found[name] = self.value(node.value)
        self.names = outer
        return Entries(found)

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise NotRows("a call with * or **")
        args = [self.value(a) for a in node.args]
        keywords = {str(k.arg): self.value(k.value) for k in node.keywords}
        if isinstance(node.func, ast.Attribute) and self._is_value(node.func.value):
            receiver = self.value(node.func.value)
            if not isinstance(receiver, Same):
                return separable_calls.method(node.func.attr, receiver, args, keywords)
        function = self.resolve(node.func)
        if function is NOT_STATIC or self._local(node.func):
            raise NotRows(f"`{ast.unparse(node.func)}` is not known")
        return separable_calls.function(function, args, keywords)

    def _is_value(self, node: ast.expr) -> bool:
        """Whether a method's receiver is a value of the block, no module or object."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._local(node)
        return True
