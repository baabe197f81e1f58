"""What the names of a function stand for while it is lowered: values, live objects, constants."""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import CaptureError
from rose_compiler.frontend.attributes import (
    NOT_STATIC as NOT_STATIC,
)
from rose_compiler.frontend.attributes import (
    Missing as Missing,
)
from rose_compiler.frontend.attributes import (
    callable_only,
)
from rose_compiler.frontend.attributes import (
    read_attribute as read_attribute,
)
from rose_compiler.frontend.changes import mangled
from rose_compiler.frontend.components import is_component_call
from rose_compiler.frontend.scalar import is_scalar as is_scalar
from rose_compiler.frontend.session import Session as Session
from rose_compiler.frontend.session import Static as Static
from rose_compiler.frontend.source import (
    FunctionSource,
    is_user_code,
    is_user_module,
    is_user_type,
    read,
)
from rose_compiler.ir.ops import UNBOUND

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


_MAX_PROPERTIES = 4


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class Scope:
    """Names of one function: its own or an inlined one's."""

    def __init__(self, source: FunctionSource, session: Session) -> None:
        self.source = source
        self.session = session
        self.bindings: dict[str, Any] = {}  # name -> fx.Node | Static | constant | UNBOUND
        self.locals: set[str] = set()
        self._stores: dict[str, int] | None = None
        self._taken: set[str] | None = None
        self.depth = 0  # of properties that read properties

    # -- names ---------------------------------------------------------------------------------

    def lookup(self, name: str) -> Any:
        """The binding of a name: a node, a :class:`Static`, a constant, ``UNBOUND``; or
        ``NOT_STATIC`` for a global that does not exist."""
        if name in self.bindings:
            return self.bindings[name]
        if name in self.locals:
            return UNBOUND
        cell = self.source.closure.get(name)
        if cell is not None:
            try:
                value = cell.cell_contents
            except ValueError:
                return NOT_STATIC
            if is_scalar(value):
                return self._folded_name(name, value, lambda: cell.cell_contents)
            return self.session.root(name, value, lambda: cell.cell_contents)
        space = self.source.globals
        if name in space:
            if self.session.changes.global_(space, name):
                return NOT_STATIC
            return self._outer(name, space[name], lambda: space.get(name))
        if hasattr(builtins, name):
            return Static(getattr(builtins, name), "")
        return NOT_STATIC

    def _outer(self, name: str, value: Any, current: Callable[[], Any]) -> Any:
        kinds = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
        if isinstance(value, kinds) or callable_only(value):
            self._folded_name(name, value, current)
            return Static(value, "")
        if is_scalar(value):
            return self._folded_name(name, value, current)
        return self.session.root(name, value, current)

    def _folded_name(self, name: str, value: Any, current: Callable[[], Any]) -> Any:
        key = f"<{self.source.node.name}>.{name}"
        self.session.rebindable.setdefault(key, current)
        self.session.folded.setdefault(key, value)
        return value

    def stores(self, name: str) -> int:
        """How many times the function assigns a name."""
        if self._stores is None:
            self._stores = {}
            for part in ast.walk(self.source.node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    self._stores[part.id] = self._stores.get(part.id, 0) + 1
        return self._stores.get(name, 0)

    def fresh(self, stem: str) -> str:
        """A variable name that the function does not use."""
        if self._taken is None:
            self._taken = {n.id for n in ast.walk(self.source.node) if isinstance(n, ast.Name)}
            self._taken |= {n.arg for n in ast.walk(self.source.node) if isinstance(n, ast.arg)}
        name, n = stem, 1
        while name in self._taken or name in self.bindings or hasattr(builtins, name):
            n += 1
            name = f"{stem}_{n}"
        self._taken.add(name)
        return name

    def local(self, stem: str) -> str:
        """A new variable of the function."""
        name = self.fresh(stem)
        self.locals.add(name)
        return name

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
        if isinstance(expression, ast.Call):
            return self._super(expression)
        if isinstance(expression, ast.Attribute):
            base = self.static(expression.value)
            if base is None:
                return None
            name = mangled(expression.attr, self.source.owner)
            if not isinstance(base.value, super) and self.session.changes.attribute(
                base.value, name
            ):
                return None
            value = read_attribute(base.value, name)
            if value is NOT_STATIC:
                return None
            if isinstance(base.value, super):
                return Static(value, base.root, base.path) if callable(value) else None
            path = f"{base.path}.{name}" if base.path else name
            self._guard_function(expression, base, path, value)
            return self.session.static(value, base.root, path if base.root else "")
        return None

    def _guard_function(
        self, expression: ast.Attribute, base: Static, path: str, value: Any
    ) -> None:
        """Have it noticed when another function is put in a method's or a helper's place."""
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType):
            return
        if base.root:
            self.session.folded.setdefault(f"{base.root}.{path}()", function)
        elif value is function:
            self._guard_outer(expression)

    def _super(self, call: ast.Call) -> Static | None:
        """``super(__class__, self)``, as a proxy of the live object."""
        if not isinstance(call.func, ast.Name) or call.func.id != "super" or len(call.args) != 2:
            return None
        cls, obj = (self.static(a) for a in call.args)
        if cls is None or obj is None or not isinstance(cls.value, type):
            return None
        return Static(super(cls.value, obj.value), obj.root, obj.path)

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
            if found is None:
                return self._fold_property(expression)
            if not is_scalar(found.value):
                return NOT_STATIC
            if not found.root:
                self._guard_outer(expression)
            return self._folded(found)
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

    def _fold_property(self, expression: ast.Attribute) -> Any:
        """A property of the user's that gives an expression of configuration:
        ``return self.envs * self.steps``."""
        base = self.static(expression.value)
        if base is None or isinstance(base.value, (super, type)) or self.depth > _MAX_PROPERTIES:
            return NOT_STATIC
        name = mangled(expression.attr, self.source.owner)
        raw = inspect.getattr_static(type(base.value), name, None)
        if not isinstance(raw, property) or not isinstance(raw.fget, types.FunctionType):
            return NOT_STATIC
        if name in getattr(base.value, "__dict__", {}) or not is_user_code(raw.fget):
            return NOT_STATIC
        try:
            inner = Scope(read(raw.fget), self.session)
        except CaptureError:
            return NOT_STATIC
        body = [s for s in inner.source.node.body if not _is_text(s)]
        arguments = inner.source.node.args.args
        if len(body) != 1 or len(arguments) != 1 or not isinstance(body[0], ast.Return):
            return NOT_STATIC
        if body[0].value is None or hasattr(raw.fget, "__wrapped__"):
            return NOT_STATIC
        inner.depth = self.depth + 1
        inner.locals = {arguments[0].arg}
        inner.bindings[arguments[0].arg] = base
        return inner.fold(body[0].value)

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
                and not self.session.changes.attribute(known.value, args[1])
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

    def _guard_outer(self, expression: ast.Attribute) -> None:
        """Configuration kept in a module or a class of the user's."""
        base = self.static(expression.value)
        if base is None or base.root:
            return
        owner, name = base.value, expression.attr
        if isinstance(owner, types.ModuleType):
            mine = is_user_module(owner)
        else:
            mine = isinstance(owner, type) and is_user_type(owner)
        if mine:
            key = f"<{getattr(owner, '__name__', '')}>.{name}"
            self.session.rebindable.setdefault(key, lambda: getattr(owner, name))
            self.session.folded.setdefault(key, getattr(owner, name))

    def _folded(self, found: Static) -> Any:
        if found.root:
            self.session.folded.setdefault(found.full, found.value)
        return found.value
