"""Effects of one block of the user's statements, by walking its tree with the types that were seen.

The walk is an abstract interpretation: every expression has the *places* it may share memory with,
the live object it is if that is known, and its type if that is known. Calls are looked up (declared,
in the tables, or by walking the callee's own source); a call that stays unknown reads and writes
everything.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend import effects_call
from rose_compiler.frontend.effects_val import (
    FRESH,
    IMMUTABLE,
    Effects,
    Val,
    has_plain_items,
    is_immutable,
    is_tensor,
)
from rose_compiler.frontend.modes import context_of
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.scope import NOT_STATIC, is_scalar, read_attribute

_OPERANDS = (*IMMUTABLE, torch.Tensor, np.ndarray, list, tuple, dict, set)


class Walker:
    """Walks the statements of one block or, below it, of one function called in it."""

    def __init__(
        self,
        names: StateNames,
        globals_: dict[str, Any],
        bindings: dict[str, Val],
        out: Effects,
        closure: dict[str, Any] | None = None,
        chain: tuple[Any, ...] = (),
        leaves: list[str] | None = None,
    ) -> None:
        self.names = names
        self.globals = globals_
        self.bindings = bindings
        self.out = out
        self.closure = closure or {}
        self.chain = chain
        self.leaves = leaves
        self.returned: list[Val] = []

    # -- effects -------------------------------------------------------------------------------

    def read(self, value: Val, suffix: str = "") -> None:
        for place in value.places:
            self.out.reads.setdefault(place + suffix)

    def write(self, value: Val, suffix: str = "") -> None:
        for place in value.places:
            self.out.writes.setdefault(place + suffix)

    def unknown(self, what: str, node: ast.AST) -> Val:
        if not self.out.unknown:
            self.out.unknown = f"{what} (line {getattr(node, 'lineno', '?')})"
        return FRESH

    def canonical(self, place: str, obj: Any) -> str:
        """The one name of a live object: the path as written, unless another path came first."""
        return self.names_entry(self.names.name_of(obj), place)

    def names_entry(self, name: str | None, place: str) -> str:
        if name is None or place.startswith(("@", "rng:")) or place == "host":
            return place
        root = place.split(".")[0]
        bound = self.bindings.get(root)
        base = self.names.name_of(bound.obj) if bound is not None and bound.static else None
        if base is not None:
            tail = place[len(root) :]
            if base + tail == name:
                return place
            if name.startswith(base + "."):
                return root + name[len(base) :]
        return f"@{name}"

    # -- statements ----------------------------------------------------------------------------

    def statements(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.expr(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign(node.target, self.expr(node.value))
        elif isinstance(node, ast.AugAssign):
            self.aug_assign(node)
        elif isinstance(node, ast.Expr):
            self.expr(node.value)
        elif isinstance(node, ast.Return):
            self.returned.append(self.expr(node.value) if node.value else FRESH)
        elif isinstance(node, ast.If):
            self.expr(node.test)
            before = dict(self.bindings)
            self.statements(node.body)
            then = self.bindings
            self.bindings = before
            self.statements(node.orelse)
            self.merge(then)
        elif isinstance(node, (ast.For, ast.While)):
            if isinstance(node, ast.For):
                iterated = self.expr(node.iter)
                self.read(iterated)
                item = Val(iterated.places) if not has_plain_items(iterated) else FRESH
            for _ in range(2):  # a second round sees what the first one bound
                before = dict(self.bindings)
                if isinstance(node, ast.For):
                    self.assign(node.target, item)
                else:
                    self.expr(node.test)
                self.statements(node.body)
                self.merge(before)
            self.statements(node.orelse)
        elif isinstance(node, ast.With):
            self.with_(node)
        elif isinstance(node, ast.Try):
            self.statements(node.body)
            for handler in node.handlers:
                before = dict(self.bindings)
                if handler.name:
                    self.bindings[handler.name] = FRESH
                self.statements(handler.body)
                self.merge(before)
            self.statements(node.orelse)
            self.statements(node.finalbody)
        elif isinstance(node, ast.Assert):
            self.expr(node.test)
            self.out.may_raise = True
        elif isinstance(node, ast.Raise):
            if node.exc is not None:
                self.expr(node.exc)
            self.out.may_raise = True
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self.bindings.pop(target.id, None)
                else:
                    self.write(self.base_of(target))
        elif isinstance(node, (ast.Pass, ast.Break, ast.Continue)):
            pass
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.out.writes.setdefault("host")
            self.out.reads.setdefault("host")
        else:
            self.unknown(f"`{type(node).__name__}`", node)

    def with_(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            target = self.expr(call.func) if isinstance(call, ast.Call) else FRESH
            if (
                isinstance(call, ast.Call)
                and target.static
                and context_of(target.obj, (), ()) is not None
            ):
                continue
            if isinstance(call, ast.Call) and target.obj in (
                torch.set_grad_enabled,
                torch.autocast,
            ):
                continue
            value = self.expr(call)
            self.unknown(f"context manager `{ast.unparse(call)}`", node)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Val(value.places))
        self.statements(node.body)

    def merge(self, other: dict[str, Val]) -> None:
        """Join what two ways through the code bind."""
        for name, value in other.items():
            mine = self.bindings.get(name)
            if mine is None or mine == value:
                self.bindings[name] = value
            else:
                same = mine.type if mine.type is value.type else None
                self.bindings[name] = Val(mine.places | value.places, NOT_STATIC, same)

    def assign(self, target: ast.expr, value: Val) -> None:
        if isinstance(target, ast.Name):
            self.bindings[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                inner = each.value if isinstance(each, ast.Starred) else each
                self.assign(inner, Val(value.places) if not has_plain_items(value) else FRESH)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value)
        elif isinstance(target, ast.Attribute):
            base = self.expr(target.value, load=False)
            if target.attr == "grad" or is_tensor(base):
                self.write(base, "" if not is_tensor(base) else ".grads")
            if base.static and isinstance(base.obj, torch.nn.Module) and target.attr == "training":
                self.write(base, ".mode")
                return
            if not base.places:
                return  # an object that this block made
            for place in base.places:
                self.out.writes.setdefault(f"{place}.{target.attr}")
            self.retain(base, value)
        elif isinstance(target, ast.Subscript):
            base = self.expr(target.value, load=False)
            self.expr(target.slice)
            region = self.region(target.slice, base)
            self.read_if_container(base)
            self.write(base, region)
            self.retain(base, value)
        else:
            self.unknown(f"assignment to `{ast.unparse(target)}`", target)

    def retain(self, base: Val, value: Val) -> None:
        """A container or object that keeps a reference: what it holds may be read through it."""
        if is_tensor(base) or not base.places or not value.places:
            return
        for place in value.places:
            self.out.reads.setdefault(place)

    def read_if_container(self, base: Val) -> None:
        if not is_tensor(base):
            self.read(base)

    def aug_assign(self, node: ast.AugAssign) -> None:
        value = self.expr(node.value)
        self.read(value)
        if isinstance(node.target, ast.Name):
            old = self.bindings.get(node.target.id, FRESH)
            if is_immutable(old) or (not old.places and old.type is None):
                self.bindings[node.target.id] = Val(type=old.type)
                return
            self.read(old)
            self.write(old)
            return
        if isinstance(node.target, ast.Attribute):
            base = self.expr(node.target.value, load=False)
            for place in base.places:
                self.out.reads.setdefault(f"{place}.{node.target.attr}")
                self.out.writes.setdefault(f"{place}.{node.target.attr}")
            return
        base = self.base_of(node.target)
        region = (
            self.region(node.target.slice, base) if isinstance(node.target, ast.Subscript) else ""
        )
        self.read(base, region)
        self.write(base, region)

    def base_of(self, target: ast.expr) -> Val:
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            if isinstance(target, ast.Subscript):
                self.expr(target.slice)
            return self.expr(target.value, load=False)
        return self.expr(target, load=False)

    def region(self, index: ast.expr, base: Val) -> str:
        """The index of a subscript as the text of an effect entry, "" for the whole."""
        if not is_tensor(base):
            return ""
        axes = index.elts if isinstance(index, ast.Tuple) else [index]
        texts = [self.axis(a) for a in axes]
        return "" if all(t == ":" for t in texts) else f"[{', '.join(texts)}]"

    def axis(self, index: ast.expr) -> str:
        if isinstance(index, ast.Constant) and type(index.value) is int and index.value >= 0:
            return str(index.value)
        if isinstance(index, ast.Name):
            known_value = self.bindings.get(index.id)
            if known_value is not None and known_value.type is int:
                return index.id
        if isinstance(index, ast.BinOp) and isinstance(index.op, (ast.Add, ast.Sub, ast.Mult)):
            left, right = self.axis(index.left), self.axis(index.right)
            if ":" not in (left, right):
                op = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(index.op)]
                return f"({left} {op} {right})"
        return ":"

    # -- expressions ---------------------------------------------------------------------------

    def expr(self, node: ast.expr | None, load: bool = True) -> Val:
        """The value of an expression; with ``load`` its data counts as read."""
        if node is None:
            return FRESH
        value = self.walk(node)
        if load and not value.loaded:
            self.read(value)
            value = Val(value.places, value.obj, value.type)
        return value

    def walk(self, node: ast.expr) -> Val:
        if isinstance(node, ast.Constant):
            return Val(type=type(node.value), obj=node.value)
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript):
            base = self.expr(node.value, load=False)
            self.expr(node.slice)
            region = self.region(node.slice, base)
            self.read(base, region)
            if has_plain_items(base):
                return FRESH
            if (
                base.static
                and isinstance(base.obj, (torch.nn.ModuleList, torch.nn.Sequential))
                and isinstance(node.slice, ast.Constant)
            ):
                try:
                    inner = base.obj[node.slice.value]  # type: ignore[index]
                except (IndexError, TypeError, KeyError):
                    return Val(base.places)
                return Val(base.places, inner, type(inner))
            return Val(base.places, NOT_STATIC, base.type if is_tensor(base) else None)
        if isinstance(node, ast.Call):
            return effects_call.call(self, node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self.comprehension(node)
        if isinstance(node, ast.NamedExpr):
            value = self.expr(node.value)
            self.bindings[node.target.id] = value
            return value
        if isinstance(node, ast.Lambda):
            self.expr(node.body)
            return self.unknown("a lambda", node)
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return self.unknown(f"`{type(node).__name__.lower()}`", node)
        return self.compound(node)

    def compound(self, node: ast.expr) -> Val:
        """Operators and displays: read every part; the result may hold or be one of them."""
        places: frozenset[str] = frozenset()
        operands: list[Val] = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                value = self.expr(child)
                operands.append(value)
                places |= value.places
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
            known_types = [o.type for o in operands]
            # an operator of a user's class is a call of its method
            if any(t is not None and not issubclass(t, _OPERANDS) for t in known_types):
                return self.unknown(f"an operator of `{ast.unparse(node)}`", node)
            if isinstance(node, ast.Compare):
                return Val(type=torch.Tensor if torch.Tensor in known_types else None)
            result = (
                torch.Tensor
                if any(t is not None and issubclass(t, torch.Tensor) for t in known_types)
                else (
                    np.ndarray
                    if np.ndarray in known_types
                    else (known_types[0] if len(set(known_types)) == 1 else None)
                )
            )
            return Val(type=result)
        if isinstance(node, (ast.Tuple, ast.List, ast.Dict, ast.Set)):
            kind = {ast.Tuple: tuple, ast.List: list, ast.Dict: dict, ast.Set: set}[type(node)]
            return Val(places, NOT_STATIC, kind)
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue)):
            return Val(type=str)
        if isinstance(node, ast.Slice):
            return Val(type=slice)
        return Val(places)

    def attribute_object(self, base: Val, attr: str) -> Any:
        """An attribute of a live object, ``NOT_STATIC`` where reading it could do something."""
        return read_attribute(base.obj, attr)

    def trust_modules(self, target: Any) -> bool:
        """Whether a module with a forward of the user's own may be taken by its type: never; its
        source is walked instead."""
        return False

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Val:
        before = dict(self.bindings)
        for generator in node.generators:
            iterated = self.expr(generator.iter)
            self.assign(
                generator.target, Val(iterated.places) if not has_plain_items(iterated) else FRESH
            )
            for condition in generator.ifs:
                self.expr(condition)
        if isinstance(node, ast.DictComp):
            made = Val(self.expr(node.key).places | self.expr(node.value).places, NOT_STATIC, dict)
        else:
            kind = {ast.ListComp: list, ast.SetComp: set}.get(type(node))
            made = Val(self.expr(node.elt).places, NOT_STATIC, kind)
        self.bindings = before
        return made

    def name(self, node: ast.Name) -> Val:
        found = self.bindings.get(node.id)
        if found is not None:
            return found
        if node.id in self.closure:
            return Val(obj=self.closure[node.id], type=type(self.closure[node.id]))
        space = self.globals
        builtin = space.get("__builtins__", __builtins__)
        builtin = builtin if isinstance(builtin, dict) else vars(builtin)
        if node.id in space:
            value = space[node.id]
            place = self.names.name_of(value)
            return Val(
                frozenset() if place is None else frozenset({f"@{place}"}), value, type(value)
            )
        if node.id in builtin:
            return Val(obj=builtin[node.id], type=type(builtin[node.id]))
        return FRESH

    def attribute(self, node: ast.Attribute) -> Val:
        base = self.expr(node.value, load=False)
        if base.static:
            value = read_attribute(base.obj, node.attr)
            if value is not NOT_STATIC:
                if is_scalar(value) or not base.places:
                    for place in base.places:
                        self.out.reads.setdefault(f"{place}.{node.attr}")
                    return Val(frozenset() if is_scalar(value) else base.places, value, type(value))
                places = frozenset(self.canonical(f"{p}.{node.attr}", value) for p in base.places)
                if inspect.ismethod(value) or inspect.isbuiltin(value):
                    return Val(base.places, value, type(value))
                return Val(places, value, type(value), loaded=False)
            if base.places:
                raw = inspect.getattr_static(base.obj, node.attr, None)
                if isinstance(raw, property):
                    return self.unknown(f"property `{node.attr}`", node)
        if is_tensor(base) and node.attr in (
            "shape",
            "dtype",
            "device",
            "ndim",
            "requires_grad",
            "size",
        ):
            return FRESH
        if is_tensor(base) and node.attr == "grad":
            self.read(base, ".grads")
            return Val(base.places, NOT_STATIC, torch.Tensor)
        if is_tensor(base):
            self.read(base)
            return Val(
                base.places,
                NOT_STATIC,
                base.type if node.attr in ("T", "data", "mT", "real") else None,
            )
        for place in base.places:
            self.out.reads.setdefault(f"{place}.{node.attr}" if base.static else place)
        if base.type is not None and isinstance(
            inspect.getattr_static(base.type, node.attr, None), property
        ):
            module = base.type.__module__ or ""
            if not module.startswith(("torch", "numpy", "gymnasium", "builtins")):
                return self.unknown(f"property `{node.attr}`", node)
        return Val(base.places)
