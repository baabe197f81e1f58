"""What the names of a function stand for while it is lowered: values, live objects, constants."""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.frontend.components import is_component_call
from rose_compiler.frontend.source import FunctionSource
from rose_compiler.ir.ops import UNBOUND

SCALARS = (int, float, bool, str, bytes, type(None), complex)


@dataclass(frozen=True)
class Static:
    """A name or path that stands for a live object known at capture.

    ``node`` is the state node of its root in the graph where the root was born; ``path`` leads from the root to
    the object.
    """

    value: Any
    root: str
    path: str = ""

    @property
    def full(self) -> str:
        return f"{self.root}.{self.path}" if self.path else self.root


class Missing:
    """What :meth:`Scope.fold` answers for what is not known at capture."""


NOT_STATIC = Missing()


def is_scalar(value: Any) -> bool:
    """Whether a value is folded into the program: a number, text, ``None``, dtype, device or a tuple of such."""
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return True
    if type(value) in SCALARS:
        return True
    return type(value) is tuple and all(is_scalar(v) for v in value)


@dataclass
class Session:
    """What one capture shares between all scopes: roots, folded configuration, written attributes."""

    roots: dict[str, Any] = field(default_factory=dict)
    folded: dict[str, Any] = field(default_factory=dict)  # path -> value seen
    written_attributes: set[str] = field(default_factory=set)
    root_names: dict[int, str] = field(default_factory=dict)
    declared_roots: set[str] = field(default_factory=set)
    new_root: Callable[[str, Any], None] = lambda name, value: None
    rebindable: dict[str, Callable[[], Any]] = field(default_factory=dict)  # global/closure roots

    def root(self, stem: str, value: Any, current: Callable[[], Any] | None = None) -> str:
        """The root name of a live object; a new root for one that has none."""
        known = self.root_names.get(id(value))
        if known is not None:
            return known
        name = stem
        n = 1
        while name in self.roots:
            name = f"{stem}_{n}"
            n += 1
        self.roots[name] = value
        self.root_names[id(value)] = name
        if current is not None:
            self.rebindable[name] = current
        self.new_root(name, value)
        return name


