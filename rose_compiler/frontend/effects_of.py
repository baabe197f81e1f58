"""Effects of one block of the user's statements, by walking its tree with the types seen.

The walk is an abstract interpretation: every expression has the *places* it may share memory with,
the live object it is if that is known, and its type if that is known. Calls are looked up
(declared, in the tables, or by walking the callee's own source); a call that stays unknown reads
and writes everything. Conversions and operators of values whose type is not known (``float(x)``,
``x + y``) are taken to have no effects: a special method that has some is not seen.
"""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.effects_expr import ExpressionWalker
from rose_compiler.frontend.effects_val import (
    CONTAINERS,
    FRESH,
    Effects,
    Val,
    grads_of,
    is_immutable,
    is_tensor,
    iterated,
    joined,
)
from rose_compiler.frontend.modes import context_of, context_of_instance
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.source import is_user_module
from rose_compiler.ir.effects import OUTSIDE

__all__ = ["Surroundings", "Walker"]

_MODULES = (torch.nn.ModuleList, torch.nn.Sequential)
_SHARED = (type, types.ModuleType, types.FunctionType)


@dataclass
class Surroundings:
    """What all walks of one operation share.

    ``params`` are the operation's parameters that are live objects, with the states they stand for.
    ``trained`` are the modes of modules that some operation switches to training: a forward then
    counts as one in training mode, whatever the module's mode was when it was looked at.
    """

    names: StateNames
    changes: Changes
    out: Effects
    params: list[tuple[str, str]] = field(default_factory=list)
    trained: set[str] = field(default_factory=set)

    def named(self, obj: Any) -> str | None:
        """A name for an object that no root leads to: one that a function of the user's holds."""
        stem = type(obj).__name__.lower()
        taken = set(self.names.names.values())
        name, n = f"{OUTSIDE}.held_{stem}", 1
        while name in taken:
            n += 1
            name = f"{OUTSIDE}.held_{stem}_{n}"
        self.names.add(name, obj)
        return self.names.name_of(obj)

    def entry(self, state: str) -> str:
        """A state's name as an effect entry: below a parameter where one leads there."""
        best = ""
        found = f"@{state}"
        for param, name in self.params:
            if (state == name or state.startswith(f"{name}.")) and len(name) > len(best):
                best, found = name, param + state[len(name) :]
        return "*" if state == "*" else found


