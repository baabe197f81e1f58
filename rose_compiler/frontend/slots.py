"""Attributes that hold what one step hands to the next: ``self.obs``, ``runner.hidden``.

An attribute of a live object that the program itself assigns is a place in memory. Its reads and
assignments become operations of their own here, so that
:mod:`~rose_compiler.frontend.promote` can tell them from what else reads or writes the object.
"""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.evaluation import children, splits
from rose_compiler.frontend.scope import Scope, Static, read_attribute

#: What an attribute may hold to be handed on as a value: nothing that is changed as a whole.
_HELD = (torch.Tensor, np.ndarray, tuple, type(None))


def slot(expression: ast.expr, scope: Scope) -> Static | None:
    """The owner, if an expression is an attribute of a live object that the program may assign
    and that reading and assigning does nothing else for."""
    if not isinstance(expression, ast.Attribute) or expression.attr.startswith("__"):
        return None
    owner = scope.static(expression.value)
    if owner is None or not owner.root or not plain_attribute(owner.value, expression.attr):
        return None
    if not scope.session.changes.attribute(owner.value, expression.attr):
        return None
    held = read_attribute(owner.value, expression.attr)
    return owner if type(held) in _HELD or isinstance(held, torch.Tensor) else None


def plain_attribute(owner: Any, name: str) -> bool:
    """Whether an attribute is an entry of the object's own dictionary, whoever reads or sets it."""
    if isinstance(owner, (type, super, torch.nn.Module)):
        return False
    cls: Any = type(owner)
    if cls.__setattr__ is not object.__setattr__ or name not in getattr(owner, "__dict__", {}):
        return False
    if cls.__getattribute__ is not object.__getattribute__:
        return False
    raw = inspect.getattr_static(cls, name, None)
    return not (hasattr(type(raw), "__set__") or hasattr(type(raw), "__delete__"))


def based(
    expression: ast.Attribute, owner: Static, scope: Scope
) -> tuple[ast.Attribute, str | None]:
    """The attribute with its owner under one name, and that name if it is a new one."""
    made = copy.copy(expression)
    if isinstance(expression.value, ast.Name):
        return made, None
    stem = expression.value.attr if isinstance(expression.value, ast.Attribute) else "owner"
    name = scope.fresh(stem)
    scope.bindings[name] = owner
    made.value = ast.copy_location(ast.Name(name, ast.Load()), expression)
    return made, name


def first_reads(expression: ast.expr, scope: Scope) -> list[ast.Attribute]:
    """The attributes of this kind in an expression that are read before it calls anything but
    functions of libraries: nothing has assigned them by then."""
    found: list[ast.Attribute] = []
    if splits(expression):
        _first_reads(expression, scope, found)
    return found


def _first_reads(expression: ast.expr, scope: Scope, found: list[ast.Attribute]) -> bool:
    """Collect them; whether nothing but reading and arithmetic was done."""
    if slot(expression, scope) is not None:
        assert isinstance(expression, ast.Attribute)
        found.append(expression)
        return True
    if isinstance(expression, (ast.Constant, ast.Name)):
        return True
    if isinstance(expression, ast.Attribute):
        return scope.static(expression) is not None or (
            _first_reads(expression.value, scope, found) and False
        )
    parts = children(expression)
    if not all(_first_reads(child, scope, found) for _, _, child in parts):
        return False
    if isinstance(expression, ast.Call):
        function = scope.static(expression.func)
        module = "" if function is None else getattr(function.value, "__module__", None) or "numpy"
        return module.split(".")[0] in ("builtins", "numpy", "torch", "math")
    return isinstance(expression, (ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.Subscript))


def replaced(expression: ast.expr, names: dict[int, str]) -> ast.expr:
    """An expression with names in the place of some of its parts, by their identity."""
    if id(expression) in names:
        name = names[id(expression)]
        return ast.copy_location(ast.Name(name, ast.Load()), expression)
    made = copy.copy(expression)
    for field, index, child in children(made):
        new = replaced(child, names)
        if new is child:
            continue
        if index is None:
            setattr(made, field, new)
            continue
        items = list(getattr(made, field))
        old = items[index]
        items[index] = ast.keyword(old.arg, new) if isinstance(old, ast.keyword) else new
        setattr(made, field, items)
    return made


def spelled_targets(
    targets: list[ast.expr], scope: Scope
) -> tuple[list[ast.expr], list[tuple[ast.Attribute, str]]] | None:
    """Assignment targets with a new variable in the place of each such attribute, and which
    variable is to be put where, in order; ``None`` where there is none, or other targets that
    assigning to does more than bind."""
    made: list[ast.expr] = []
    stores: list[tuple[ast.Attribute, str]] = []

    def spelled(target: ast.expr) -> ast.expr | None:
        if isinstance(target, ast.Name):
            return target
        if isinstance(target, ast.Starred) and isinstance(target.value, ast.Name):
            return target
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = [spelled(e) for e in target.elts]
            if any(p is None for p in parts):
                return None
            new = copy.copy(target)
            new.elts = [p for p in parts if p is not None]
            return new
        if isinstance(target, ast.Attribute) and slot(target, scope) is not None:
            name = scope.local(target.attr.lstrip("_") or "value")
            stores.append((target, name))
            return ast.copy_location(ast.Name(name, ast.Store()), target)
        return None

    for target in targets:
        new = spelled(target)
        if new is None:
            return None
        made.append(new)
    return (made, stores) if stores else None