_FOLDABLE_BINOPS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
}
_FOLDABLE_COMPARES: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class Scope:
    """Names of one function: its own or an inlined one's."""

    def __init__(self, source: FunctionSource, session: Session) -> None:
        self.source = source
        self.session = session
        self.bindings: dict[str, Any] = {}  # name -> fx.Node | Static | constant | UNBOUND
        self.locals: set[str] = set()
        self._stores: dict[str, int] | None = None

    # -- names ---------------------------------------------------------------------------------

    def lookup(self, name: str) -> Any:
        """The binding of a name: a node, a :class:`Static`, a constant, ``UNBOUND``; or
        ``NOT_STATIC`` for a global that does not exist."""
        if name in self.bindings:
            return self.bindings[name]
        if name in self.locals:
            return UNBOUND
        cells = self.source.closure
        if name in cells:
            cell = cells[name]
            try:
                value = cell.cell_contents
            except ValueError:
                return NOT_STATIC
            if is_scalar(value):
                return self._outer(name, value, lambda: cell.cell_contents)
            return Static(value, self.session.root(name, value, lambda: cell.cell_contents))
        space = self.source.globals
        if name in space:
            return self._outer(name, space[name], lambda: space.get(name))
        if hasattr(builtins, name):
            return Static(getattr(builtins, name), "")
        return NOT_STATIC

    def _outer(self, name: str, value: Any, current: Callable[[], Any]) -> Any:
        if isinstance(
            value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
        ) or callable_only(value):
            self.session.rebindable.setdefault(f"<{self.source.node.name}>.{name}", current)
            self.session.folded.setdefault(f"<{self.source.node.name}>.{name}", value)
            return Static(value, "")
        if is_scalar(value):
            key = f"<{self.source.node.name}>.{name}"
            self.session.rebindable.setdefault(key, current)
            self.session.folded.setdefault(key, value)
            return value
        return Static(value, self.session.root(name, value, current))

    def stores(self, name: str) -> int:
        """How many times the function assigns a name."""
        if self._stores is None:
            self._stores = {}
            for part in ast.walk(self.source.node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    self._stores[part.id] = self._stores.get(part.id, 0) + 1
        return self._stores.get(name, 0)

    # -- live objects --------------------------------------------------------------------------

    def resolve(self, expression: ast.expr) -> Any:
        """The live object behind an expression, or ``None``."""
        found = self.static(expression)
        return None if found is None else found.value

    def resolves_to_component(self, expression: ast.expr) -> bool:
        """Whether calling the expression calls a policy, simulator or trainer."""
        found = self.static(expression)
        return found is not None and is_component_call(found.value)

    def binding_object(self, target: ast.Name | ast.Attribute) -> Any:
        """The live object that an assignment target names before the assignment."""
        if isinstance(target, ast.Name):
            found = self.bindings.get(target.id)
            return found.value if isinstance(found, Static) else None
        base = self.static(target.value)
        return None if base is None else getattr(base.value, target.attr, None)

    def static(self, expression: ast.expr) -> Static | None:
        """The live object behind a name or an attribute path, if it is known and can't change
        inside the program."""
        if isinstance(expression, ast.Name):
            found = self.lookup(expression.id)
            return found if isinstance(found, Static) else None
        if isinstance(expression, ast.Attribute):
            base = self.static(expression.value)
            if base is None or expression.attr in self.session.written_attributes:
                return None
            value = read_attribute(base.value, expression.attr)
            if value is NOT_STATIC:
                return None
            path = f"{base.path}.{expression.attr}" if base.path else expression.attr
            return Static(value, base.root, path if base.root else "")
        if (
            isinstance(expression, ast.Call)
            and isinstance(expression.func, ast.Name)
            and expression.func.id == "super"
        ):
            return None
        return None

    def fold(self, expression: ast.expr) -> Any:
        """The constant an expression always has, or ``NOT_STATIC``. Configuration that was read is
        recorded, so that a guard can compare it before the next call."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            found = self.lookup(expression.id)
            if isinstance(found, (fx.Node, Missing)) or found is UNBOUND:
                return NOT_STATIC
            if isinstance(found, Static):
                return NOT_STATIC if not is_scalar(found.value) else self._folded(found)
            return found
        if isinstance(expression, ast.Attribute):
            found = self.static(expression)
            if found is not None and is_scalar(found.value):
                return self._folded(found)
            return NOT_STATIC
        if isinstance(expression, ast.UnaryOp):
            value = self.fold(expression.operand)
            if isinstance(value, Missing):
                return NOT_STATIC
            if isinstance(expression.op, ast.Not):
                return not value
            if isinstance(expression.op, ast.USub) and isinstance(value, (int, float)):
                return -value
            return NOT_STATIC
        if isinstance(expression, ast.BoolOp):
            stop = isinstance(expression.op, ast.Or)
            value = NOT_STATIC
            for part in expression.values:
                value = self.fold(part)
                if isinstance(value, Missing) or bool(value) is stop:
                    return value
            return value
        if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
            return self._fold_compare(expression)
        if isinstance(expression, ast.BinOp) and type(expression.op) in _FOLDABLE_BINOPS:
            left, right = self.fold(expression.left), self.fold(expression.right)
            if isinstance(left, (int, float)) and isinstance(right, (int, float)):
                try:
                    return _FOLDABLE_BINOPS[type(expression.op)](left, right)
                except ArithmeticError:
                    return NOT_STATIC
        if isinstance(expression, ast.Call):
            return self._fold_call(expression)
        return NOT_STATIC

    def _fold_compare(self, expression: ast.Compare) -> Any:
        op = type(expression.ops[0])
        left, right = self.fold(expression.left), self.fold(expression.comparators[0])
        if op in (ast.Is, ast.IsNot) and (left is None or right is None):
            other = expression.left if right is None else expression.comparators[0]
            value = left if right is None else right
            if isinstance(value, Missing):
                known = self.static(other)
                if known is None:
                    return NOT_STATIC
                value = known.value
            return (value is None) is (op is ast.Is)
        if isinstance(left, Missing) or isinstance(right, Missing) or op not in _FOLDABLE_COMPARES:
            return NOT_STATIC
        try:
            return _FOLDABLE_COMPARES[op](left, right)
        except TypeError:
            return NOT_STATIC

    def _fold_call(self, expression: ast.Call) -> Any:
        target = self.static(expression.func)
        if target is None or expression.keywords:
            return NOT_STATIC
        args = [self.fold(a) for a in expression.args]
        if target.value is isinstance or target.value is hasattr:
            known = self.static(expression.args[0]) if expression.args else None
            if known is None or len(args) != 2:
                return NOT_STATIC
            if (
                target.value is hasattr
                and isinstance(args[1], str)
                and args[1] not in self.session.written_attributes
            ):
                return hasattr(known.value, args[1])
            cls = self.static(expression.args[1])
            return (
                isinstance(known.value, cls.value)
                if target.value is isinstance and cls is not None
                else NOT_STATIC
            )
        if (
            target.value in (int, float, bool, min, max, abs)
            and args
            and all(isinstance(a, (int, float)) for a in args)
        ):
            return target.value(*args)
        return NOT_STATIC

    def _folded(self, found: Static) -> Any:
        if found.root:
            self.session.folded.setdefault(found.full, found.value)
        return found.value


def callable_only(value: Any) -> bool:
    """Whether an object is only good for being called: a method, a ufunc, a torch operator."""
    import numpy as np

    return isinstance(value, (types.MethodType, np.ufunc, types.MethodDescriptorType)) or (
        callable(value) and type(value).__module__.startswith(("torch._ops", "functools"))
    )


def read_attribute(owner: Any, name: str) -> Any:
    """An attribute that reading can't change: instance data, methods, properties of libraries."""
    try:
        raw = inspect.getattr_static(owner, name)
    except AttributeError:
        raw = None
    if isinstance(raw, property):
        module = getattr(raw.fget, "__module__", "") or ""
        if not module.startswith(("gymnasium", "torch", "numpy", "rose_compiler", "envpool")):
            return NOT_STATIC
    try:
        return getattr(owner, name)
    except Exception:  # whatever a user's __getattr__ raises, the path is not known
        return NOT_STATIC