class Walker(ExpressionWalker):
    """Walks the statements of one block or, below it, of one function called in it."""

    def statements(self, statements: list[ast.stmt]) -> None:
        """Walk statements in order."""
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        handler = getattr(self, f"on_{type(node).__name__}", None)
        if handler is None:
            self.unknown(f"`{type(node).__name__}`", node)
        else:
            handler(node)

    def on_Assign(self, node: ast.Assign) -> None:
        value = self.expr(node.value)
        for target in node.targets:
            self.assign(target, value)

    def on_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.expr(node.value))

    def on_Expr(self, node: ast.Expr) -> None:
        self.expr(node.value)

    def on_Return(self, node: ast.Return) -> None:
        self.returned.append(self.expr(node.value) if node.value else Val(type=type(None)))

    def on_If(self, node: ast.If) -> None:
        self.expr(node.test)
        before = dict(self.bindings)
        self.statements(node.body)
        then = self.bindings
        self.bindings = before
        self.statements(node.orelse)
        self.merge(then)

    def on_For(self, node: ast.For) -> None:
        over = self.expr(node.iter)
        if over.static and type(over.obj) in _MODULES:
            for module in over.obj:  # each is known, unlike what a name bound in turn stands for
                before = dict(self.bindings)
                self.assign(node.target, self.live(module, over.places))
                self.statements(node.body)
                self.merge(before)
            self.statements(node.orelse)
            return
        items = self.iterate(over, node)
        for _ in range(2):  # a second round sees what the first one bound
            before = dict(self.bindings)
            self.assign(node.target, items)
            self.statements(node.body)
            self.merge(before)
        self.statements(node.orelse)

    def on_While(self, node: ast.While) -> None:
        for _ in range(2):
            before = dict(self.bindings)
            self.expr(node.test)
            self.statements(node.body)
            self.merge(before)
        self.statements(node.orelse)

    def on_Try(self, node: ast.Try) -> None:
        before = dict(self.bindings)
        self.statements(node.body)
        self.merge(before)
        for handler in node.handlers:
            before = dict(self.bindings)
            if handler.type is not None:
                self.expr(handler.type)
            if handler.name:
                self.bindings[handler.name] = FRESH
            self.statements(handler.body)
            self.merge(before)
        self.statements(node.orelse)
        self.statements(node.finalbody)

    def on_Assert(self, node: ast.Assert) -> None:
        self.expr(node.test)
        if node.msg is not None:
            self.expr(node.msg)
        self.out.may_raise = True

    def on_Raise(self, node: ast.Raise) -> None:
        for part in (node.exc, node.cause):
            if part is not None:
                self.expr(part)
        self.out.may_raise = True

    def on_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.bindings.pop(target.id, None)
            elif isinstance(target, ast.Attribute):
                base = self.expr(target.value, load=False)
                self.write_attribute(base, target.attr, target)
            else:
                self.write_inside(self.base_of(target))

    def on_Pass(self, node: ast.stmt) -> None:
        pass

    on_Break = on_Continue = on_Pass

    def on_Import(self, node: ast.stmt) -> None:
        self.out.writes.setdefault("host")
        self.out.reads.setdefault("host")
        self.unknown("an import", node)

    on_ImportFrom = on_Import

    def on_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            manager = self.expr(call.func if isinstance(call, ast.Call) else call, load=False)
            known = False
            if isinstance(call, ast.Call):
                for part in (*call.args, *(k.value for k in call.keywords)):
                    self.expr(part)
                known = manager.obj in (torch.set_grad_enabled, torch.autocast) or (
                    manager.static and context_of(manager.obj, (), ()) is not None
                )
            elif manager.static:
                known = context_of_instance(manager.obj) is not None
            if not known:
                self.unknown(f"context manager `{ast.unparse(call)}`", node)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, FRESH)
        self.statements(node.body)

    def on_Match(self, node: ast.Match) -> None:
        subject = self.expr(node.subject)
        self.read(subject)
        before = dict(self.bindings)
        ends = []
        for case in node.cases:
            self.bindings = dict(before)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    self.bindings[name] = Val(subject.all_places)
            if case.guard is not None:
                self.expr(case.guard)
            self.statements(case.body)
            ends.append(self.bindings)
        self.bindings = before
        for end in ends:
            self.merge(end)

    def merge(self, other: dict[str, Val]) -> None:
        """Join what two ways through the code bind."""
        for name, value in other.items():
            mine = self.bindings.get(name)
            self.bindings[name] = value if mine is None else joined([mine, value])

    # -- targets -------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: Val) -> None:
        """Bind or store a value."""
        if isinstance(target, ast.Name):
            self.bindings[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self.unpack(target.elts, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value)
        elif isinstance(target, ast.Attribute):
            base = self.expr(target.value, load=False)
            self.write_attribute(base, target.attr, target)
            self.keep(frozenset(f"{p}.{target.attr}" for p in base.places), value)
        elif isinstance(target, ast.Subscript):
            base = self.expr(target.value, load=False)
            self.expr(target.slice)
            region = self.region(target.slice, base)
            if not is_tensor(base):
                self.read(base)
                self.keep(base.places, value)
            self.write_inside(base, region, items=base.type in CONTAINERS)
        else:
            self.unknown(f"assignment to `{ast.unparse(target)}`", target)

    def unpack(self, targets: list[ast.expr], value: Val) -> None:
        """Bind the items of a value to several targets."""
        exact = value.items if isinstance(value.items, tuple) else None
        starred = any(isinstance(t, ast.Starred) for t in targets)
        if exact is not None and len(exact) == len(targets) and not starred:
            for target, item in zip(targets, exact, strict=True):
                self.assign(target, item)
            return
        self.read(value)
        item = iterated(value)
        for target in targets:
            inner = target.value if isinstance(target, ast.Starred) else target
            self.assign(inner, item if inner is target else item.as_list())

    def write_attribute(self, base: Val, name: str, node: ast.AST) -> None:
        """An attribute of an object is set: the reference it holds, not what it referred to."""
        if name == "grad":
            for place in base.all_places:
                self.out.writes.setdefault(grads_of(place))
        elif is_tensor(base):
            self.write_inside(base)  # data, requires_grad, shape
        elif base.static and isinstance(base.obj, torch.nn.Module) and name == "training":
            for state in self.around.names.part(base.obj, "mode"):
                self.out.writes.setdefault(self.around.entry(state))
                self.around.trained.add(state)
        elif base.type is not None and issubclass(base.type, _SHARED):
            if isinstance(base.obj, types.ModuleType) and not is_user_module(base.obj):
                self.out.reads.setdefault("host")  # a setting of a library's
                self.out.writes.setdefault("host")
            else:
                self.unknown(f"setting `{name}` of a class, module or function", node)
        else:
            for place in base.places:
                self.out.writes.setdefault(f"{place}.{name}")

    def keep(self, holders: frozenset[str], value: Val) -> None:
        """A container or object keeps a reference to a value."""
        if holders and value.all_places and not is_immutable(value):
            self.out.kept.append((holders, value.all_places))

    def on_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.expr(node.value)
        self.read(value)
        if isinstance(node.target, ast.Name):
            old = self.bindings.get(node.target.id, FRESH)
            if is_immutable(old) or (not old.all_places and old.type is None):
                kind = old.type if value.type in (old.type, int) else None
                self.bindings[node.target.id] = Val(type=kind)
                return
            self.read(old)
            self.write_inside(old, items=old.type in CONTAINERS)
            if not is_tensor(old):
                self.keep(old.places, value)
            return
        if isinstance(node.target, ast.Attribute):
            base = self.expr(node.target.value, load=False)
            old = self.expr(
                ast.copy_location(
                    ast.Attribute(node.target.value, node.target.attr, ast.Load()), node.target
                )
            )
            if not is_immutable(old):
                self.write_inside(old, items=old.type in CONTAINERS)
                self.keep(old.places, value)
            self.write_attribute(base, node.target.attr, node)
            return
        base = self.base_of(node.target)
        region = (
            self.region(node.target.slice, base) if isinstance(node.target, ast.Subscript) else ""
        )
        self.read(base, region)
        self.write_inside(base, region)

    def base_of(self, target: ast.expr) -> Val:
        """The object that a target stores into."""
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            if isinstance(target, ast.Subscript):
                self.expr(target.slice)
            return self.expr(target.value, load=False)
        return self.expr(target, load=False)
